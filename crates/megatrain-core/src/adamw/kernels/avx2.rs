//! AdamW sixteen elements at a time, in two halves of eight; and the addition of gradients.
use std::arch::x86_64::*;

use super::{CANONICAL_NAN, Planes, Values, scalar};
use crate::adamw::AdamwScalars;

/// Elements of one vector: two registers, so that a vector of 16-bit values fills one.
const LANES: usize = 16;
/// Elements of one turn of the loop: a cache line of 16-bit values, two of 32-bit ones.
const TURN: usize = 32;
/// How far ahead lines are fetched, in elements: far enough to cover the latency of memory, near enough to stay in L1.
const AHEAD: usize = 512;

#[derive(Clone, Copy)]
struct Vector(__m256, __m256);

struct Constants {
    beta1: __m256,
    one_minus_beta1: __m256,
    beta2: __m256,
    one_minus_beta2: __m256,
    decay: __m256,
    step_size: __m256,
    inv_sqrt_bias2: __m256,
    eps: __m256,
    grad_scale: __m256,
}

impl Constants {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn new(s: &AdamwScalars) -> Self {
        Self {
            beta1: _mm256_set1_ps(s.beta1),
            one_minus_beta1: _mm256_set1_ps(s.one_minus_beta1),
            beta2: _mm256_set1_ps(s.beta2),
            one_minus_beta2: _mm256_set1_ps(s.one_minus_beta2),
            decay: _mm256_set1_ps(s.decay),
            step_size: _mm256_set1_ps(s.step_size),
            inv_sqrt_bias2: _mm256_set1_ps(s.inv_sqrt_bias2),
            eps: _mm256_set1_ps(s.eps),
            grad_scale: _mm256_set1_ps(s.grad_scale),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_half_f32(from: &[f32; 8]) -> __m256 {
    // SAFETY: reads the eight values of the array; no alignment is asked for.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_f32(from: &[f32; LANES]) -> Vector {
    let (halves, _) = from.as_chunks::<8>();
    Vector(load_half_f32(&halves[0]), load_half_f32(&halves[1]))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn store_half_f32(to: &mut [f32; 8], value: __m256) {
    // SAFETY: writes the eight values of the array; no alignment is asked for.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn store_f32(to: &mut [f32; LANES], value: Vector) {
    let (halves, _) = to.as_chunks_mut::<8>();
    store_half_f32(&mut halves[0], value.0);
    store_half_f32(&mut halves[1], value.1);
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_half_u16(from: &[u16; 8]) -> __m128i {
    // SAFETY: reads the 16 bytes of the array; no alignment is asked for.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn store_u16(to: &mut [u16; LANES], value: __m256i) {
    // SAFETY: writes the 32 bytes of the array; no alignment is asked for.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}

/// Eight 16-bit values as the upper halves of 32-bit ones.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_half_upper(from: &[u16; 8]) -> __m256i {
    _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load_half_u16(from)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_bf16(from: &[u16; LANES]) -> Vector {
    let (halves, _) = from.as_chunks::<8>();
    Vector(_mm256_castsi256_ps(load_half_upper(&halves[0])), _mm256_castsi256_ps(load_half_upper(&halves[1])))
}

/// See `convert::join_bits`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_split(hi: &[u16; LANES], lo: &[u16; LANES]) -> Vector {
    let (hi, _) = hi.as_chunks::<8>();
    let (lo, _) = lo.as_chunks::<8>();
    let first = _mm256_add_epi32(load_half_upper(&hi[0]), _mm256_cvtepi16_epi32(load_half_u16(&lo[0])));
    let second = _mm256_add_epi32(load_half_upper(&hi[1]), _mm256_cvtepi16_epi32(load_half_u16(&lo[1])));
    Vector(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second))
}

/// The sixteen values, each below 2^16, as 16-bit ones in order.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn pack(first: __m256i, second: __m256i) -> __m256i {
    // The pack works within 128-bit lanes, so the middle quarters come out exchanged.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(first, second))
}

/// See `convert::split_bits`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn store_split(hi: &mut [u16; LANES], lo: &mut [u16; LANES], value: Vector) {
    let half = _mm256_set1_epi32(0x8000);
    let low = _mm256_set1_epi32(0xffff);
    let (first, second) = (_mm256_castps_si256(value.0), _mm256_castps_si256(value.1));
    let rounded_first = _mm256_srli_epi32::<16>(_mm256_add_epi32(first, half));
    let rounded_second = _mm256_srli_epi32::<16>(_mm256_add_epi32(second, half));
    store_u16(hi, pack(rounded_first, rounded_second));
    store_u16(lo, pack(_mm256_and_si256(first, low), _mm256_and_si256(second, low)));
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn canonical(x: __m256) -> __m256 {
    let nan = _mm256_castsi256_ps(_mm256_set1_epi32(CANONICAL_NAN.cast_signed()));
    _mm256_blendv_ps(x, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn settle(x: __m256) -> __m256 {
    let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x);
    // "Not less than" holds for NaN, as the scalar comparison's other branch does.
    let normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(magnitude, _mm256_set1_ps(f32::MIN_POSITIVE));
    canonical(_mm256_and_ps(normal, x))
}

/// `scalar::step`, operation by operation.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn step_half(
    weight: __m256,
    exp_avg: __m256,
    exp_avg_sq: __m256,
    grad: __m256,
    c: &Constants,
) -> (__m256, __m256, __m256) {
    let g = _mm256_mul_ps(grad, c.grad_scale);
    let m = settle(_mm256_fmadd_ps(c.beta1, exp_avg, _mm256_mul_ps(c.one_minus_beta1, g)));
    let v = settle(_mm256_fmadd_ps(c.beta2, exp_avg_sq, _mm256_mul_ps(_mm256_mul_ps(c.one_minus_beta2, g), g)));
    let d = _mm256_fmadd_ps(_mm256_sqrt_ps(v), c.inv_sqrt_bias2, c.eps);
    let w = canonical(_mm256_fnmadd_ps(c.step_size, _mm256_div_ps(m, d), _mm256_mul_ps(weight, c.decay)));
    (w, m, v)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn step(weight: Vector, exp_avg: Vector, exp_avg_sq: Vector, grad: Vector, c: &Constants) -> (Vector, Vector, Vector) {
    let first = step_half(weight.0, exp_avg.0, exp_avg_sq.0, grad.0, c);
    let second = step_half(weight.1, exp_avg.1, exp_avg_sq.1, grad.1, c);
    (Vector(first.0, second.0), Vector(first.1, second.1), Vector(first.2, second.2))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
#[allow(unused_unsafe, reason = "the oldest supported compiler counts the hint as unsafe")]
fn fetch<T>(line: *const T) {
    // SAFETY: a prefetch is a hint: it reads nothing architecturally and never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

/// `scalar::accumulate`, compiled for 256-bit vectors.
#[target_feature(enable = "avx2,fma")]
pub(super) fn accumulate(store: &mut [f32], values: Values<'_>) {
    scalar::accumulate(store, values);
}

vector_sweep!("avx2,fma");
