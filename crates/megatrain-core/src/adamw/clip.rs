//! The global gradient norm and the clip coefficient, as `torch.nn.utils.clip_grad_norm_` defines them.
use super::kernels::ieee;

/// Added to the norm in the denominator, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// The norm of all gradients from the sums of squares of their blocks. The blocks are fixed by the parameters alone
/// (`UnitLayout::norm_blocks`), and what each addition rounds off is summed too (Neumaier, "Rundungsfehleranalyse einiger
/// Verfahren zur Summation endlicher Summen", 1974), so the norm does not depend on threads, placement, or in which units
/// parameters are and in which order. Not finite when a gradient is not.
#[must_use]
pub fn global_norm(partials: impl IntoIterator<Item = f64>) -> f64 {
    ieee(|| {
        let (mut sum, mut rest) = (0.0f64, 0.0f64);
        for partial in partials {
            let total = sum + partial;
            let (larger, smaller) = if sum >= partial { (sum, partial) } else { (partial, sum) };
            rest += (larger - total) + smaller;
            sum = total;
        }
        if sum.is_finite() { (sum + rest).sqrt() } else { sum.sqrt() }
    })
}

/// What every gradient is multiplied with: min(1, `max_norm` / (`norm` + 1e-6)), rounded once to fp32. The norm must be
/// finite; the step is skipped otherwise.
///
/// ```
/// use megatrain_core::adamw::clip::{clip_coefficient, global_norm};
///
/// let norm = global_norm([9.0, 16.0]); // the sums of squares of two blocks
/// assert_eq!(norm, 5.0);
/// assert_eq!(clip_coefficient(norm, 10.0), 1.0);
/// assert!((clip_coefficient(norm, 1.0) - 0.2).abs() < 1e-6);
/// ```
#[must_use]
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "rounded once, here")]
    let coefficient = ieee(|| (max_norm / (norm + CLIP_EPS)).min(1.0) as f32);
    coefficient
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_is_the_root_of_the_sum_whatever_its_order() {
        assert_eq!(global_norm([9.0, 16.0]), 5.0);
        let mut random = crate::random::SplitMix(7);
        let mut parts: Vec<f64> = (0..10_000).map(|_| (random.draw() % 1_000_003) as f64 * 1e-7).collect();
        let norm = global_norm(parts.iter().copied());
        parts.reverse();
        assert_eq!(global_norm(parts.iter().copied()), norm);
        parts.sort_by(f64::total_cmp);
        assert_eq!(global_norm(parts.iter().copied()), norm);
        let in_order: f64 = parts.iter().sum();
        parts.rotate_left(5_000);
        assert_ne!(in_order, parts.iter().sum::<f64>(), "where a plain sum depends on it");
        assert_eq!(global_norm([]), 0.0);
        assert!(global_norm([1.0, f64::NAN]).is_nan());
        assert_eq!(global_norm([1.0, f64::INFINITY]), f64::INFINITY);
    }

    #[test]
    fn the_coefficient_is_that_of_pytorch() {
        assert_eq!(clip_coefficient(50.0, 1.0), (1.0 / (50.0 + 1e-6)) as f32);
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.0, 0.0), 0.0);
        // At the limit the coefficient is just below one, as in PyTorch.
        assert!(clip_coefficient(1.0, 1.0) < 1.0);
    }
}
