//! The reference bodies.
use super::convert::{join_bits, split_bits, widen_bf16};
use super::{CANONICAL_NAN, Planes, Values};
use crate::adamw::AdamwScalars;

/// AdamW's arithmetic for one element: the new weight and moments.
#[inline(always)]
pub(super) fn step(weight: f32, exp_avg: f32, exp_avg_sq: f32, grad: f32, c: &AdamwScalars) -> (f32, f32, f32) {
    let g = grad * c.grad_scale;
    let m = settle(c.beta1.mul_add(exp_avg, c.one_minus_beta1 * g));
    let v = settle(c.beta2.mul_add(exp_avg_sq, (c.one_minus_beta2 * g) * g));
    let d = v.sqrt().mul_add(c.inv_sqrt_bias2, c.eps);
    let w = canonical((-c.step_size).mul_add(m / d, weight * c.decay));
    (w, m, v)
}

#[inline(always)]
fn settle(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0 } else { canonical(x) }
}

#[inline(always)]
fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(CANONICAL_NAN) } else { x }
}

pub(super) fn adamw<const SPLIT: bool, const NARROW: bool>(p: Planes<'_>, scalars: &AdamwScalars) {
    let n = p.exp_avg.len();
    for i in 0..n {
        let grad = if NARROW { widen_bf16(p.grad_bf16[i]) } else { p.grad_f32[i] };
        let weight = if SPLIT { f32::from_bits(join_bits(p.hi[i], p.lo[i])) } else { p.weights[i] };
        let (weight, m, v) = step(weight, p.exp_avg[i], p.exp_avg_sq[i], grad, scalars);
        p.exp_avg[i] = m;
        p.exp_avg_sq[i] = v;
        if SPLIT {
            (p.hi[i], p.lo[i]) = split_bits(weight.to_bits());
        } else {
            p.weights[i] = weight;
        }
    }
}

#[inline(always)]
pub(super) fn accumulate(store: &mut [f32], values: Values<'_>) {
    match values {
        Values::Bf16(values) => {
            for (sum, &value) in store.iter_mut().zip(values) {
                *sum += widen_bf16(value);
            }
        }
        Values::F32(values) => {
            for (sum, &value) in store.iter_mut().zip(values) {
                *sum += value;
            }
        }
    }
}
