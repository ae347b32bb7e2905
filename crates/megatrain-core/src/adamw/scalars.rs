//! Coefficients of an AdamW update.
use super::kernels::ieee;
use crate::adamw::kernels::compact::key_from;
use crate::error::{Error, Result};
use crate::random::SplitMix;

/// Coefficients of one AdamW update, formed in f64 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct AdamwScalars {
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    /// 1 - lr * weight_decay
    pub decay: f32,
    /// lr / (1 - beta1^t)
    pub step_size: f32,
    /// 1 / sqrt(1 - beta2^t)
    pub inv_sqrt_bias2: f32,
    pub eps: f32,
    /// Multiplies the gradient first: the clip coefficient.
    pub grad_scale: f32,
    /// Key of the stochastic rounding of smaller states: see [`AdamwScalars::rounded_by`].
    pub rounding: u64,
}

impl AdamwScalars {
    /// The coefficients of update number `step` (counted from 1), formed in f64 and rounded once.
    ///
    /// # Errors
    /// [`Error`] when a hyper-parameter is outside what `torch.optim.AdamW` takes, or `step` is 0.
    pub fn new(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: u64, grad_scale: f64) -> Result<Self> {
        let not_negative = |name: &str, value: f64| {
            let fine = value.is_finite() && value >= 0.0;
            if fine {
                Ok(())
            } else {
                Err(Error::WrongNumber { what: name.to_owned(), value, allowed: "finite and at least 0" })
            }
        };
        not_negative("lr", lr)?;
        not_negative("eps", eps)?;
        not_negative("weight_decay", weight_decay)?;
        for (i, beta) in [betas.0, betas.1].into_iter().enumerate() {
            if !(0.0..1.0).contains(&beta) {
                let what = format!("betas[{i}]");
                return Err(Error::WrongNumber { what, value: beta, allowed: "at least 0 and below 1" });
            }
        }
        if step == 0 {
            let why = "AdamW counts updates from 1";
            return Err(Error::OutOfRange { setting: "step", value: 0, least: 1, most: None, why });
        }
        if !grad_scale.is_finite() {
            let what = "grad_scale".to_owned();
            return Err(Error::WrongNumber { what, value: grad_scale, allowed: "finite" });
        }
        Ok(ieee(|| Self::form(lr, betas, eps, weight_decay, step, grad_scale)))
    }

    /// The same with the rounding of a run's `seed`, of update number `step` of the parameter called `name`.
    #[must_use]
    pub fn rounded_by(self, seed: u64, name: &str, step: u64) -> Self {
        // FNV-1a, so that a parameter has the same key whatever unit it is in.
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let draw = |from: u64| SplitMix(from).draw();
        Self { rounding: draw(draw(draw(seed) ^ name) ^ step), ..self }
    }

    /// The same for a part of a parameter that begins with its element number `begin`.
    #[must_use]
    pub const fn of_part(self, begin: u64) -> Self {
        Self { rounding: key_from(self.rounding, begin), ..self }
    }

    fn form(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: u64, grad_scale: f64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "exact below 2^53 updates")]
        let t = step as f64;
        let (bias1, bias2) = (1.0 - betas.0.powf(t), 1.0 - betas.1.powf(t));
        #[expect(clippy::cast_possible_truncation, reason = "each coefficient is rounded once, here")]
        let scalars = Self {
            beta1: betas.0 as f32,
            one_minus_beta1: (1.0 - betas.0) as f32,
            beta2: betas.1 as f32,
            one_minus_beta2: (1.0 - betas.1) as f32,
            decay: (1.0 - lr * weight_decay) as f32,
            step_size: (lr / bias1) as f32,
            inv_sqrt_bias2: (1.0 / bias2.sqrt()) as f32,
            eps: eps as f32,
            grad_scale: grad_scale as f32,
            rounding: 0,
        };
        scalars
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyper_parameters_that_pytorch_refuses_are_refused_by_name() {
        let refuse = |lr, betas, eps, decay, step, scale| {
            AdamwScalars::new(lr, betas, eps, decay, step, scale).unwrap_err().to_string()
        };
        assert!(refuse(-1.0, (0.9, 0.999), 1e-8, 0.0, 1, 1.0).starts_with("lr"));
        assert!(refuse(f64::NAN, (0.9, 0.999), 1e-8, 0.0, 1, 1.0).starts_with("lr"));
        assert!(refuse(1e-3, (0.9, 1.0), 1e-8, 0.0, 1, 1.0).starts_with("betas[1]"));
        assert!(refuse(1e-3, (0.9, 0.999), -1e-8, 0.0, 1, 1.0).starts_with("eps"));
        assert!(refuse(1e-3, (0.9, 0.999), 1e-8, -0.1, 1, 1.0).starts_with("weight_decay"));
        assert!(refuse(1e-3, (0.9, 0.999), 1e-8, 0.0, 0, 1.0).contains("from 1"));
        assert!(refuse(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, f64::INFINITY).contains("scale"));
    }

    #[test]
    fn coefficients_are_formed_in_f64_and_rounded_once() {
        let s = AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.1, 1, 0.5).unwrap();
        assert_eq!(s.one_minus_beta2, 0.001f32);
        assert_ne!(s.one_minus_beta2, 1.0 - 0.999f32);
        assert_eq!(s.step_size, 0.01f32);
        assert_eq!(s.decay, 0.9999f32);
        assert_eq!(s.grad_scale, 0.5);
    }
}
