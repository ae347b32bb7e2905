//! Number formats: the split master, bf16, fp16 and f64.
use super::compact::{join_24, split_24};
use super::ieee;

/// The upper and the residual half of an fp32 pattern. `hi` is the bf16 nearest to it, ties away from zero; the
/// residual is the low 16 bits, to be read as a signed number. Exact for every pattern: see [`join_bits`].
#[inline(always)]
#[must_use]
pub const fn split_bits(bits: u32) -> (u16, u16) {
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16)
}

/// The fp32 pattern that [`split_bits`] took apart.
#[inline(always)]
#[must_use]
pub const fn join_bits(hi: u16, lo: u16) -> u32 {
    ((hi as u32) << 16).wrapping_add(lo as i16 as u32)
}

#[inline(always)]
pub(super) const fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// To nearest, ties to even; a NaN stays one and becomes quiet.
#[inline(always)]
const fn narrow_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if bits & 0x7fff_ffff > 0x7f80_0000 { (bits >> 16) as u16 | 0x0040 } else { rounded }
}

/// Exact, in integers and one exact subtraction; a NaN stays one and becomes quiet.
#[inline(always)]
const fn widen_f16(bits: u16) -> f32 {
    let sign = ((bits & 0x8000) as u32) << 16;
    let magnitude = ((bits & 0x7fff) as u32) << 13;
    // 2^112 apart are the two biases; a subnormal is turned into a normal number plus 2^-14, which is taken off again.
    let normal = magnitude + (112 << 23);
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    let special = magnitude | 0x7f80_0000 | if magnitude > 0x0f80_0000 { 0x0040_0000 } else { 0 };
    let value = if magnitude >= 0x0f80_0000 {
        special
    } else if magnitude < 0x0080_0000 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(sign | value)
}

/// Compiles an element-wise loop for the baseline and for AVX2, and picks one by the processor and the environment.
macro_rules! elementwise {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        pub fn $name($($arg: $ty),*) $(-> $out)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                body($($arg),*)
            }

            ieee(|| {
                #[cfg(target_arch = "x86_64")]
                if super::Isa::preferred() >= super::Isa::Avx2 {
                    // SAFETY: what is preferred is available, and from AVX2 on includes it.
                    return unsafe { avx2($($arg),*) };
                }
                body($($arg),*)
            })
        }
    };
}

elementwise! {
    /// fp32 -> upper and residual plane, exactly.
    ///
    /// # Panics
    /// When the lengths differ.
    split_master(master: &[f32], hi: &mut [u16], lo: &mut [u16]) {
        assert_eq!((hi.len(), lo.len()), (master.len(), master.len()), "planes are as long as the master");
        for ((value, hi), lo) in master.iter().zip(hi).zip(lo) {
            (*hi, *lo) = split_bits(value.to_bits());
        }
    }
}

elementwise! {
    /// Upper and residual plane -> fp32, exactly.
    ///
    /// # Panics
    /// When the lengths differ.
    join_master(hi: &[u16], lo: &[u16], master: &mut [f32]) {
        assert_eq!((hi.len(), lo.len()), (master.len(), master.len()), "planes are as long as the master");
        for ((value, &hi), &lo) in master.iter_mut().zip(hi).zip(lo) {
            *value = f32::from_bits(join_bits(hi, lo));
        }
    }
}

elementwise! {
    /// fp32 -> upper plane and the eight bits after it: the nearest master of 24 bits, ties away from zero.
    ///
    /// # Panics
    /// When the lengths differ.
    split_master_24(master: &[f32], hi: &mut [u16], lo: &mut [u8]) {
        assert_eq!((hi.len(), lo.len()), (master.len(), master.len()), "planes are as long as the master");
        for ((value, hi), lo) in master.iter().zip(hi).zip(lo) {
            let bits = value.to_bits();
            // The largest finite numbers do not become infinite.
            let nearest = bits.wrapping_add(if bits & 0x7fff_ff80 == 0x7f7f_ff80 { 0 } else { 0x80 });
            (*hi, *lo) = split_24(nearest);
        }
    }
}

elementwise! {
    /// Upper plane and the eight bits after it -> fp32, exactly.
    ///
    /// # Panics
    /// When the lengths differ.
    join_master_24(hi: &[u16], lo: &[u8], master: &mut [f32]) {
        assert_eq!((hi.len(), lo.len()), (master.len(), master.len()), "planes are as long as the master");
        for ((value, &hi), &lo) in master.iter_mut().zip(hi).zip(lo) {
            *value = f32::from_bits(join_24(hi, lo));
        }
    }
}

