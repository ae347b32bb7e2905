//! The loops over weights, moments and gradients: AdamW, sums of squares, conversions.
//!
//! AdamW's arithmetic is written down once, in `scalar`, and followed operation by operation by `avx2`, `avx512`
//! and the device's own body; all are bit-equal. Per element, in fp32, every operation rounded to nearest:
//!
//! ```text
//! g = grad * grad_scale
//! m = settle(fma(beta1, m, one_minus_beta1 * g))
//! v = settle(fma(beta2, v, (one_minus_beta2 * g) * g))
//! d = fma(sqrt(v), inv_sqrt_bias2, eps)
//! w = canonical(fma(-step_size, m / d, w * decay))
//! ```
//!
//! `settle` replaces |x| < 2^-126 (a subnormal, or either zero) by +0, by comparison: a row that sees no gradient would
//! otherwise decay into subnormals and slow the loop down eightfold. `settle` and `canonical` replace any NaN by
//! [`CANONICAL_NAN`], since its payload would depend on the instruction, and because an arbitrary one does not survive
//! the rounding to the upper plane.
//!
//! Whatever mode the calling thread's floating-point unit is in (libraries loaded beside us switch flush-to-zero on),
//! these functions compute in the IEEE default mode and put the caller's back.
use std::ops::Range;
use std::sync::OnceLock;

use crate::adamw::AdamwScalars;
use crate::error::{Error, Result};

