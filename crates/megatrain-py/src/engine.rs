//! The stream engine: its calls, with waiting cut into slices.
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::task::Poll;

use megatrain_core::layout::{Dtype, Role};
use megatrain_core::plan::{Region, Request};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::stream::{Begin, Engine as CoreEngine, Group, Kept as CoreKept, Options, PlaneName};
use megatrain_core::stream::{Rows, SaveFile, Saved};
use megatrain_core::{Error, Result};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffer::Buffer;
use crate::device::Device;
use crate::dlpack::{Array, Element};
use crate::error::{SLICE, detached, interruptible, to_python};
use crate::op::{ComputeOp, Outcome};
use crate::plan::{read, read_plan, write};

/// Bytes of a plane that are read between two looks at signals.
const READ_BYTES: usize = 256 << 20;

/// `(lr, beta1, beta2, eps, weight_decay)`
type GroupTuple = (f64, f64, f64, f64, f64);
/// `(path, plane, header, [(unit, tensor), ...])`
type SaveFileTuple<'py> = (PathBuf, String, Bound<'py, PyBytes>, Vec<(usize, usize)>);
/// `([(path, [crc32, ...]), ...], [[count, ...], ...])`
type SavedTuple = (Vec<(PathBuf, Vec<u32>)>, Vec<Vec<u64>>);

/// The stream engine over one model's units.
#[pyclass(frozen, module = "megatrain._core")]
pub(crate) struct Engine {
    engine: Arc<CoreEngine>,
    cuda: Option<u32>,
}

impl Engine {
    /// Calls `poll` until it is ready, with the interpreter released, and looks after signals in between.
    fn wait<T: Send>(&self, py: Python<'_>, poll: impl Fn(&CoreEngine) -> Result<Poll<T>> + Sync) -> PyResult<T> {
        loop {
            if let Poll::Ready(value) = detached(py, || poll(&self.engine))? {
                return Ok(value);
            }
            py.check_signals()?;
        }
    }
}

/// The state of a model between two engines.
#[pyclass(frozen, module = "megatrain._core")]
pub(crate) struct Kept(Arc<CoreKept>);

