//! AdamW over smaller states: bf16 or 8-bit moments, and a master of 24 bits.
//!
//! The arithmetic of the update is that of `scalar::step`, in fp32; only what is stored between two updates is smaller.
//! Everything here is plain Rust that is compiled once for each instruction set: every operation is one IEEE operation, so
//! that all bodies and the device's own are bit-equal.
//!
//! **Rounding** is stochastic, since an update may be far smaller than the step of what is stored (second moments change by
//! a thousandth, where bf16 resolves a 256th): rounded to nearest they would stay where they are. The random numbers are a
//! function of the update's key (seed, step, parameter) and the element's index in its parameter, so that neither threads
//! nor parts nor the place of the update change them.
//!
//! **8-bit moments** follow `FlashOptim` (arXiv 2602.23349) in that groups of 32 elements share a scale and that values are
//! companded before they are quantised, as in the block-wise 8-bit optimizers of Dettmers et al. (arXiv 2110.02861).
//! Ours stores a square root of the first moment's magnitude in 7 bits and a fourth root of the second moment in 8, each
//! relative to a power of two, so that a scale that moves does not move the grid between; and rounds stochastically between the
//! two neighbours on the uncompanded axis, which is unbiased. A second moment that is not zero is never stored as zero: the
//! update divides by its root.
//!
//! Of 128 elements the 128 codes come first, then four biased exponents, one for every 32 elements: 132 bytes.
use std::ops::Range;

use super::convert::{join_bits, split_bits, widen_bf16};
use super::{Isa, Values, ieee, scalar};
use crate::adamw::AdamwScalars;
use crate::layout::{MOMENT_GROUP_BYTES, TENSOR_ALIGN};

/// Elements that are stored together.
pub const GROUP: usize = TENSOR_ALIGN as usize;
/// Elements that share a scale.
pub const SCALED: usize = 32;
/// Bytes of a group of 8-bit moments: codes, then exponents.
pub const GROUP_BYTES: usize = MOMENT_GROUP_BYTES as usize;
/// Magnitudes from here on, and NaN, are stored as this.
const LIMIT: f32 = f32::from_bits(0x7e7f_ffff);
/// The largest exponent, that of [`LIMIT`].
const MOST_EXPONENT: u32 = 252;
/// Steps of the codes of first and second moments.
const STEPS: [f32; 2] = [127.0, 255.0];
/// Adding it rounds a small number to an integer, found in the low bits of the sum.
const INTEGER: f32 = 8_388_608.0;

/// A range of weights, updated in place.
#[derive(Debug)]
pub enum CompactWeights<'a> {
    /// An fp32 master in two planes of equal length.
    Split32(&'a mut [u16], &'a mut [u16]),
    /// A master of 24 bits: bf16 upper halves, and the eight bits after them as signed numbers.
    Split24(&'a mut [u16], &'a mut [u8]),
    /// fp32 weights.
    Full(&'a mut [f32]),
}

/// A range of moments, first and second, updated in place.
#[derive(Debug)]
pub enum CompactMoments<'a> {
    /// fp32.
    Fp32(&'a mut [f32], &'a mut [f32]),
    /// bf16 bits.
    Bf16(&'a mut [u16], &'a mut [u16]),
    /// Whole groups of [`GROUP_BYTES`].
    Bits8(&'a mut [u8], &'a mut [u8]),
}

impl CompactWeights<'_> {
    /// A part of it.
    ///
    /// # Panics
    /// When it leaves the range.
    pub fn part(&mut self, part: Range<usize>) -> CompactWeights<'_> {
        match self {
            Self::Split32(hi, lo) => CompactWeights::Split32(&mut hi[part.clone()], &mut lo[part]),
            Self::Split24(hi, lo) => CompactWeights::Split24(&mut hi[part.clone()], &mut lo[part]),
            Self::Full(weights) => CompactWeights::Full(&mut weights[part]),
        }
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Split32(hi, lo) => {
                assert_eq!(hi.len(), lo.len(), "both planes of a split master have one length");
                hi.len()
            }
            Self::Split24(hi, lo) => {
                assert_eq!(hi.len(), lo.len(), "both planes of a split master have one length");
                hi.len()
            }
            Self::Full(weights) => weights.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl CompactMoments<'_> {
    /// A part of them, in elements; of 8-bit ones whole groups, but for the last.
    ///
    /// # Panics
    /// When it leaves the range.
    pub fn part(&mut self, part: Range<usize>) -> CompactMoments<'_> {
        let groups = part.start / GROUP * GROUP_BYTES..part.end.div_ceil(GROUP) * GROUP_BYTES;
        match self {
            Self::Fp32(m, v) => CompactMoments::Fp32(&mut m[part.clone()], &mut v[part]),
            Self::Bf16(m, v) => CompactMoments::Bf16(&mut m[part.clone()], &mut v[part]),
            Self::Bits8(m, v) => CompactMoments::Bits8(&mut m[groups.clone()], &mut v[groups]),
        }
    }

    fn check(&self, len: usize) {
        let (found, wanted) = match self {
            Self::Fp32(m, v) => ((m.len(), v.len()), len),
            Self::Bf16(m, v) => ((m.len(), v.len()), len),
            Self::Bits8(m, v) => ((m.len(), v.len()), len.div_ceil(GROUP) * GROUP_BYTES),
        };
        assert_eq!(found, (wanted, wanted), "moments are as long as the weights");
    }
}

