//! What this host's memory and optimizer reach, for the planner and for benchmarks.
use std::time::Instant;

use super::{Adamw, Pool, TensorUpdate, divide};
use crate::device::AdamwScalars;
use crate::error::Result;
use crate::layout::{Dtype, TENSOR_ALIGN};
use crate::store::arena::{Arena, ArenaOptions};

/// Bytes that an update of a split master by a bf16 gradient moves a parameter: 14 read, 12 written.
pub const UPDATE_BYTES: u64 = 26;
/// Bytes of its planes a parameter, gradient included.
const PLANE_BYTES: u64 = 14;
/// Timed passes; the best counts, since whatever else runs only makes one slower.
const PASSES: usize = 3;

/// Measured rates; GB are 10^9 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostRates {
    /// GB/s of the optimizer's memory traffic without its arithmetic.
    pub touch_gbs: f64,
    /// Parameters a second of AdamW over split planes with bf16 gradients.
    pub adamw_params_per_s: f64,
    /// GB/s copied from memory to memory (each byte counted once).
    pub copy_gbs: f64,
}

/// Measures with about `bytes` bytes of fresh memory and the pool's threads; about a second for each 10 GB.
///
/// # Errors
/// [`crate::Error::HostMemory`] when the system refuses the memory, [`crate::Error::Worker`] when a thread fails.
pub fn measure(adamw: Adamw, pool: &Pool, bytes: u64) -> Result<HostRates> {
    let numel = (bytes / PLANE_BYTES).max(TENSOR_ALIGN).next_multiple_of(TENSOR_ALIGN);
    let update = sample(pool, numel, 0)?;
    let updates = [update];
    let adamw_s = best(|| adamw.update(pool, &updates))?;
    let touch_s = best(|| adamw.touch(pool, &updates))?;
    let [TensorUpdate { exp_avg, exp_avg_sq, .. }] = &updates;
    let copy_s = best(|| {
        divide(pool, &[numel], |s| {
            exp_avg.elements::<f32>(s.start, s.len).copy_from_slice(&exp_avg_sq.elements(s.start, s.len));
        })
    })?;
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let numel = numel as f64;
    Ok(HostRates {
        touch_gbs: numel * UPDATE_BYTES as f64 / touch_s / 1e9,
        adamw_params_per_s: numel / adamw_s,
        copy_gbs: numel * 4.0 / copy_s / 1e9,
    })
}

/// An update of `numel` parameters in memory of its own. Of every 1,000 elements the first `cold_per_mille` see no
/// gradient and have moments about to leave the range of normal numbers.
///
/// # Errors
/// [`crate::Error::HostMemory`] when the system refuses the memory, [`crate::Error::Worker`] when a thread fails.
pub fn sample(pool: &Pool, numel: u64, cold_per_mille: u64) -> Result<TensorUpdate> {
    let padded = numel.next_multiple_of(TENSOR_ALIGN);
    let mut arena = Arena::new(padded * PLANE_BYTES, ArenaOptions { huge_pages: true, pool: Some(pool) })?;
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
        for (i, w) in update.weights.elements::<u16>(s.start, s.len).iter_mut().enumerate() {
            *w = 0x3c00 + (i % 251) as u16;
        }
        for (i, g) in update.grad.elements::<u16>(s.start, s.len).iter_mut().enumerate() {
            *g = if cold(i) { 0 } else { 0x3a00 + (i % 127) as u16 };
        }
        for (i, m) in update.exp_avg.elements::<f32>(s.start, s.len).iter_mut().enumerate() {
            *m = if cold(i) { f32::MIN_POSITIVE } else { 1e-3 };
        }
        for (i, v) in update.exp_avg_sq.elements::<f32>(s.start, s.len).iter_mut().enumerate() {
            *v = if cold(i) { f32::MIN_POSITIVE } else { 1e-6 };
        }
    })?;
    Ok(update)
}

fn byte_len(numel: u64, size: u64) -> usize {
    usize::try_from(numel * size).expect("an arena of that size was made")
}

/// Seconds of the fastest of a few passes, after one that warms up.
fn best(mut pass: impl FnMut() -> Result<()>) -> Result<f64> {
    pass()?;
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let start = Instant::now();
        pass()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{Affinity, Isa};

    #[test]
    fn rates_are_measured_and_positive() {
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        let rates = measure(Adamw::new(Isa::best()), &pool, 1 << 20).unwrap();
        assert!(rates.touch_gbs > 0.0 && rates.adamw_params_per_s > 0.0 && rates.copy_gbs > 0.0, "{rates:?}");
    }
}
