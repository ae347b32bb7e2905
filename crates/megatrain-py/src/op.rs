//! What the engine hands to Python: the next operation to compute, and the result of a step.
use megatrain_core::plan::Activation;
use megatrain_core::stream::{ComputeOp as CoreOp, Outcome as CoreOutcome};
use pyo3::prelude::*;

/// What Python must compute next. Offsets are bytes into the regions of the same name.
#[pyclass(frozen, module = "megatrain._core")]
pub(crate) struct ComputeOp {
    op: CoreOp,
}

impl From<CoreOp> for ComputeOp {
    fn from(op: CoreOp) -> Self {
        Self { op }
    }
}

#[pymethods]
impl ComputeOp {
    #[getter]
    pub(crate) fn id(&self) -> u64 {
        self.op.id
    }

    #[getter]
    fn phase(&self) -> &'static str {
        self.op.phase.name()
    }

    #[getter]
    fn unit(&self) -> u32 {
        self.op.unit
    }

    #[getter]
    fn micro_batch(&self) -> u32 {
        self.op.micro_batch
    }

    #[getter]
    fn first(&self) -> bool {
        self.op.first
    }

    #[getter]
    fn last(&self) -> bool {
        self.op.last
    }

    #[getter]
    fn weights(&self) -> u64 {
        self.op.weights
    }

    #[getter]
    fn tied_weights(&self) -> Option<u64> {
        self.op.tied_weights
    }

    #[getter]
    fn grad(&self) -> Option<u64> {
        self.op.grad
    }

    #[getter]
    fn accumulator(&self) -> Option<u64> {
        self.op.accumulator
    }

    #[getter]
    fn tied_accumulator(&self) -> Option<u64> {
        self.op.tied_accumulator
    }

    #[getter]
    fn tied_grad(&self) -> Option<u64> {
        self.op.tied_grad
    }

    #[getter]
    fn round_tied(&self) -> bool {
        self.op.round_tied
    }

    #[getter]
    fn activation(&self) -> &'static str {
        match self.op.activation {
            Activation::Keep => "keep",
            Activation::Offload => "offload",
            Activation::Recompute => "recompute",
        }
    }

    #[getter]
    fn input_on_host(&self) -> bool {
        self.op.input_on_host
    }

    #[getter]
    fn stage(&self) -> Option<u64> {
        self.op.stage
    }

    fn __repr__(&self) -> String {
        let CoreOp { id, phase, unit, micro_batch, .. } = &self.op;
        format!("ComputeOp({id}: {} of unit {unit}, micro-batch {micro_batch})", phase.name())
    }
}

/// Result of one optimizer step.
#[pyclass(frozen, module = "megatrain._core")]
pub(crate) struct Outcome {
    outcome: CoreOutcome,
}

impl From<CoreOutcome> for Outcome {
    fn from(outcome: CoreOutcome) -> Self {
        Self { outcome }
    }
}

#[pymethods]
impl Outcome {
    #[getter]
    fn grad_norm(&self) -> f64 {
        self.outcome.grad_norm
    }

    #[getter]
    fn clip(&self) -> f64 {
        self.outcome.clip
    }

    #[getter]
    fn skipped(&self) -> bool {
        self.outcome.skipped
    }

    fn __repr__(&self) -> String {
        let CoreOutcome { grad_norm, clip, skipped, .. } = self.outcome;
        format!("Outcome(grad_norm={grad_norm}, clip={clip}, skipped={skipped})")
    }
}