elementwise! {
    /// bf16 -> fp32, exactly.
    ///
    /// # Panics
    /// When the lengths differ.
    bf16_to_f32(source: &[u16], out: &mut [f32]) {
        assert_eq!(source.len(), out.len(), "source and result are equally long");
        for (out, &bits) in out.iter_mut().zip(source) {
            *out = widen_bf16(bits);
        }
    }
}

elementwise! {
    /// fp32 -> bf16, to nearest, ties to even, as PyTorch does; a NaN becomes quiet.
    ///
    /// # Panics
    /// When the lengths differ.
    f32_to_bf16(source: &[f32], out: &mut [u16]) {
        assert_eq!(source.len(), out.len(), "source and result are equally long");
        for (out, &value) in out.iter_mut().zip(source) {
            *out = narrow_to_bf16(value);
        }
    }
}

elementwise! {
    /// fp16 -> fp32, exactly; a NaN becomes quiet.
    ///
    /// # Panics
    /// When the lengths differ.
    f16_to_f32(source: &[u16], out: &mut [f32]) {
        assert_eq!(source.len(), out.len(), "source and result are equally long");
        for (out, &bits) in out.iter_mut().zip(source) {
            *out = widen_f16(bits);
        }
    }
}

elementwise! {
    /// f64 -> fp32, to nearest; what is too large becomes infinite.
    ///
    /// # Panics
    /// When the lengths differ.
    f64_to_f32(source: &[f64], out: &mut [f32]) {
        assert_eq!(source.len(), out.len(), "source and result are equally long");
        for (out, &value) in out.iter_mut().zip(source) {
            #[expect(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
            let rounded = value as f32;
            *out = rounded;
        }
    }
}

elementwise! {
    /// The index of the first value that is infinite or NaN.
    first_non_finite(values: &[f32]) -> Option<usize> {
        const BLOCK: usize = 1024;
        for (block, chunk) in values.chunks(BLOCK).enumerate() {
            // Branchless over the block, so that it vectorises; looked at closely only where something is wrong.
            let bad = chunk.iter().fold(false, |bad, x| bad | (x.to_bits() & 0x7f80_0000 == 0x7f80_0000));
            if bad {
                return chunk.iter().position(|x| !x.is_finite()).map(|i| block * BLOCK + i);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fp16_pattern_widens_to_its_value() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let mut out = vec![0f32; bits.len()];
        f16_to_f32(&bits, &mut out);
        for (&bits, &got) in bits.iter().zip(&out) {
            let exponent = i32::from((bits >> 10) & 31);
            let fraction = f64::from(bits & 1023);
            let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
            let expected = match exponent {
                31 if fraction == 0.0 => sign * f64::INFINITY,
                31 => f64::NAN,
                0 => sign * fraction * 2f64.powi(-24),
                _ => sign * (1024.0 + fraction) * 2f64.powi(exponent - 25),
            };
            assert!(f64::from(got) == expected || (got.is_nan() && expected.is_nan()), "{bits:#06x}: {got}");
            assert_eq!(got.is_sign_negative(), bits & 0x8000 != 0, "{bits:#06x}");
        }
    }

    #[test]
    fn narrowing_to_bf16_rounds_ties_to_even_and_quiets_nans() {
        let patterns =
            [0x3f80_8000u32, 0x3f81_8000, 0x3f80_8001, 0x7f7f_ffff, 0x7f80_0001, 0xffff_ffff, 0x8000_0001, 0x0000_8000];
        let expected = [0x3f80u16, 0x3f82, 0x3f81, 0x7f80, 0x7fc0, 0xffff, 0x8000, 0x0000];
        let mut out = [0u16; 8];
        f32_to_bf16(&patterns.map(f32::from_bits), &mut out);
        assert_eq!(out, expected);
    }

    #[test]
    fn the_first_value_that_is_not_finite_is_found() {
        let mut values = vec![1f32; 5000];
        assert_eq!(first_non_finite(&values), None);
        assert_eq!(first_non_finite(&[]), None);
        values[4999] = f32::NAN;
        values[2050] = f32::NEG_INFINITY;
        assert_eq!(first_non_finite(&values), Some(2050));
    }

    #[test]
    fn f64_rounds_to_nearest_and_overflows_to_infinity() {
        let mut out = [0f32; 4];
        f64_to_f32(&[1.0 + 2f64.powi(-25), 1e39, 1e-40, -1e-46], &mut out);
        assert_eq!(out.map(f32::to_bits), [0x3f80_0000, 0x7f80_0000, 1e-40f32.to_bits(), 0x8000_0000]);
    }
}
