//! Updates to time the host optimizer with, for the planner's probe and for benchmarks.
use super::{Pool, TensorUpdate, divide};
use crate::adamw::AdamwScalars;
use crate::error::Result;
use crate::layout::{Dtype, TENSOR_ALIGN};
use crate::store::arena::{Arena, ArenaOptions};

/// Bytes that an update of a split master by a bf16 gradient moves a parameter: 14 read, 12 written.
pub const UPDATE_BYTES: u64 = 26;
/// Bytes of its planes a parameter, gradient included.
const PLANE_BYTES: u64 = 14;

/// An update of `numel` parameters in memory of its own. Of every 1,000 elements the first `cold_per_mille` see no
/// gradient and have moments about to leave the range of normal numbers.
///
/// # Errors
/// [`crate::Error::HostMemory`] when the system refuses the memory, [`crate::Error::Worker`] when a thread fails.
pub fn sample(pool: &Pool, numel: u64, cold_per_mille: u64) -> Result<TensorUpdate> {
    let padded = numel.checked_next_multiple_of(TENSOR_ALIGN).unwrap_or(u64::MAX);
    let mut arena =
        Arena::new(padded.saturating_mul(PLANE_BYTES), ArenaOptions { huge_pages: true, pool: Some(pool) })?;
    let update = TensorUpdate {
        exp_avg: arena.carve(padded * 4, 256)?.slice(0, byte_len(numel, 4)),
        exp_avg_sq: arena.carve(padded * 4, 256)?.slice(0, byte_len(numel, 4)),
        weights: arena.carve(padded * 2, 256)?.slice(0, byte_len(numel, 2)),
        residual: Some(arena.carve(padded * 2, 256)?.slice(0, byte_len(numel, 2))),
        grad: arena.carve(padded * 2, 256)?.slice(0, byte_len(numel, 2)),
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
        for (i, m) in update.exp_avg.elements_mut::<f32>(s.start, s.len).iter_mut().enumerate() {
            *m = if cold(i) { f32::MIN_POSITIVE } else { 1e-3 };
        }
        for (i, v) in update.exp_avg_sq.elements_mut::<f32>(s.start, s.len).iter_mut().enumerate() {
            *v = if cold(i) { f32::MIN_POSITIVE } else { 1e-6 };
        }
    })?;
    Ok(update)
}

fn byte_len(numel: u64, size: u64) -> usize {
    usize::try_from(numel * size).expect("an arena of that size was made")
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
        let updates = [sample(&pool, 5000, 900).unwrap()];
        Adamw::new(Isa::best()).update(&pool, &updates).unwrap();
        let moments = updates[0].exp_avg.elements::<f32>(0, 5000).to_vec();
        assert_eq!(moments.iter().filter(|&&m| m == 0.0).count(), 4500);
        assert!(moments.iter().all(|&m| m == 0.0 || m.is_normal()));
    }
}
