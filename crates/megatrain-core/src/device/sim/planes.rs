//! AdamW over byte copies of one parameter's planes, for the simulated device.
use crate::device::AdamwScalars;
use crate::layout::Dtype;

/// The planes of one parameter, little-endian bytes.
pub(super) struct Planes {
    pub(super) weights: Vec<u8>,
    pub(super) residual: Option<Vec<u8>>,
    pub(super) exp_avg: Vec<u8>,
    pub(super) exp_avg_sq: Vec<u8>,
}

fn u16_at(bytes: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])
}

fn f32_at(bytes: &[u8], i: usize) -> f32 {
    f32::from_le_bytes(std::array::from_fn(|k| bytes[4 * i + k]))
}

fn put_f32(bytes: &mut [u8], i: usize, value: f32) {
    bytes[4 * i..4 * i + 4].copy_from_slice(&value.to_le_bytes());
}

fn flushed(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { 0.0 } else { value }
}

impl Planes {
    pub(super) fn update(&mut self, grad: &[u8], grad_dtype: Dtype, k: &AdamwScalars) {
        for i in 0..self.exp_avg.len() / 4 {
            let grad = if grad_dtype == Dtype::Bf16 {
                f32::from_bits(u32::from(u16_at(grad, i)) << 16)
            } else {
                f32_at(grad, i)
            };
            let weight = match &self.residual {
                Some(lo) => {
                    let low = i32::from(u16_at(lo, i).cast_signed()).cast_unsigned();
                    f32::from_bits((u32::from(u16_at(&self.weights, i)) << 16).wrapping_add(low))
                }
                None => f32_at(&self.weights, i),
            };
            let g = grad * k.grad_scale;
            let m = flushed(k.beta1.mul_add(f32_at(&self.exp_avg, i), k.one_minus_beta1 * g));
            let v = flushed(k.beta2.mul_add(f32_at(&self.exp_avg_sq, i), (k.one_minus_beta2 * g) * g));
            let d = v.sqrt().mul_add(k.inv_sqrt_bias2, k.eps);
            let w = (-k.step_size).mul_add(m / d, weight * k.decay);
            put_f32(&mut self.exp_avg, i, m);
            put_f32(&mut self.exp_avg_sq, i, v);
            match &mut self.residual {
                Some(lo) => {
                    let bits = w.to_bits();
                    let high = (bits.wrapping_add(0x8000) >> 16) as u16;
                    self.weights[2 * i..2 * i + 2].copy_from_slice(&high.to_le_bytes());
                    lo[2 * i..2 * i + 2].copy_from_slice(&(bits as u16).to_le_bytes());
                }
                None => put_f32(&mut self.weights, i, w),
            }
        }
    }
}