/// One AdamW update of a range, in place. Its first element is number `first` of its parameter; with 8-bit moments that is
/// a multiple of [`GROUP`].
///
/// # Panics
/// When the lengths differ, or the processor lacks `isa`.
pub fn adamw_compact(
    isa: Isa,
    weights: CompactWeights<'_>,
    moments: CompactMoments<'_>,
    grad: Values<'_>,
    scalars: &AdamwScalars,
    first: u64,
) {
    isa.assert_available();
    let len = weights.len();
    assert_eq!(grad.len(), len, "the gradient is as long as the weights");
    moments.check(len);
    ieee(|| match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            // SAFETY: `assert_available` has found AVX-512F, AVX2 and FMA.
            unsafe { wide(weights, moments, grad, scalars, first) }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // SAFETY: `assert_available` has found AVX2 and FMA.
            unsafe { narrow(weights, moments, grad, scalars, first) }
        }
        _ => body(weights, moments, grad, scalars, first),
    });
}

/// The body, compiled for 512-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn wide(w: CompactWeights<'_>, m: CompactMoments<'_>, grad: Values<'_>, scalars: &AdamwScalars, first: u64) {
    body(w, m, grad, scalars, first);
}

/// The body, compiled for 256-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn narrow(w: CompactWeights<'_>, m: CompactMoments<'_>, grad: Values<'_>, scalars: &AdamwScalars, first: u64) {
    body(w, m, grad, scalars, first);
}

type Floats = [f32; GROUP];
type Words = [u32; GROUP];

