//! The optimizer's loops alone, over arrays of the caller's: for tests, benchmarks and tools.
use std::sync::{Mutex, PoisonError};

use megatrain_core::adamw::AdamwScalars;
use megatrain_core::adamw::kernels::{self, Isa, Values, Weights};
use megatrain_core::host::{Affinity, Pool};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::dlpack::{Array, Element};
use crate::error::{detached, to_python};

/// Elements between two looks at pending signals: some tens of milliseconds on one thread.
const TURN: usize = 1 << 24;
/// Elements of one thread's piece of a turn.
const PIECE: usize = 1 << 16;

/// The optimizer kernel alone, in place on contiguous CPU arrays.
#[pyfunction]
#[pyo3(signature = (weights, residual, exp_avg, exp_avg_sq, grad, *, lr, betas, eps, weight_decay, step,
                    grad_scale = 1.0, isa = "auto", threads = 1))]
#[expect(clippy::too_many_arguments, reason = "the arguments of torch.optim.AdamW")]
pub(crate) fn adamw(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    residual: Option<&Bound<'_, PyAny>>,
    exp_avg: &Bound<'_, PyAny>,
    exp_avg_sq: &Bound<'_, PyAny>,
    grad: &Bound<'_, PyAny>,
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    step: u64,
    grad_scale: f64,
    isa: &str,
    threads: usize,
) -> PyResult<()> {
    let to_py = |error| to_python(py, &error);
    let isa = Isa::select((isa != "auto").then_some(isa)).map_err(to_py)?;
    let scalars = AdamwScalars::new(lr, betas, eps, weight_decay, step, grad_scale).map_err(to_py)?;
    let mut weights = Array::write("weights", weights)?;
    let mut residual = residual.map(|r| Array::write("residual", r)).transpose()?;
    let mut exp_avg = Array::write("exp_avg", exp_avg)?;
    let mut exp_avg_sq = Array::write("exp_avg_sq", exp_avg_sq)?;
    let grad = Array::read("grad", grad)?;
    match &residual {
        Some(residual) => {
            weights.expect("weights (with a residual)", &[Element::Bf16])?;
            residual.expect("residual", &[Element::I16, Element::U16])?;
        }
        None => weights.expect("weights (without a residual)", &[Element::F32])?,
    }
    exp_avg.expect("exp_avg", &[Element::F32])?;
    exp_avg_sq.expect("exp_avg_sq", &[Element::F32])?;
    grad.expect("grad", &[Element::Bf16, Element::F32])?;
    let mut all = vec![("weights", &weights), ("exp_avg", &exp_avg), ("exp_avg_sq", &exp_avg_sq), ("grad", &grad)];
    all.extend(residual.as_ref().map(|r| ("residual", r)));
    same_length_apart(&all)?;

    let pool = match threads {
        1 => None,
        n => Some(detached(py, || Pool::new(Some(n), &Affinity::Free))?),
    };
    for start in (0..weights.numel()).step_by(TURN) {
        py.check_signals()?;
        let turn = start..weights.numel().min(start + TURN);
        detached(py, || {
            let hi_or_full = match residual.as_mut() {
                Some(lo) => Planes::Split(&mut weights.slice_mut()[turn.clone()], &mut lo.slice_mut()[turn.clone()]),
                None => Planes::Full(&mut weights.slice_mut()[turn.clone()]),
            };
            let exp_avg = &mut exp_avg.slice_mut()[turn.clone()];
            let exp_avg_sq = &mut exp_avg_sq.slice_mut()[turn.clone()];
            let grad = match grad.element() {
                Element::Bf16 => Values::Bf16(&grad.slice()[turn]),
                _ => Values::F32(&grad.slice()[turn]),
            };
            update(pool.as_ref(), isa, &scalars, hi_or_full, exp_avg, exp_avg_sq, grad)
        })?;
    }
    Ok(())
}

/// The masters of one slice of work.
enum Planes<'a> {
    Split(&'a mut [u16], &'a mut [u16]),
    Full(&'a mut [f32]),
}

