//! Sums of squares in f64, in an order that depends on the length alone.
use super::convert::widen_bf16;
use super::{Isa, Values, ieee};

/// Element `i` of a block is added to partial sum `i % SUM_LANES`; the partial sums are then added pairwise.
pub const SUM_LANES: usize = 16;

/// The sum of the squares of one block. Squares of bf16 and fp32 values are exact in f64, so that only the order of
/// the additions matters, and that is the same in every body. Non-finite values give a non-finite sum.
///
/// # Panics
/// When the processor lacks `isa`.
#[must_use]
pub fn sum_squares(isa: Isa, values: Values<'_>) -> f64 {
    isa.assert_available();
    ieee(|| match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            // SAFETY: `assert_available` has found AVX-512F.
            unsafe { wide(values) }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // SAFETY: `assert_available` has found AVX2.
            unsafe { narrow(values) }
        }
        _ => body(values),
    })
}

/// The body, compiled for 512-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn wide(values: Values<'_>) -> f64 {
    body(values)
}

/// The body, compiled for 256-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn narrow(values: Values<'_>) -> f64 {
    body(values)
}

#[inline(always)]
fn body(values: Values<'_>) -> f64 {
    match values {
        Values::Bf16(values) => lanes(values, widen_bf16),
        Values::F32(values) => lanes(values, |x| x),
    }
}

#[inline(always)]
fn lanes<T: Copy>(values: &[T], widen: impl Fn(T) -> f32) -> f64 {
    let mut sums = [0f64; SUM_LANES];
    let (blocks, rest) = values.as_chunks::<SUM_LANES>();
    for block in blocks {
        for (sum, &value) in sums.iter_mut().zip(block) {
            let x = f64::from(widen(value));
            *sum += x * x;
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        let x = f64::from(widen(value));
        *sum += x * x;
    }
    let mut width = SUM_LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}