#[inline(always)]
fn body(
    mut weights: CompactWeights<'_>,
    mut moments: CompactMoments<'_>,
    grad: Values<'_>,
    scalars: &AdamwScalars,
    first: u64,
) {
    let mut random: Words = [0; GROUP];
    let [mut w, mut m, mut v, mut g]: [Floats; 4] = [[0.0; GROUP]; 4];
    let len = weights.len();
    for start in (0..len).step_by(GROUP) {
        let range = start..(start + GROUP).min(len);
        let bytes = start / GROUP * GROUP_BYTES..(start / GROUP + 1) * GROUP_BYTES;
        match &weights {
            CompactWeights::Split32(hi, lo) => {
                let halves = hi[range.clone()].iter().zip(&lo[range.clone()]);
                fill(&mut w, halves.map(|(&hi, &lo)| f32::from_bits(join_bits(hi, lo))));
            }
            CompactWeights::Split24(hi, lo) => {
                let parts = hi[range.clone()].iter().zip(&lo[range.clone()]);
                fill(&mut w, parts.map(|(&hi, &lo)| f32::from_bits(join_24(hi, lo))));
            }
            CompactWeights::Full(weights) => fill(&mut w, weights[range.clone()].iter().copied()),
        }
        match &moments {
            CompactMoments::Fp32(first, second) => {
                fill(&mut m, first[range.clone()].iter().copied());
                fill(&mut v, second[range.clone()].iter().copied());
            }
            CompactMoments::Bf16(first, second) => {
                fill(&mut m, first[range.clone()].iter().map(|&bits| widen_bf16(bits)));
                fill(&mut v, second[range.clone()].iter().map(|&bits| widen_bf16(bits)));
            }
            CompactMoments::Bits8(first, second) => {
                decode::<true>(group(&first[bytes.clone()]), &mut m);
                decode::<false>(group(&second[bytes.clone()]), &mut v);
            }
        }
        match grad {
            Values::Bf16(values) => fill(&mut g, values[range.clone()].iter().map(|&bits| widen_bf16(bits))),
            Values::F32(values) => fill(&mut g, values[range.clone()].iter().copied()),
        }
        #[expect(clippy::cast_possible_truncation, reason = "elements 2^32 apart share a random number")]
        let counter = first.wrapping_add(start as u64) as u32;
        for (i, word) in (0u32..).zip(&mut random) {
            *word = mix(counter.wrapping_add(i), scalars.rounding);
        }
        for i in 0..GROUP {
            (w[i], m[i], v[i]) = scalar::step(w[i], m[i], v[i], g[i], scalars);
        }
        match &mut moments {
            CompactMoments::Fp32(first, second) => {
                first[range.clone()].copy_from_slice(&m[..range.len()]);
                second[range.clone()].copy_from_slice(&v[..range.len()]);
            }
            CompactMoments::Bf16(first, second) => {
                for ((to, &x), &word) in first[range.clone()].iter_mut().zip(&m).zip(&random) {
                    *to = round_bf16(x, word & 0xffff);
                }
                for ((to, &x), &word) in second[range.clone()].iter_mut().zip(&v).zip(&random) {
                    *to = round_bf16(x, word >> 16);
                }
            }
            CompactMoments::Bits8(first, second) => {
                encode::<true>(&m, &random, group_mut(&mut first[bytes.clone()]));
                encode::<false>(&v, &random, group_mut(&mut second[bytes]));
            }
        }
        match &mut weights {
            CompactWeights::Split32(hi, lo) => {
                for ((hi, lo), &x) in hi[range.clone()].iter_mut().zip(&mut lo[range]).zip(&w) {
                    (*hi, *lo) = split_bits(x.to_bits());
                }
            }
            CompactWeights::Split24(hi, lo) => {
                for (((hi, lo), &x), &word) in hi[range.clone()].iter_mut().zip(&mut lo[range]).zip(&w).zip(&random) {
                    (*hi, *lo) = split_24(x.to_bits().wrapping_add(third(word)));
                }
            }
            CompactWeights::Full(weights) => weights[range.clone()].copy_from_slice(&w[..range.len()]),
        }
    }
}

fn group(bytes: &[u8]) -> &[u8; GROUP_BYTES] {
    bytes.try_into().expect("a whole group")
}

fn group_mut(bytes: &mut [u8]) -> &mut [u8; GROUP_BYTES] {
    bytes.try_into().expect("a whole group")
}

/// The values, then zeros.
#[inline(always)]
fn fill(to: &mut Floats, from: impl ExactSizeIterator<Item = f32>) {
    to[from.len()..].fill(0.0);
    for (to, x) in to.iter_mut().zip(from) {
        *to = x;
    }
}

/// What the Weyl sequence below grows by.
const WEYL: u32 = 0x9e37_79b9;

/// 32 random bits of an element under a key: the integer finaliser `lowbias32` (Wellons, "Prospecting for hash functions",
/// 2018) over a Weyl sequence, with the key's halves added before and between.
#[inline(always)]
#[must_use]
pub const fn mix(counter: u32, key: u64) -> u32 {
    let mut x = counter.wrapping_mul(WEYL).wrapping_add(key as u32);
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_add((key >> 32) as u32).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// The key under which the element numbered 0 has the bits that element `begin` has under `key`.
#[must_use]
pub const fn key_from(key: u64, begin: u64) -> u64 {
    let low = (key as u32).wrapping_add((begin as u32).wrapping_mul(WEYL));
    key & !0xffff_ffff | low as u64
}

/// Eight bits for the master, the other 32 being spent on the moments.
#[inline(always)]
const fn third(word: u32) -> u32 {
    word.wrapping_mul(0x9e37_79b1) >> 24
}

/// Up where the random number is below the part that is cut off. A canonical NaN has none.
#[inline(always)]
const fn round_bf16(x: f32, random: u32) -> u16 {
    (x.to_bits().wrapping_add(random) >> 16) as u16
}

/// The upper half of a pattern and the eight bits after it; the last eight are cut off. `hi` is the bf16 nearest to the
/// pattern without them, ties away from zero.
#[inline(always)]
#[must_use]
pub const fn split_24(bits: u32) -> (u16, u8) {
    ((((bits & 0xffff_ff00).wrapping_add(0x8000)) >> 16) as u16, (bits >> 8) as u8)
}

/// The pattern that [`split_24`] took apart, without its last eight bits.
#[inline(always)]
#[must_use]
pub const fn join_24(hi: u16, lo: u8) -> u32 {
    ((hi as u32) << 16).wrapping_add((lo.cast_signed() as i32 as u32) << 8)
}

/// The magnitude, below [`LIMIT`] or equal to it.
#[inline(always)]
fn bounded(x: f32) -> f32 {
    let magnitude = x.abs();
    if magnitude < LIMIT { magnitude } else { LIMIT }
}

/// The share of the scale that a code stands for.
#[inline(always)]
fn share<const SIGNED: bool>(code: u32) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "at most 255")]
    let root = code.cast_signed() as f32 * const { if SIGNED { 1.0 / STEPS[0] } else { 1.0 / STEPS[1] } };
    let square = root * root;
    if SIGNED { square } else { square * square }
}

