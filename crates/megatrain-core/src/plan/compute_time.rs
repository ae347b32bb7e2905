//! How long a unit computes: matmuls and attention at rates of their own, elementwise kernels by the bytes that they move,
//! and what launching and starting them takes.

use super::{Rates, UnitRequest};

/// What attention reaches of the rate of large matmuls over rows without end, and the tokens of the rows over which it
/// reaches half of that: starting and ending a row, conversions and sums beside the kernels, and the half of a block on
/// the diagonal that is computed in vain take time in proportion to tokens, not to their pairs. With these an H100
/// reaches 355 and 226 of 705 TFLOP/s over 1,024 tokens of width 128 (cuDNN, a profile by kernel), and forward, forward
/// again and backward together 535 of 727 over 131,072 on an H200 (a step of 41 s, of which attention is 29).
const ATTENTION_FORWARD: (f64, f64) = (0.85, 710.0);
const ATTENTION_BACKWARD: (f64, f64) = (0.66, 1100.0);
/// Tokens of a row where the request does not say.
const ATTENTION_ROW: u32 = 1024;
/// Fused attention's backward computes five products where forward computes two (FlashAttention-2, arXiv 2307.08691).
const ATTENTION_BACKWARD_FLOPS: f64 = 2.5;
/// What elementwise kernels move in backward, as multiples of forward's: where it finds the inputs of its matmuls (a
/// profile by kernel), and where it makes them again, which layers' graphs count as a quarter more.
const BACKWARD_MOVES: (f64, f64) = (1.9, 2.4);
/// How long backward's launches take, as a multiple of forward's.
const BACKWARD_LAUNCHES: f64 = 1.4;
/// How many kernels backward has for each of forward's.
const BACKWARD_RAMPS: f64 = 2.0;

/// Seconds of computing, at given rates.
impl UnitRequest {
    /// Forward with one micro-batch.
    pub(crate) fn forward_s(&self, rates: &Rates) -> f64 {
        let matmul_s = |flops: f64| flops / (rates.matmul_tflops * 1e12);
        if !rates.beside_matmuls {
            return matmul_s(self.flops);
        }
        let attention = matmul_s(self.attention_flops) / self.attention_share(ATTENTION_FORWARD);
        let moved = self.moved_bytes / (rates.hbm_gbs * 1e9);
        (matmul_s(self.flops - self.attention_flops) + attention + moved).max(self.launch_s) + self.ramp_s
    }

    /// Backward with one micro-batch, whose activations were kept or brought back.
    pub(crate) fn backward_s(&self, rates: &Rates) -> f64 {
        let matmul_s = |flops: f64| flops / (rates.matmul_tflops * 1e12);
        if !rates.beside_matmuls {
            return matmul_s(2.0 * self.flops);
        }
        let attention =
            matmul_s(ATTENTION_BACKWARD_FLOPS * self.attention_flops) / self.attention_share(ATTENTION_BACKWARD);
        let moves = if self.remakes { BACKWARD_MOVES.1 } else { BACKWARD_MOVES.0 };
        let moved = moves * self.moved_bytes / (rates.hbm_gbs * 1e9);
        let matmuls = matmul_s(2.0 * (self.flops - self.attention_flops));
        (matmuls + attention + moved).max(BACKWARD_LAUNCHES * self.launch_s) + BACKWARD_RAMPS * self.ramp_s
    }

    /// What attention over this unit's rows reaches of the rate of large matmuls.
    fn attention_share(&self, (endless, half): (f64, f64)) -> f64 {
        let row = f64::from(if self.attention_row == 0 { ATTENTION_ROW } else { self.attention_row });
        endless * row / (row + half)
    }

    /// Recomputation before backward: forward up to the last tensor that backward needs.
    pub(crate) fn recompute_s(&self, rates: &Rates) -> f64 {
        let spared = if rates.beside_matmuls { self.spared_flops / (rates.matmul_tflops * 1e12) } else { 0.0 };
        (self.forward_s(rates) - spared).max(0.0)
    }
}
