//! AdamW over byte copies of one parameter's planes, for the simulated device.
use crate::adamw::AdamwScalars;
use crate::adamw::kernels::{self, Isa, Values, Weights};
use crate::layout::Dtype;

/// The planes of one parameter, bytes in the machine's order.
pub(super) struct Planes {
    pub(super) weights: Vec<u8>,
    pub(super) residual: Option<Vec<u8>>,
    pub(super) exp_avg: Vec<u8>,
    pub(super) exp_avg_sq: Vec<u8>,
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks::<2>().0.iter().map(|b| u16::from_ne_bytes(*b)).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
}

fn put<T: Copy, const N: usize>(bytes: &mut [u8], values: &[T], to_bytes: impl Fn(T) -> [u8; N]) {
    for (to, &value) in bytes.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *to = to_bytes(value);
    }
}

/// The sum of squares of one block of a gradient.
pub(super) fn block_sum(bytes: &[u8], dtype: Dtype) -> f64 {
    let isa = Isa::best();
    if dtype == Dtype::Bf16 {
        kernels::sum_squares(isa, Values::Bf16(&halves(bytes)))
    } else {
        kernels::sum_squares(isa, Values::F32(&floats(bytes)))
    }
}

impl Planes {
    pub(super) fn update(&mut self, grad: &[u8], grad_dtype: Dtype, scalars: &AdamwScalars) {
        let (narrow, wide) = if grad_dtype == Dtype::Bf16 { (halves(grad), vec![]) } else { (vec![], floats(grad)) };
        let grad = if grad_dtype == Dtype::Bf16 { Values::Bf16(&narrow) } else { Values::F32(&wide) };
        let (mut exp_avg, mut exp_avg_sq) = (floats(&self.exp_avg), floats(&self.exp_avg_sq));
        let isa = Isa::best();
        match &mut self.residual {
            Some(residual) => {
                let (mut hi, mut lo) = (halves(&self.weights), halves(residual));
                let weights = Weights::Split { hi: &mut hi, lo: &mut lo };
                kernels::adamw(isa, weights, &mut exp_avg, &mut exp_avg_sq, grad, scalars);
                put(&mut self.weights, &hi, u16::to_ne_bytes);
                put(residual, &lo, u16::to_ne_bytes);
            }
            None => {
                let mut full = floats(&self.weights);
                kernels::adamw(isa, Weights::Full(&mut full), &mut exp_avg, &mut exp_avg_sq, grad, scalars);
                put(&mut self.weights, &full, f32::to_ne_bytes);
            }
        }
        put(&mut self.exp_avg, &exp_avg, f32::to_ne_bytes);
        put(&mut self.exp_avg_sq, &exp_avg_sq, f32::to_ne_bytes);
    }
}
