//! The memory traffic of AdamW with next to no arithmetic: what it is measured against.
use super::{Isa, Planes, Values, Weights, ieee};

/// Reads and writes what [`super::adamw`] reads and writes, in the same shapes, and computes nothing of use.
///
/// # Panics
/// When the lengths differ, or the processor lacks `isa`.
pub fn touch(isa: Isa, weights: Weights<'_>, exp_avg: &mut [f32], exp_avg_sq: &mut [f32], grad: Values<'_>) {
    isa.assert_available();
    let planes = Planes::new(weights, exp_avg, exp_avg_sq, grad);
    ieee(|| match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            // SAFETY: `assert_available` has found AVX-512F.
            unsafe { wide(planes) }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // SAFETY: `assert_available` has found AVX2.
            unsafe { narrow(planes) }
        }
        _ => body(planes),
    });
}

/// The body, compiled for 512-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn wide(planes: Planes<'_>) {
    body(planes);
}

/// The body, compiled for 256-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn narrow(planes: Planes<'_>) {
    body(planes);
}

#[inline(always)]
fn body(p: Planes<'_>) {
    match (p.grad_bf16.is_empty(), p.weights.is_empty()) {
        (false, true) => {
            let planes = p.hi.iter_mut().zip(p.lo).zip(p.exp_avg).zip(p.exp_avg_sq).zip(p.grad_bf16);
            for ((((hi, lo), m), v), g) in planes {
                *hi ^= g;
                *lo ^= 1;
                *m += 1.0;
                *v += 1.0;
            }
        }
        (true, true) => {
            let planes = p.hi.iter_mut().zip(p.lo).zip(p.exp_avg).zip(p.exp_avg_sq).zip(p.grad_f32);
            for ((((hi, lo), m), v), g) in planes {
                *hi ^= 1;
                *lo ^= 1;
                *m += g;
                *v += 1.0;
            }
        }
        (false, false) => {
            for (((w, m), v), &g) in p.weights.iter_mut().zip(p.exp_avg).zip(p.exp_avg_sq).zip(p.grad_bf16) {
                *w += f32::from_bits(u32::from(g));
                *m += 1.0;
                *v += 1.0;
            }
        }
        (true, false) => {
            for (((w, m), v), g) in p.weights.iter_mut().zip(p.exp_avg).zip(p.exp_avg_sq).zip(p.grad_f32) {
                *w += g;
                *m += 1.0;
                *v += 1.0;
            }
        }
    }
}