/// Rows of a table as an int64 array.
fn looked_up(tensor: usize, rows: &Bound<'_, PyAny>) -> PyResult<Rows> {
    let array = Array::read("rows", rows)?;
    array.expect("rows", &[Element::I64])?;
    let row = |&row: &i64| u64::try_from(row).map_err(|_| PyValueError::new_err(format!("rows: {row} is negative")));
    let rows = array.slice::<i64>().iter().map(row).collect::<PyResult<_>>()?;
    Ok(Rows { tensor, rows })
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (device, request, plan, options = "{}", kept = None))]
    fn new(
        py: Python<'_>,
        device: &Device,
        request: &str,
        plan: &str,
        options: &str,
        kept: Option<&Kept>,
    ) -> PyResult<Self> {
        let core = Arc::clone(device.core());
        let (request, plan, options) = (request.to_owned(), plan.to_owned(), options.to_owned());
        let kept = kept.map(|kept| Arc::clone(&kept.0));
        let engine = interruptible(py, "megatrain-setup", move || {
            let options: Options = read("options", &options)?;
            let (request, plan) = (Request::from_json(&request)?, read_plan(&plan)?);
            match kept {
                None => CoreEngine::new(core, &request, &plan, &options),
                Some(kept) => CoreEngine::with_kept(core, &request, &plan, &options, &kept),
            }
        })?;
        Ok(Self { engine: Arc::new(engine), cuda: device.cuda_ordinal() })
    }

    fn keep(&self, py: Python<'_>) -> PyResult<Kept> {
        self.drain(py)?;
        detached(py, || self.engine.keep()).map(|kept| Kept(Arc::new(kept)))
    }

    fn layout(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || write("the layout", &self.engine.layouts()))
    }

    fn allocated(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || write("the items", &self.engine.allocated()))
    }

    fn warnings(&self) -> Vec<String> {
        self.engine.warnings()
    }

    fn region(&self, name: &str) -> PyResult<Buffer> {
        let region = match name {
            "weights" => Region::Weights,
            "grads" => Region::Grads,
            "accumulators" => Region::Accumulators,
            "stage" => Region::Stage,
            other => {
                return Err(PyValueError::new_err(format!(
                    "there is no region {other:?}, only weights, grads, accumulators and stage"
                )));
            }
        };
        Ok(Buffer::on_device(self.engine.region(region), self.cuda))
    }

    fn weights_offset(&self, unit: usize) -> Option<u64> {
        self.engine.weights_offset(unit)
    }

    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    #[pyo3(signature = (kind, micro_batches, compute_stream = 0, groups = None, accumulate = false, rows = None,
                        idle = vec![], synchronous = false))]
    fn begin(
        &self,
        py: Python<'_>,
        kind: &str,
        micro_batches: u32,
        compute_stream: u64,
        groups: Option<Vec<GroupTuple>>,
        accumulate: bool,
        rows: Option<(usize, Bound<'_, PyAny>)>,
        idle: Vec<usize>,
        synchronous: bool,
    ) -> PyResult<()> {
        let pass = match kind {
            "train" => Pass::Train,
            "eval" => Pass::Eval,
            other => return Err(PyValueError::new_err(format!("a pass is of kind train or eval, not {other:?}"))),
        };
        let groups = groups.map(|given| self::groups(given, &idle));
        let rows = rows.map(|(tensor, rows)| looked_up(tensor, &rows)).transpose()?;
        let mut begin = Begin::new(pass, micro_batches);
        (begin.compute_stream, begin.groups, begin.rows) = (compute_stream, groups, rows);
        (begin.accumulate, begin.synchronous) = (accumulate, synchronous);
        self.wait(py, |engine| engine.begin(&begin, SLICE))
    }

    fn next(&self, py: Python<'_>) -> PyResult<Option<ComputeOp>> {
        Ok(self.wait(py, |engine| engine.next(SLICE))?.map(ComputeOp::from))
    }

    fn route(&self, py: Python<'_>, unit: usize, wanted: Vec<bool>) -> PyResult<()> {
        detached(py, || self.engine.route(unit, &wanted))
    }

    fn finish(&self, py: Python<'_>, op: &ComputeOp) -> PyResult<()> {
        let id = op.id();
        detached(py, || self.engine.finish(id))
    }

    fn gradient_norm(&self, py: Python<'_>) -> PyResult<f64> {
        self.wait(py, |engine| engine.gradient_norm(SLICE))
    }

    #[pyo3(signature = (groups, max_grad_norm, idle = vec![]))]
    fn apply(
        &self,
        py: Python<'_>,
        groups: Vec<GroupTuple>,
        max_grad_norm: Option<f64>,
        idle: Vec<usize>,
    ) -> PyResult<Outcome> {
        let groups = self::groups(groups, &idle);
        Ok(self.wait(py, |engine| engine.apply(&groups, max_grad_norm, SLICE))?.into())
    }

    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, |engine| engine.abandon(SLICE))
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.engine.check())
    }

    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, |engine| engine.drain(SLICE))
    }

    #[pyo3(signature = (unit, tensor, plane, out, start = 0))]
    fn read(
        &self,
        py: Python<'_>,
        unit: usize,
        tensor: usize,
        plane: &str,
        out: &Bound<'_, PyAny>,
        start: u64,
    ) -> PyResult<()> {
        let plane = PlaneName::from_str(plane).map_err(|e| to_python(py, &e))?;
        let mut out = Array::write("out", out)?;
        let dtype = self.plane_dtype(unit, tensor, plane).map_err(|e| to_python(py, &e))?;
        if dtype_of(out.element()) != dtype {
            return Err(PyValueError::new_err(format!(
                "out: {} is needed for that plane, {} was given",
                name_of(dtype),
                out.element().name()
            )));
        }
        self.drain(py)?;
        let size = out.element().size();
        let mut first = start;
        for part in out.bytes_mut().chunks_mut(READ_BYTES) {
            py.check_signals()?;
            let elements = (part.len() / size) as u64;
            detached(py, || self.engine.read(unit, tensor, plane, first, part))?;
            first += elements;
        }
        Ok(())
    }

    #[pyo3(signature = (unit, tensor, plane, source, start = 0))]
    fn write(
        &self,
        py: Python<'_>,
        unit: usize,
        tensor: usize,
        plane: &str,
        source: &Bound<'_, PyAny>,
        start: u64,
    ) -> PyResult<()> {
        let plane = PlaneName::from_str(plane).map_err(|e| to_python(py, &e))?;
        let source = Array::read("source", source)?;
        self.drain(py)?;
        // In one call, so that of state on the host nothing has been written when a value is refused.
        detached(py, || self.engine.write(unit, tensor, plane, start, dtype_of(source.element()), source.bytes()))
    }

    fn step_count(&self, py: Python<'_>, unit: usize, tensor: usize) -> PyResult<u64> {
        self.drain(py)?;
        detached(py, || self.engine.step_count(unit, tensor))
    }

    fn set_step_count(&self, py: Python<'_>, unit: usize, tensor: usize, count: u64) -> PyResult<()> {
        self.drain(py)?;
        detached(py, || self.engine.set_step_count(unit, tensor, count))
    }

    fn begin_save(&self, py: Python<'_>, files: Vec<SaveFileTuple<'_>>, chunk_bytes: u64, needed: u64) -> PyResult<()> {
        let file = |(path, plane, header, tensors): SaveFileTuple<'_>| {
            let plane = Plane::from_str(&plane).map_err(|e| to_python(py, &e))?;
            Ok(SaveFile { path, header: header.as_bytes().to_vec(), plane, tensors })
        };
        let files = files.into_iter().map(file).collect::<PyResult<Vec<_>>>()?;
        detached(py, || self.engine.begin_save(files, chunk_bytes, needed))
    }

    fn save_progress(&self, py: Python<'_>) -> PyResult<(u64, bool)> {
        detached(py, || self.engine.save_progress())
    }

    fn finish_save(&self, py: Python<'_>) -> PyResult<SavedTuple> {
        let Saved { sums, counts, .. } = self.wait(py, |engine| engine.finish_save(SLICE))?;
        Ok((sums, counts))
    }

    fn cancel_save(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            self.engine.cancel_save();
            Ok(())
        })
    }

    fn lanes(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || write("the lanes", &self.engine.lanes()))
    }

    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || write("the figures", &self.engine.stats()?))
    }

    fn trace(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || Ok(self.engine.trace()))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            self.engine.close();
            Ok(())
        })
    }
}