/// The loop around a vector body's primitives, once for all instruction sets: whole vectors in place, then the odd end
/// through padded copies, so that no element takes another arithmetic.
#[cfg(target_arch = "x86_64")]
macro_rules! vector_sweep {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        pub(super) fn adamw(planes: Planes<'_>, scalars: &AdamwScalars, split: bool, narrow: bool) {
            match (split, narrow) {
                (true, true) => sweep::<true, true>(planes, scalars),
                (true, false) => sweep::<true, false>(planes, scalars),
                (false, true) => sweep::<false, true>(planes, scalars),
                (false, false) => sweep::<false, false>(planes, scalars),
            }
        }

        #[target_feature(enable = $features)]
        fn sweep<const SPLIT: bool, const NARROW: bool>(p: Planes<'_>, scalars: &AdamwScalars) {
            let c = Constants::new(scalars);
            let (hi, hi_end) = p.hi.as_chunks_mut::<LANES>();
            let (lo, lo_end) = p.lo.as_chunks_mut::<LANES>();
            let (weights, weights_end) = p.weights.as_chunks_mut::<LANES>();
            let (exp_avg, exp_avg_end) = p.exp_avg.as_chunks_mut::<LANES>();
            let (exp_avg_sq, exp_avg_sq_end) = p.exp_avg_sq.as_chunks_mut::<LANES>();
            let (grad_bf16, grad_bf16_end) = p.grad_bf16.as_chunks::<LANES>();
            let (grad_f32, grad_f32_end) = p.grad_f32.as_chunks::<LANES>();
            for i in 0..exp_avg.len() {
                if i % (TURN / LANES) == 0 {
                    // Past the end these lines are not ours, which a hint may be.
                    let (near, far) = (i + AHEAD / LANES, i + AHEAD / LANES + 1);
                    fetch(exp_avg.as_ptr().wrapping_add(near));
                    fetch(exp_avg.as_ptr().wrapping_add(far));
                    fetch(exp_avg_sq.as_ptr().wrapping_add(near));
                    fetch(exp_avg_sq.as_ptr().wrapping_add(far));
                    if SPLIT {
                        fetch(hi.as_ptr().wrapping_add(near));
                        fetch(lo.as_ptr().wrapping_add(near));
                    } else {
                        fetch(weights.as_ptr().wrapping_add(near));
                        fetch(weights.as_ptr().wrapping_add(far));
                    }
                    if NARROW {
                        fetch(grad_bf16.as_ptr().wrapping_add(near));
                    } else {
                        fetch(grad_f32.as_ptr().wrapping_add(near));
                        fetch(grad_f32.as_ptr().wrapping_add(far));
                    }
                }
                let weight = if SPLIT { load_split(&hi[i], &lo[i]) } else { load_f32(&weights[i]) };
                let grad = if NARROW { load_bf16(&grad_bf16[i]) } else { load_f32(&grad_f32[i]) };
                let (w, m, v) = step(weight, load_f32(&exp_avg[i]), load_f32(&exp_avg_sq[i]), grad, &c);
                store_f32(&mut exp_avg[i], m);
                store_f32(&mut exp_avg_sq[i], v);
                if SPLIT {
                    store_split(&mut hi[i], &mut lo[i], w);
                } else {
                    store_f32(&mut weights[i], w);
                }
            }
            let end = exp_avg_end.len();
            if end == 0 {
                return;
            }
            let weight =
                if SPLIT { load_split(&padded(hi_end), &padded(lo_end)) } else { load_f32(&padded(weights_end)) };
            let grad = if NARROW { load_bf16(&padded(grad_bf16_end)) } else { load_f32(&padded(grad_f32_end)) };
            let (w, m, v) = step(weight, load_f32(&padded(exp_avg_end)), load_f32(&padded(exp_avg_sq_end)), grad, &c);
            let mut out = [0f32; LANES];
            store_f32(&mut out, m);
            exp_avg_end.copy_from_slice(&out[..end]);
            store_f32(&mut out, v);
            exp_avg_sq_end.copy_from_slice(&out[..end]);
            if SPLIT {
                let (mut out_hi, mut out_lo) = ([0u16; LANES], [0u16; LANES]);
                store_split(&mut out_hi, &mut out_lo, w);
                hi_end.copy_from_slice(&out_hi[..end]);
                lo_end.copy_from_slice(&out_lo[..end]);
            } else {
                store_f32(&mut out, w);
                weights_end.copy_from_slice(&out[..end]);
            }
        }

        fn padded<T: Copy + Default>(end: &[T]) -> [T; LANES] {
            let mut whole = [T::default(); LANES];
            whole[..end.len()].copy_from_slice(end);
            whole
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod compact;
mod convert;
mod mode;
mod scalar;
mod sums;
mod touch;

pub use convert::{
    bf16_to_f32, f16_to_f32, f32_to_bf16, f64_to_f32, first_non_finite, join_bits, join_master, join_master_24,
    split_bits, split_master, split_master_24,
};
pub use mode::ieee;
pub use sums::{SUM_LANES, sum_squares};
pub use touch::touch;

/// The environment variable that selects the bodies: `scalar`, `avx2`, `avx512` or `auto`.
pub const ISA_VARIABLE: &str = "MEGATRAIN_ISA";
/// The bits of every NaN that AdamW stores.
pub const CANONICAL_NAN: u32 = 0x7fc0_0000;

/// Which bodies run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, vectorised by the compiler as far as the baseline instruction set goes.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512F.
    Avx512,
}

impl Isa {
    /// All, least first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Its name: `scalar`, `avx2` or `avx512`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this processor has it.
    #[must_use]
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let available = match self {
            Self::Scalar => true,
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            // The wide body's odd ends and the conversions use the narrower instructions.
            Self::Avx512 => Self::Avx2.available() && is_x86_feature_detected!("avx512f"),
        };
        #[cfg(not(target_arch = "x86_64"))]
        let available = self == Self::Scalar;
        available
    }

    /// The best one that this processor has.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Self::Scalar))
    }

    /// The one asked for: by `request`, else by the environment ([`ISA_VARIABLE`]), else the best. `auto` is the best.
    ///
    /// # Errors
    /// [`Error`] for an unknown name or one that this processor lacks.
    pub fn select(request: Option<&str>) -> Result<Self> {
        let variable = std::env::var(ISA_VARIABLE).ok().filter(|v| !v.is_empty());
        let (name, asked_by) = match (request, &variable) {
            (Some(name), _) => (name, "isa"),
            (None, Some(name)) => (name.as_str(), ISA_VARIABLE),
            (None, None) => return Ok(Self::best()),
        };
        if name == "auto" {
            return Ok(Self::best());
        }
        let isa = Self::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| Error::UnknownIsa { asked_by, name: name.to_owned() })?;
        if !isa.available() {
            return Err(Error::MissingIsa { asked_by, name: isa.name(), best: Self::best().name() });
        }
        Ok(isa)
    }

    /// What the environment asks for, else the best; where it asks for what there is not, [`Isa::select`] says so and
    /// this is the best. For the conversions, whose results do not depend on it.
    #[must_use]
    pub fn preferred() -> Self {
        static PREFERRED: OnceLock<Isa> = OnceLock::new();
        *PREFERRED.get_or_init(|| Self::select(None).unwrap_or_else(|_| Self::best()))
    }

    /// Stops a safe function from reaching instructions that the processor does not have.
    fn assert_available(self) {
        assert!(self <= Self::best(), "this processor lacks {}", self.name());
    }
}

