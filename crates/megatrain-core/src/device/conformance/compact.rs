//! AdamW over smaller states: what is stored after each of several updates is what the host stores.
use super::{Device, DeviceAdamw, Stream, as_bytes, download, finish, require, upload, values};
use crate::adamw::AdamwScalars;
use crate::adamw::kernels::compact::{CompactMoments, CompactWeights, adamw_compact};
use crate::adamw::kernels::{self, Isa, Values};
use crate::error::Result;
use crate::layout::{Dtype, Master, Moments, StateFormat};

/// What the host holds of one parameter.
struct Planes {
    hi: Vec<u16>,
    lo: Vec<u16>,
    low: Vec<u8>,
    full: Vec<f32>,
    wide: [Vec<f32>; 2],
    halves: [Vec<u16>; 2],
    groups: [Vec<u8>; 2],
}

fn bytes_of(halves: &[u16]) -> Vec<u8> {
    halves.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

impl Planes {
    fn new(weights: &[f32]) -> Self {
        let len = weights.len();
        let mut planes = Self {
            hi: vec![0; len],
            lo: vec![0; len],
            low: vec![0; len],
            full: weights.to_vec(),
            wide: [vec![0.0; len], vec![0.0; len]],
            halves: [vec![0; len], vec![0; len]],
            groups: [0, 1].map(|_| vec![0; Moments::Bits8.bytes(len as u64) as usize]),
        };
        // The upper halves of the short master are those of the long one, or nearly: each kind of master has its own run.
        kernels::split_master(weights, &mut planes.hi, &mut planes.lo);
        planes
    }

    fn update(&mut self, split: bool, state: StateFormat, grad: Values<'_>, scalars: &AdamwScalars, first: u64) {
        let weights = match (split, state.master) {
            (true, Master::Bits32) => CompactWeights::Split32(&mut self.hi, &mut self.lo),
            (true, Master::Bits24) => CompactWeights::Split24(&mut self.hi, &mut self.low),
            (false, _) => CompactWeights::Full(&mut self.full),
        };
        let ([m, v], [m_half, v_half], [m_group, v_group]) = (&mut self.wide, &mut self.halves, &mut self.groups);
        let moments = match state.moments {
            Moments::Fp32 => CompactMoments::Fp32(m, v),
            Moments::Bf16 => CompactMoments::Bf16(m_half, v_half),
            Moments::Bits8 => CompactMoments::Bits8(m_group, v_group),
        };
        adamw_compact(Isa::Scalar, weights, moments, grad, scalars, first);
    }

    fn weights(&self, split: bool) -> Vec<u8> {
        if split { bytes_of(&self.hi) } else { as_bytes(&self.full, Dtype::F32) }
    }

    fn residual(&self, state: StateFormat) -> Vec<u8> {
        if state.master == Master::Bits32 { bytes_of(&self.lo) } else { self.low.clone() }
    }

    fn moment(&self, state: StateFormat, index: usize) -> Vec<u8> {
        match state.moments {
            Moments::Fp32 => as_bytes(&self.wide[index], Dtype::F32),
            Moments::Bf16 => bytes_of(&self.halves[index]),
            Moments::Bits8 => self.groups[index].clone(),
        }
    }
}

pub(super) fn adamw(device: &dyn Device) -> Result<()> {
    for moments in [Moments::Fp32, Moments::Bf16, Moments::Bits8] {
        for master in [Master::Bits32, Master::Bits24] {
            for split in [true, false] {
                let state = StateFormat { moments, master };
                if state != StateFormat::default() && (split || master == Master::Bits32) {
                    for len in [1usize, 31, 129, 1_000, 4_099] {
                        for grad_dtype in [Dtype::Bf16, Dtype::F32] {
                            case(device, state, split, len, grad_dtype)?;
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

fn case(device: &dyn Device, state: StateFormat, split: bool, len: usize, grad_dtype: Dtype) -> Result<()> {
    let mut host = Planes::new(&values(len, 5));
    let weights = upload(device, &host.weights(split))?;
    let residual = if split { Some(upload(device, &host.residual(state))?) } else { None };
    let (exp_avg, exp_avg_sq) = (upload(device, &host.moment(state, 0))?, upload(device, &host.moment(state, 1))?);
    for step in 1..=6u64 {
        let mut gradient = values(len, 20 + step);
        for (i, value) in gradient.iter_mut().enumerate() {
            // Some elements see no gradient, some next to none, and those of one scale differ by orders of magnitude.
            *value *= [1.0, 0.0, 1e-3, 1e-20, 30.0][i % 5];
        }
        let mut narrow = vec![0u16; len];
        kernels::f32_to_bf16(&gradient, &mut narrow);
        let grad = upload(device, &as_bytes(&gradient, grad_dtype))?;
        let scalars = AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.1, step, 0.37)?.rounded_by(3, "w", step);
        // A first element beyond 32 bits, at a group of its parameter.
        let first = (1 << 33) + 256;
        let update = DeviceAdamw {
            weights: &weights,
            residual: residual.as_ref(),
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            state,
            first,
            grad: &grad,
            grad_dtype,
            numel: len as u64,
            scalars,
        };
        device.adamw(Stream::Update, &update)?;
        finish(device, Stream::Update)?;
        let values = if grad_dtype == Dtype::Bf16 { Values::Bf16(&narrow) } else { Values::F32(&gradient) };
        host.update(split, state, values, &scalars, first);
        let what = |plane: &str| {
            format!("{plane} of {len} elements, {state:?}, split {split}, {grad_dtype:?} gradient, step {step}")
        };
        require(download(device, &weights)? == host.weights(split), || what("weights"))?;
        if let Some(residual) = &residual {
            require(download(device, residual)? == host.residual(state), || what("residual"))?;
        }
        require(download(device, &exp_avg)? == host.moment(state, 0), || what("exp_avg"))?;
        require(download(device, &exp_avg_sq)? == host.moment(state, 1), || what("exp_avg_sq"))?;
    }
    Ok(())
}