/// 8-bit moments as fp32. First moments are signed.
#[inline(always)]
pub fn decode<const SIGNED: bool>(from: &[u8; GROUP_BYTES], to: &mut [f32; GROUP]) {
    for (part, to) in to.as_chunks_mut::<SCALED>().0.iter_mut().enumerate() {
        let exponent = u32::from(from[GROUP + part]).min(MOST_EXPONENT);
        let scale = f32::from_bits((exponent + 1) << 23);
        for (to, &code) in to.iter_mut().zip(&from[part * SCALED..]) {
            let code = u32::from(code);
            let magnitude = share::<SIGNED>(if SIGNED { code & 127 } else { code }) * scale;
            *to = f32::from_bits(magnitude.to_bits() | if SIGNED { (code & 128) << 24 } else { 0 });
        }
    }
}

/// fp32 moments as 8-bit ones, rounded by the lower half of each random word where they are signed, else by the upper half.
#[inline(always)]
pub fn encode<const SIGNED: bool>(from: &[f32; GROUP], random: &[u32; GROUP], to: &mut [u8; GROUP_BYTES]) {
    let steps = STEPS[usize::from(!SIGNED)];
    let (codes, exponents) = to.split_at_mut(GROUP);
    for (part, kept) in exponents.iter_mut().enumerate() {
        let range = part * SCALED..(part + 1) * SCALED;
        let top = from[range.clone()].iter().fold(0, |top: u32, &x| top.max(bounded(x).to_bits()));
        let exponent = top >> 23;
        *kept = exponent as u8;
        // The reciprocal of the scale 2^(exponent - 126), which is above every magnitude.
        let inverse = f32::from_bits((253 - exponent) << 23);
        for ((code, &x), &word) in codes[range.clone()].iter_mut().zip(&from[range.clone()]).zip(&random[range]) {
            let magnitude = bounded(x);
            let share_of = magnitude * inverse;
            let root = if SIGNED { share_of.sqrt() } else { share_of.sqrt().sqrt() };
            let at = root * steps - 0.5;
            let at = if at > 0.0 { at } else { 0.0 };
            let last = if SIGNED { 126 } else { 254 };
            let below = ((at + INTEGER).to_bits() & 0xff).min(last);
            let (lower, upper) = (share::<SIGNED>(below), share::<SIGNED>(below + 1));
            let random = if SIGNED { word & 0xffff } else { word >> 16 };
            #[expect(clippy::cast_precision_loss, reason = "16 bits")]
            let threshold = (random.cast_signed() as f32 + 0.5) * (1.0 / 65536.0);
            let found = below + u32::from(share_of - lower > (upper - lower) * threshold);
            let found = if !SIGNED && magnitude > 0.0 { found.max(1) } else { found };
            *code = (found | if SIGNED { (x.to_bits() >> 24) & 128 } else { 0 }) as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    fn words(random: &mut SplitMix) -> Words {
        std::array::from_fn(|_| (random.draw() >> 32) as u32)
    }

    #[test]
    fn every_24_bit_pattern_is_put_together_again() {
        for bits in (0..=u32::MAX >> 8).map(|bits| bits << 8) {
            let (hi, lo) = split_24(bits);
            assert_eq!(join_24(hi, lo), bits);
        }
    }

    #[test]
    fn bf16_rounding_is_unbiased_and_keeps_what_bf16_can_hold() {
        let x = f32::from_bits(0x3f80_4000); // a quarter of the way to the next bf16
        let up = (0..=0xffff).filter(|&random| round_bf16(x, random) == 0x3f81).count();
        assert_eq!(up, 0x4000);
        for exact in [0.0, 1.5, -2.0, f32::INFINITY] {
            assert!((0..=0xffff).all(|random| f32::from_bits(u32::from(round_bf16(exact, random)) << 16) == exact));
        }
        assert!((0..=0xffff).all(|random| round_bf16(f32::from_bits(0x7fc0_0000), random) == 0x7fc0));
    }

    #[test]
    fn eight_bits_keep_signs_stay_between_their_neighbours_and_are_unbiased() {
        let mut random = SplitMix(3);
        let uniform = |random: &mut SplitMix| (random.draw() >> 40) as f32 / (1u32 << 24) as f32;
        let from: Floats = std::array::from_fn(|i| {
            let x = (uniform(&mut random) * 12.0 - 14.0).exp2();
            if i % 3 == 0 { -x } else { x }
        });
        let positive = from.map(f32::abs);
        const ROUNDS: u32 = 4000;
        let mut sums = [[0f64; GROUP]; 2];
        for _ in 0..ROUNDS {
            let words = words(&mut random);
            let (mut bytes, mut out) = ([0; GROUP_BYTES], [0f32; GROUP]);
            encode::<true>(&from, &words, &mut bytes);
            decode::<true>(&bytes, &mut out);
            for i in 0..GROUP {
                assert!(out[i] == 0.0 || out[i].is_sign_negative() == from[i].is_sign_negative());
                sums[0][i] += f64::from(out[i]);
            }
            encode::<false>(&positive, &words, &mut bytes);
            decode::<false>(&bytes, &mut out);
            for i in 0..GROUP {
                let ratio = out[i] / positive[i];
                assert!((0.5..2.0).contains(&ratio), "{} as {}", positive[i], out[i]);
                sums[1][i] += f64::from(out[i]);
            }
        }
        for (sums, wanted) in sums.iter().zip([&from, &positive]) {
            for (scaled, wanted) in sums.chunks(SCALED).zip(wanted.chunks(SCALED)) {
                let top = wanted.iter().fold(0f32, |top, x| top.max(x.abs()));
                for (sum, &wanted) in scaled.iter().zip(wanted) {
                    let mean = sum / f64::from(ROUNDS);
                    let near = f64::from(wanted.abs()) * 0.02 + f64::from(top) * 3e-4;
                    assert!((mean - f64::from(wanted)).abs() < near, "{wanted}: {mean}");
                }
            }
        }
    }

    #[test]
    fn what_is_on_the_grid_stays_there_and_a_second_moment_never_becomes_zero() {
        let mut random = SplitMix(5);
        let mut bytes: [u8; GROUP_BYTES] = std::array::from_fn(|i| if i == 0 { 230 } else { (i * 7) as u8 });
        bytes[GROUP..].fill(110);
        let mut values = [0f32; GROUP];
        decode::<false>(&bytes, &mut values);
        values[33] = f32::MIN_POSITIVE;
        for _ in 0..100 {
            let (mut again, mut out) = ([0; GROUP_BYTES], [0f32; GROUP]);
            encode::<false>(&values, &words(&mut random), &mut again);
            decode::<false>(&again, &mut out);
            assert!(out[33] > 0.0);
            assert_eq!(again[..32], bytes[..32]);
            assert_eq!(out[..32], values[..32]);
        }
    }

    #[test]
    fn zeros_and_what_no_moment_should_be_are_stored_as_numbers() {
        let mut bytes = [7; GROUP_BYTES];
        let mut out = [1f32; GROUP];
        encode::<true>(&[0.0; GROUP], &[u32::MAX; GROUP], &mut bytes);
        assert_eq!(bytes, [0; GROUP_BYTES]);
        decode::<true>(&bytes, &mut out);
        assert_eq!(out, [0.0; GROUP]);
        for bad in [f32::INFINITY, f32::NAN, f32::MAX] {
            encode::<false>(&[bad; GROUP], &[0; GROUP], &mut bytes);
            decode::<false>(&bytes, &mut out);
            assert!(out.iter().all(|x| x.is_finite() && *x > 1e37), "{bad}: {}", out[0]);
        }
        decode::<true>(&[255; GROUP_BYTES], &mut out);
        assert!(out.iter().all(|x| x.is_finite()), "whatever the bytes");
    }
}
