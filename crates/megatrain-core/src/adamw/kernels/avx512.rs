//! AdamW sixteen elements at a time.
use std::arch::x86_64::*;

use super::{CANONICAL_NAN, Planes};
use crate::adamw::AdamwScalars;

/// Elements of one vector.
const LANES: usize = 16;
/// Elements of one turn of the loop: a cache line of 16-bit values, two of 32-bit ones.
const TURN: usize = 32;
/// How far ahead lines are fetched, in elements: far enough to cover the latency of memory, near enough to stay in L1.
const AHEAD: usize = 512;

type Vector = __m512;

struct Constants {
    beta1: Vector,
    one_minus_beta1: Vector,
    beta2: Vector,
    one_minus_beta2: Vector,
    decay: Vector,
    step_size: Vector,
    inv_sqrt_bias2: Vector,
    eps: Vector,
    grad_scale: Vector,
}

impl Constants {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new(s: &AdamwScalars) -> Self {
        Self {
            beta1: _mm512_set1_ps(s.beta1),
            one_minus_beta1: _mm512_set1_ps(s.one_minus_beta1),
            beta2: _mm512_set1_ps(s.beta2),
            one_minus_beta2: _mm512_set1_ps(s.one_minus_beta2),
            decay: _mm512_set1_ps(s.decay),
            step_size: _mm512_set1_ps(s.step_size),
            inv_sqrt_bias2: _mm512_set1_ps(s.inv_sqrt_bias2),
            eps: _mm512_set1_ps(s.eps),
            grad_scale: _mm512_set1_ps(s.grad_scale),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_f32(from: &[f32; LANES]) -> Vector {
    // SAFETY: reads the sixteen values of the array; no alignment is asked for.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_f32(to: &mut [f32; LANES], value: Vector) {
    // SAFETY: writes the sixteen values of the array; no alignment is asked for.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_u16(from: &[u16; LANES]) -> __m256i {
    // SAFETY: reads the 32 bytes of the array; no alignment is asked for.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_u16(to: &mut [u16; LANES], value: __m256i) {
    // SAFETY: writes the 32 bytes of the array; no alignment is asked for.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_bf16(from: &[u16; LANES]) -> Vector {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load_u16(from))))
}

/// See `convert::join_bits`.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_split(hi: &[u16; LANES], lo: &[u16; LANES]) -> Vector {
    let hi = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load_u16(hi)));
    _mm512_castsi512_ps(_mm512_add_epi32(hi, _mm512_cvtepi16_epi32(load_u16(lo))))
}

/// See `convert::split_bits`.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_split(hi: &mut [u16; LANES], lo: &mut [u16; LANES], value: Vector) {
    let bits = _mm512_castps_si512(value);
    let rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    store_u16(hi, _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)));
    store_u16(lo, _mm512_cvtepi32_epi16(bits));
}

#[inline]
#[target_feature(enable = "avx512f")]
fn canonical(x: Vector) -> Vector {
    let nan = _mm512_castsi512_ps(_mm512_set1_epi32(CANONICAL_NAN.cast_signed()));
    _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), nan)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn settle(x: Vector) -> Vector {
    // "Not less than" holds for NaN, as the scalar comparison's other branch does.
    let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(_mm512_abs_ps(x), _mm512_set1_ps(f32::MIN_POSITIVE));
    canonical(_mm512_maskz_mov_ps(normal, x))
}

/// `scalar::step`, operation by operation.
#[inline]
#[target_feature(enable = "avx512f")]
fn step(weight: Vector, exp_avg: Vector, exp_avg_sq: Vector, grad: Vector, c: &Constants) -> (Vector, Vector, Vector) {
    let g = _mm512_mul_ps(grad, c.grad_scale);
    let m = settle(_mm512_fmadd_ps(c.beta1, exp_avg, _mm512_mul_ps(c.one_minus_beta1, g)));
    let v = settle(_mm512_fmadd_ps(c.beta2, exp_avg_sq, _mm512_mul_ps(_mm512_mul_ps(c.one_minus_beta2, g), g)));
    let d = _mm512_fmadd_ps(_mm512_sqrt_ps(v), c.inv_sqrt_bias2, c.eps);
    let w = canonical(_mm512_fnmadd_ps(c.step_size, _mm512_div_ps(m, d), _mm512_mul_ps(weight, c.decay)));
    (w, m, v)
}

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unused_unsafe, reason = "the oldest supported compiler counts the hint as unsafe")]
fn fetch<T>(line: *const T) {
    // SAFETY: a prefetch is a hint: it reads nothing architecturally and never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

vector_sweep!("avx512f");