impl Engine {
    /// The dtype in which a plane of a tensor is read.
    fn plane_dtype(&self, unit: usize, tensor: usize, plane: PlaneName) -> Result<Dtype> {
        let layouts = self.engine.layouts();
        let unit = layouts.get(unit).ok_or(Error::UnknownUnit { index: unit, units: layouts.len() })?;
        let unknown = || Error::UnknownTensor { unit: unit.name.clone(), index: tensor, tensors: unit.tensors.len() };
        let found = unit.tensors.get(tensor).ok_or_else(unknown)?;
        Ok(match plane {
            PlaneName::State(Plane::Weights) if found.spec.role == Role::Frozen => found.spec.dtype,
            PlaneName::State(Plane::Weights) => unit.precision.dtype(),
            PlaneName::State(Plane::Residual) => unit.state.residual_dtype(),
            PlaneName::State(Plane::ExpAvg | Plane::ExpAvgSq) => unit.state.moments.dtype(),
            PlaneName::State(Plane::Master) | PlaneName::Gradient => Dtype::F32,
        })
    }
}

/// Groups as the core takes them; `idle` are the numbers of those that have no gradient in this step.
fn groups(given: Vec<GroupTuple>, idle: &[usize]) -> Vec<Group> {
    let group = |(number, (lr, beta1, beta2, eps, weight_decay)): (usize, GroupTuple)| Group {
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        idle: idle.contains(&number),
    };
    given.into_iter().enumerate().map(group).collect()
}

/// The core's dtype; residuals may be given as either kind of 16-bit integer.
fn dtype_of(element: Element) -> Dtype {
    match element {
        Element::Bf16 => Dtype::Bf16,
        Element::F16 => Dtype::F16,
        Element::F32 => Dtype::F32,
        Element::F64 => Dtype::F64,
        Element::I64 => Dtype::I64,
        Element::I32 => Dtype::I32,
        Element::I16 | Element::U16 => Dtype::I16,
        Element::I8 => Dtype::I8,
        Element::U8 => Dtype::U8,
        Element::Bool => Dtype::Bool,
    }
}

fn name_of(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => Element::Bf16.name(),
        Dtype::F16 => Element::F16.name(),
        Dtype::F32 => Element::F32.name(),
        Dtype::F64 => Element::F64.name(),
        Dtype::I64 => Element::I64.name(),
        Dtype::I32 => Element::I32.name(),
        Dtype::I16 => Element::I16.name(),
        Dtype::I8 => Element::I8.name(),
        Dtype::U8 => Element::U8.name(),
        Dtype::Bool => Element::Bool.name(),
    }
}
