//! The two things that are computed on the device outside PyTorch: AdamW, and the sums of squares of the gradient norm.
//!
//! PTX text, assembled by the driver for its GPU, so that no toolkit is needed and the arithmetic is exactly what is
//! written: `fma.rn`, `div.rn`, `sqrt.rn`, no flush to zero.
use std::sync::Arc;

use megatrain_core::device::{DeviceAdamw, DeviceMemory};
use megatrain_core::layout::{Dtype, Master, Moments, Precision, StateFormat};
use megatrain_core::{Error, Result};

use crate::driver::{Arg, Context, Function, Module, StreamHandle};

const ADAMW_SPLIT: &str = include_str!("ptx/adamw_split.ptx");
const ADAMW_FP32: &str = include_str!("ptx/adamw_fp32.ptx");
const ADAMW_COMPACT: &str = include_str!("ptx/adamw_compact.ptx");
const SUM_SQUARES: &str = include_str!("ptx/sum_squares.ptx");

/// Arguments of AdamW's kernels; over smaller states the first element and the key of the rounding too.
const ADAMW_ARGS: usize = 16;
const ADAMW_COMPACT_ARGS: usize = ADAMW_ARGS + 3;
/// Arguments of `sum_squares`.
const SUM_SQUARES_ARGS: usize = 4;
/// Threads a block, in all of them.
const THREADS: u32 = 256;
/// Elements that an AdamW thread takes at a time.
const ADAMW_GROUP: u64 = 4;
/// Blocks a multiprocessor in AdamW's grid: enough to fill it several times over, so that the tail is short.
const BLOCKS_PER_MULTIPROCESSOR: u64 = 32;
/// AdamW's flag: all addresses allow accesses of four elements at once.
const VECTOR: u32 = 1;
/// AdamW's flag: the gradient is fp32.
const FP32_GRAD: u32 = 2;
/// Flags of AdamW over smaller states: moments are bf16; 8-bit; the master has 8 bits beside the weights; they are fp32.
const BF16_MOMENTS: u32 = 4;
const SHORT_MOMENTS: u32 = 8;
const SHORT_MASTER: u32 = 16;
const FP32_WEIGHTS: u32 = 32;

pub(crate) struct Kernels {
    adamw_split: Function,
    adamw_fp32: Function,
    adamw_compact: Function,
    sum_squares: Function,
    max_blocks: u64,
}

impl Kernels {
    pub(crate) fn assemble(context: &Arc<Context>, multiprocessors: u32) -> Result<Self> {
        let function = |ptx: &str, name: &std::ffi::CStr, num_args: usize| -> Result<Function> {
            let module = Module::assemble(context, ptx).map_err(|(error, log)| Error::Device {
                call: error.call,
                code: error.code,
                detail: format!("{} (kernel {}) {log}", error.meaning(), name.to_string_lossy()),
            })?;
            Ok(Arc::new(module).function(name, num_args)?)
        };
        Ok(Self {
            adamw_split: function(ADAMW_SPLIT, c"adamw_split", ADAMW_ARGS)?,
            adamw_fp32: function(ADAMW_FP32, c"adamw_fp32", ADAMW_ARGS)?,
            adamw_compact: function(ADAMW_COMPACT, c"adamw_compact", ADAMW_COMPACT_ARGS)?,
            sum_squares: function(SUM_SQUARES, c"sum_squares", SUM_SQUARES_ARGS)?,
            max_blocks: u64::from(multiprocessors.max(1)) * BLOCKS_PER_MULTIPROCESSOR,
        })
    }