/// One thread's share of a slice.
struct Piece<'a> {
    weights: Weights<'a>,
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
    grad: Values<'a>,
}

fn update(
    pool: Option<&Pool>,
    isa: Isa,
    scalars: &AdamwScalars,
    planes: Planes<'_>,
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    grad: Values<'_>,
) -> megatrain_core::Result<()> {
    let weights: Vec<Weights<'_>> = match planes {
        Planes::Split(hi, lo) => {
            hi.chunks_mut(PIECE).zip(lo.chunks_mut(PIECE)).map(|(hi, lo)| Weights::Split { hi, lo }).collect()
        }
        Planes::Full(weights) => weights.chunks_mut(PIECE).map(Weights::Full).collect(),
    };
    let grads: Vec<Values<'_>> = match grad {
        Values::Bf16(values) => values.chunks(PIECE).map(Values::Bf16).collect(),
        Values::F32(values) => values.chunks(PIECE).map(Values::F32).collect(),
    };
    let pieces: Vec<Mutex<Piece<'_>>> = weights
        .into_iter()
        .zip(exp_avg.chunks_mut(PIECE))
        .zip(exp_avg_sq.chunks_mut(PIECE))
        .zip(grads)
        .map(|(((weights, exp_avg), exp_avg_sq), grad)| Mutex::new(Piece { weights, exp_avg, exp_avg_sq, grad }))
        .collect();
    let job = |index: usize| {
        let mut piece = pieces[index].lock().unwrap_or_else(PoisonError::into_inner);
        let Piece { weights, exp_avg, exp_avg_sq, grad } = &mut *piece;
        let weights = match weights {
            Weights::Split { hi, lo } => Weights::Split { hi, lo },
            Weights::Full(weights) => Weights::Full(weights),
        };
        kernels::adamw(isa, weights, exp_avg, exp_avg_sq, *grad, scalars);
    };
    match pool {
        Some(pool) => pool.run(pieces.len(), &job),
        None => {
            (0..pieces.len()).for_each(job);
            Ok(())
        }
    }
}

/// fp32 -> bf16 upper plane and int16 residual, exactly.
#[pyfunction]
pub(crate) fn split(
    py: Python<'_>,
    master: &Bound<'_, PyAny>,
    weights: &Bound<'_, PyAny>,
    residual: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let master = Array::read("master", master)?;
    let mut weights = Array::write("weights", weights)?;
    let mut residual = Array::write("residual", residual)?;
    master.expect("master", &[Element::F32])?;
    weights.expect("weights", &[Element::Bf16])?;
    residual.expect("residual", &[Element::I16, Element::U16])?;
    same_length_apart(&[("master", &master), ("weights", &weights), ("residual", &residual)])?;
    for start in (0..master.numel()).step_by(TURN) {
        py.check_signals()?;
        let turn = start..master.numel().min(start + TURN);
        detached(py, || {
            let (weights, residual) = (&mut weights.slice_mut()[turn.clone()], &mut residual.slice_mut()[turn.clone()]);
            kernels::split_master(&master.slice()[turn], weights, residual);
            Ok(())
        })?;
    }
    Ok(())
}

/// The kernels in use: avx512, avx2 or scalar.
#[pyfunction]
pub(crate) fn isa(py: Python<'_>) -> PyResult<&'static str> {
    Isa::select(None).map(Isa::name).map_err(|error| to_python(py, &error))
}

/// Refuses arrays of unequal length, and arrays that share memory: each is written, or read while another is written.
fn same_length_apart(arrays: &[(&str, &Array)]) -> PyResult<()> {
    for (i, (name, array)) in arrays.iter().enumerate() {
        let (first_name, first) = &arrays[0];
        if array.numel() != first.numel() {
            return Err(PyValueError::new_err(format!(
                "{name} has {} elements, {first_name} has {}",
                array.numel(),
                first.numel()
            )));
        }
        for (other_name, other) in &arrays[..i] {
            let (a, b) = (array.range(), other.range());
            if a.start < b.end && b.start < a.end {
                return Err(PyValueError::new_err(format!("{name} and {other_name} share memory")));
            }
        }
    }
    Ok(())
}
