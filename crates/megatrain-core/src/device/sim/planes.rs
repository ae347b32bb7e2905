//! AdamW over byte copies of one parameter's planes, for the simulated device.
use crate::adamw::AdamwScalars;
use crate::adamw::kernels::compact::{CompactMoments, CompactWeights, adamw_compact};
use crate::adamw::kernels::{self, Isa, Values, Weights};
use crate::layout::{Dtype, Master, Moments, StateFormat};

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
    pub(super) fn update(
        &mut self,
        grad: &[u8],
        grad_dtype: Dtype,
        format: StateFormat,
        scalars: &AdamwScalars,
        first: u64,
    ) {
        let (narrow, wide) = if grad_dtype == Dtype::Bf16 { (halves(grad), vec![]) } else { (vec![], floats(grad)) };
        let grad = if grad_dtype == Dtype::Bf16 { Values::Bf16(&narrow) } else { Values::F32(&wide) };
        if format != StateFormat::default() {
            return self.update_compact(grad, format, scalars, first);
        }
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

    fn update_compact(&mut self, grad: Values<'_>, format: StateFormat, scalars: &AdamwScalars, first: u64) {
        let (mut hi, mut full) = (halves(&self.weights), floats(&self.weights));
        let mut lo = self.residual.as_deref().map(halves).unwrap_or_default();
        let (mut m, mut v) = (floats(&self.exp_avg), floats(&self.exp_avg_sq));
        let (mut m_half, mut v_half) = (halves(&self.exp_avg), halves(&self.exp_avg_sq));
        let weights = match (&mut self.residual, format.master) {
            (Some(_), Master::Bits32) => CompactWeights::Split32(&mut hi, &mut lo),
            (Some(residual), Master::Bits24) => CompactWeights::Split24(&mut hi, residual),
            (None, _) => CompactWeights::Full(&mut full),
        };
        let moments = match format.moments {
            Moments::Fp32 => CompactMoments::Fp32(&mut m, &mut v),
            Moments::Bf16 => CompactMoments::Bf16(&mut m_half, &mut v_half),
            Moments::Bits8 => CompactMoments::Bits8(&mut self.exp_avg, &mut self.exp_avg_sq),
        };
        adamw_compact(Isa::best(), weights, moments, grad, scalars, first);
        match format.moments {
            Moments::Fp32 => {
                put(&mut self.exp_avg, &m, f32::to_ne_bytes);
                put(&mut self.exp_avg_sq, &v, f32::to_ne_bytes);
            }
            Moments::Bf16 => {
                put(&mut self.exp_avg, &m_half, u16::to_ne_bytes);
                put(&mut self.exp_avg_sq, &v_half, u16::to_ne_bytes);
            }
            Moments::Bits8 => {}
        }
        match (&mut self.residual, format.master) {
            (Some(residual), Master::Bits32) => {
                put(&mut self.weights, &hi, u16::to_ne_bytes);
                put(residual, &lo, u16::to_ne_bytes);
            }
            (Some(_), Master::Bits24) => put(&mut self.weights, &hi, u16::to_ne_bytes),
            (None, _) => put(&mut self.weights, &full, f32::to_ne_bytes),
        }
    }
}