    pub(crate) fn adamw(&self, stream: StreamHandle, update: &DeviceAdamw<'_>) -> Result<()> {
        let DeviceAdamw { weights, residual, exp_avg, exp_avg_sq, state, first, grad, grad_dtype, numel, scalars } =
            *update;
        let weight_size = if residual.is_some() { 2 } else { 4 };
        let (stored, moments) = (state.moments.stored(numel), state.moments.dtype().size());
        expect_elements("weights", weights, numel, weight_size)?;
        if let Some(residual) = residual {
            expect_elements("residual", residual, numel, state.residual_size(Precision::Bf16))?;
        }
        expect_elements("exp_avg", exp_avg, stored, moments)?;
        expect_elements("exp_avg_sq", exp_avg_sq, stored, moments)?;
        let fp32_grad = is_fp32("AdamW's gradient", grad_dtype)?;
        expect_elements("grad", grad, numel, grad_dtype.size())?;
        if numel == 0 {
            return Ok(());
        }
        let arguments = |flags: u32| {
            [
                Arg::U64(weights.address),
                Arg::U64(residual.map_or(0, |r| r.address)),
                Arg::U64(exp_avg.address),
                Arg::U64(exp_avg_sq.address),
                Arg::U64(grad.address),
                Arg::U64(numel),
                Arg::U32(flags),
                Arg::F32(scalars.grad_scale),
                Arg::F32(scalars.beta1),
                Arg::F32(scalars.one_minus_beta1),
                Arg::F32(scalars.beta2),
                Arg::F32(scalars.one_minus_beta2),
                Arg::F32(scalars.inv_sqrt_bias2),
                Arg::F32(scalars.eps),
                Arg::F32(scalars.step_size),
                Arg::F32(scalars.decay),
            ]
        };
        let blocks = |group: u64| {
            let blocks = numel.div_ceil(group * u64::from(THREADS)).min(self.max_blocks);
            u32::try_from(blocks).expect("bounded by the multiprocessors")
        };
        let fp32_grad = if fp32_grad { FP32_GRAD } else { 0 };
        if state != StateFormat::default() {
            let format = match state.moments {
                Moments::Fp32 => 0,
                Moments::Bf16 => BF16_MOMENTS,
                Moments::Bits8 => SHORT_MOMENTS,
            };
            let master = match (residual, state.master) {
                (None, _) => FP32_WEIGHTS,
                (Some(_), Master::Bits24) => SHORT_MASTER,
                (Some(_), Master::Bits32) => 0,
            };
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the rounding counts modulo 2^32, and takes a key's halves"
            )]
            let rounding = [first as u32, scalars.rounding as u32, (scalars.rounding >> 32) as u32].map(Arg::U32);
            let args: Vec<Arg> = arguments(fp32_grad | format | master).into_iter().chain(rounding).collect();
            return Ok(self.adamw_compact.launch(stream, blocks(1), THREADS, &args)?);
        }
        let of_four = |memory: &DeviceMemory, size: u64| memory.address.is_multiple_of(ADAMW_GROUP * size);
        let vector = of_four(weights, weight_size)
            && residual.is_none_or(|r| of_four(r, 2))
            && of_four(exp_avg, 4)
            && of_four(exp_avg_sq, 4)
            && of_four(grad, grad_dtype.size());
        let flags = if vector { VECTOR } else { 0 } | fp32_grad;
        let function = if residual.is_some() { &self.adamw_split } else { &self.adamw_fp32 };
        Ok(function.launch(stream, blocks(ADAMW_GROUP), THREADS, &arguments(flags))?)
    }

    pub(crate) fn sum_squares(
        &self,
        stream: StreamHandle,
        src: &DeviceMemory,
        dtype: Dtype,
        blocks: &DeviceMemory,
        num_blocks: u64,
        out: &DeviceMemory,
    ) -> Result<()> {
        let fp32 = is_fp32("the gradient norm's input", dtype)?;
        expect_elements("the gradient norm's input", src, 0, dtype.size())?;
        expect_elements("norm blocks", blocks, num_blocks, 16)?;
        expect_elements("block sums", out, num_blocks, 8)?;
        if num_blocks == 0 {
            return Ok(());
        }
        let grid = u32::try_from(num_blocks).ok().filter(|&n| i32::try_from(n).is_ok()).ok_or(Error::TooMany {
            what: "norm blocks",
            count: num_blocks,
            most: i32::MAX as u64,
        })?;
        let args = [Arg::U64(src.address), Arg::U64(blocks.address), Arg::U64(out.address), Arg::U32(u32::from(fp32))];
        Ok(self.sum_squares.launch(stream, grid, THREADS, &args)?)
    }
}

fn is_fp32(what: &str, dtype: Dtype) -> Result<bool> {
    match dtype {
        Dtype::Bf16 => Ok(false),
        Dtype::F32 => Ok(true),
        other => Err(Error::WrongDtype { what: what.to_owned(), expected: "bf16 or f32", got: other.name() }),
    }
}

fn expect_elements(what: &'static str, memory: &DeviceMemory, numel: u64, size: u64) -> Result<()> {
    if numel.checked_mul(size).is_some_and(|bytes| bytes <= memory.len) && memory.address.is_multiple_of(size.min(8)) {
        Ok(())
    } else {
        Err(Error::WrongMemory { what, numel, size, bytes: memory.len, address: memory.address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kernel_declares_as_many_parameters_as_it_is_given() {
        for (ptx, args) in [
            (ADAMW_SPLIT, ADAMW_ARGS),
            (ADAMW_FP32, ADAMW_ARGS),
            (ADAMW_COMPACT, ADAMW_COMPACT_ARGS),
            (SUM_SQUARES, SUM_SQUARES_ARGS),
        ] {
            assert_eq!(ptx.matches(".param .").count(), args);
            assert!(ptx.contains(&format!(".maxntid {THREADS}, 1, 1")));
        }
    }

    #[test]
    fn both_adamw_kernels_take_the_same_parameters_in_the_same_order() {
        let parameters = |ptx: &'static str| ptx.lines().filter(|l| l.contains(".param .")).collect::<Vec<_>>();
        assert_eq!(parameters(ADAMW_SPLIT), parameters(ADAMW_FP32));
    }

    #[test]
    fn texts_for_the_assembler_are_plain_ascii() {
        assert!(
            [ADAMW_SPLIT, ADAMW_FP32, ADAMW_COMPACT, SUM_SQUARES]
                .iter()
                .all(|ptx| ptx.is_ascii() && !ptx.contains('\0'))
        );
    }

    #[test]
    fn ranges_that_leave_their_memory_are_refused() {
        let memory = |address, len| DeviceMemory { owner: Arc::new(()), address, len };
        assert!(expect_elements("m", &memory(512, 40), 10, 4).is_ok());
        assert!(expect_elements("m", &memory(512, 40), 11, 4).is_err());
        assert!(expect_elements("m", &memory(514, 40), 10, 4).is_err());
        assert!(expect_elements("m", &memory(512, 40), u64::MAX / 2, 4).is_err());
        assert!(is_fp32("gradient", Dtype::F16).is_err());
    }
}
