//! Updates to time the host optimizer with, for the planner's probe and for benchmarks.
use super::{Pool, TensorUpdate, divide};
use crate::adamw::AdamwScalars;
use crate::error::Result;
use crate::layout::{Dtype, Moments, Precision, StateFormat, TENSOR_ALIGN};
use crate::store::arena::{Arena, ArenaOptions};

/// An update of `numel` parameters, bf16 gradients and a split master, in memory of its own. Of every 1,000 elements the first `cold_per_mille` see no
/// gradient and, where moments are fp32, have moments about to leave the range of normal numbers; others start at zero.
///
/// # Errors
/// [`crate::Error::HostMemory`] when the system refuses the memory, [`crate::Error::Worker`] when a thread fails.
pub fn sample(pool: &Pool, numel: u64, cold_per_mille: u64, state: StateFormat) -> Result<TensorUpdate> {
    let padded = numel.checked_next_multiple_of(TENSOR_ALIGN).unwrap_or(u64::MAX);
    let low = state.residual_size(Precision::Bf16);
    let each = padded.saturating_mul(4 + low).saturating_add(2 * state.moments.bytes(padded));
    // Each plane begins on a line of its own.
    let mut arena = Arena::new(each.saturating_add(5 * 256), ArenaOptions { huge_pages: true, pool: Some(pool) })?;
    let mut plane = |bytes: u64| {
        let bytes = usize::try_from(bytes).map_err(|_| crate::Error::AddressSpace { bytes })?;
        arena.carve(bytes as u64, 256)
    };
    let update = TensorUpdate {
        exp_avg: plane(state.moments.bytes(numel))?,
        exp_avg_sq: plane(state.moments.bytes(numel))?,
        state,
        first: 0,
        weights: plane(numel * 2)?,
        residual: Some(plane(numel * low)?),
        grad: plane(numel * 2)?,
        grad_dtype: Dtype::Bf16,
        numel,
        scalars: AdamwScalars::new(1e-4, (0.9, 0.999), 1e-8, 0.01, 10, 1.0)?,
    };
    divide(pool, &[numel], |s| {
        let cold = |i: usize| (s.start + i as u64) % 1000 < cold_per_mille;
        for (i, w) in update.weights.elements_mut::<u16>(s.start, s.len).iter_mut().enumerate() {
            *w = 0x3c00 + (i % 251) as u16;
        }
        for (i, g) in update.grad.elements_mut::<u16>(s.start, s.len).iter_mut().enumerate() {
            *g = if cold(i) { 0 } else { 0x3a00 + (i % 127) as u16 };
        }
        if state.moments != Moments::Fp32 {
            return;
        }
        for (i, m) in update.exp_avg.elements_mut::<f32>(s.start, s.len).iter_mut().enumerate() {
            *m = if cold(i) { f32::MIN_POSITIVE } else { 1e-3 };
        }
        for (i, v) in update.exp_avg_sq.elements_mut::<f32>(s.start, s.len).iter_mut().enumerate() {
            *v = if cold(i) { f32::MIN_POSITIVE } else { 1e-6 };
        }
    })?;
    Ok(update)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adamw::Isa;
    use crate::host::Affinity;
    use crate::optimizer::Adamw;

    #[test]
    fn cold_elements_see_no_gradient_and_their_moments_settle_at_zero() {
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        let updates = [sample(&pool, 5000, 900, StateFormat::default()).unwrap()];
        Adamw::new(Isa::best()).update(&pool, &updates).unwrap();
        let moments = updates[0].exp_avg.elements::<f32>(0, 5000).to_vec();
        assert_eq!(moments.iter().filter(|&&m| m == 0.0).count(), 4500);
        assert!(moments.iter().all(|&m| m == 0.0 || m.is_normal()));
    }
}