/// A range of weights, updated in place.
#[derive(Debug)]
pub enum Weights<'a> {
    /// An fp32 master in two planes of equal length.
    Split {
        /// bf16 upper halves, as the device computes with them.
        hi: &'a mut [u16],
        /// The low 16 bits.
        lo: &'a mut [u16],
    },
    /// fp32 weights.
    Full(&'a mut [f32]),
}

impl Weights<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Split { hi, lo } => {
                assert_eq!(hi.len(), lo.len(), "both planes of a split master have one length");
                hi.len()
            }
            Self::Full(weights) => weights.len(),
        }
    }

    /// A part of it.
    ///
    /// # Panics
    /// When it leaves the range.
    pub fn part(&mut self, part: Range<usize>) -> Weights<'_> {
        match self {
            Self::Split { hi, lo } => Weights::Split { hi: &mut hi[part.clone()], lo: &mut lo[part] },
            Self::Full(weights) => Weights::Full(&mut weights[part]),
        }
    }
}

/// A range of gradients, or of any values in a transfer precision.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// bf16 bits.
    Bf16(&'a [u16]),
    /// fp32.
    F32(&'a [f32]),
}

impl<'a> Values<'a> {
    /// A part of them.
    ///
    /// # Panics
    /// When it leaves the range.
    #[must_use]
    pub fn part(&self, part: Range<usize>) -> Values<'a> {
        match *self {
            Self::Bf16(values) => Values::Bf16(&values[part]),
            Self::F32(values) => Values::F32(&values[part]),
        }
    }

    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Bf16(values) => values.len(),
            Self::F32(values) => values.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The same range as the bodies take it: of weights and gradients the unused form is empty.
struct Planes<'a> {
    hi: &'a mut [u16],
    lo: &'a mut [u16],
    weights: &'a mut [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
    grad_bf16: &'a [u16],
    grad_f32: &'a [f32],
}

impl<'a> Planes<'a> {
    fn new(weights: Weights<'a>, exp_avg: &'a mut [f32], exp_avg_sq: &'a mut [f32], grad: Values<'a>) -> Self {
        let len = weights.len();
        let lengths = (exp_avg.len(), exp_avg_sq.len(), grad.len());
        assert_eq!(lengths, (len, len, len), "moments and gradient are as long as the weights");
        let (hi, lo, weights): (&mut [u16], &mut [u16], &mut [f32]) = match weights {
            Weights::Split { hi, lo } => (hi, lo, &mut []),
            Weights::Full(weights) => (&mut [], &mut [], weights),
        };
        let (grad_bf16, grad_f32): (&[u16], &[f32]) = match grad {
            Values::Bf16(values) => (values, &[]),
            Values::F32(values) => (&[], values),
        };
        Self { hi, lo, weights, exp_avg, exp_avg_sq, grad_bf16, grad_f32 }
    }
}

/// One AdamW update of a range, in place.
///
/// # Panics
/// When the lengths differ, or the processor lacks `isa`.
pub fn adamw(
    isa: Isa,
    weights: Weights<'_>,
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    grad: Values<'_>,
    scalars: &AdamwScalars,
) {
    isa.assert_available();
    let (split, narrow) = (matches!(weights, Weights::Split { .. }), matches!(grad, Values::Bf16(_)));
    let planes = Planes::new(weights, exp_avg, exp_avg_sq, grad);
    ieee(|| match (isa, split, narrow) {
        (Isa::Scalar, true, true) => scalar::adamw::<true, true>(planes, scalars),
        (Isa::Scalar, true, false) => scalar::adamw::<true, false>(planes, scalars),
        (Isa::Scalar, false, true) => scalar::adamw::<false, true>(planes, scalars),
        (Isa::Scalar, false, false) => scalar::adamw::<false, false>(planes, scalars),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, split, narrow) => {
            // SAFETY: `assert_available` has found AVX2 and FMA.
            unsafe { avx2::adamw(planes, scalars, split, narrow) }
        }
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, split, narrow) => {
            // SAFETY: `assert_available` has found AVX-512F.
            unsafe { avx512::adamw(planes, scalars, split, narrow) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        (Isa::Avx2 | Isa::Avx512, ..) => unreachable!("assert_available has refused it"),
    });
}

/// Adds a range of gradients to a range of an fp32 store.
///
/// # Panics
/// When the lengths differ, or the processor lacks `isa`.
pub fn accumulate(isa: Isa, store: &mut [f32], values: Values<'_>) {
    assert_eq!(store.len(), values.len(), "store and gradient are equally long");
    isa.assert_available();
    ieee(|| match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => {
            // SAFETY: `assert_available` has found AVX2.
            unsafe { avx2::accumulate(store, values) }
        }
        _ => scalar::accumulate(store, values),
    });
}
