//! Reading and writing planes, wherever a unit's state lives.
use std::str::FromStr;
use std::sync::{PoisonError, RwLock};
use std::task::Poll;
use std::time::Duration;

use super::Engine;
use super::disk_update::{is_stored, stored_offset};
use super::state::Shared;
use crate::adamw::kernels;
use crate::device::{DeviceMemory, Stream};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::layout::{Dtype, Precision, Role, TensorLayout, UnitLayout};
use crate::plan::DeviceRange;
use crate::store::{Plane, UnitPlanes, check_stored, elements_in};

/// A plane of a tensor's state, or its gradient of the last training pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneName {
    /// A plane of the store.
    State(Plane),
    /// The gradient of the pass that was computed last, before clipping.
    Gradient,
}

impl FromStr for PlaneName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        if name == "gradient" { Ok(Self::Gradient) } else { name.parse().map(Self::State) }
    }
}

/// Long enough to mean "until it is done": callers who must look up now and then drain in slices first.
const FOREVER: Duration = Duration::from_secs(1 << 32);

impl Engine {
    /// Copies elements of a plane from `start` on, as many as `out` holds, after every pending update: fp32 for master,
    /// moments and gradient, the plane's own dtype otherwise.
    ///
    /// # Errors
    /// [`Error`] naming the tensor when there is no such plane or range, or no gradient.
    pub fn read(&self, unit: usize, tensor: usize, plane: PlaneName, start: u64, out: &mut [u8]) -> Result<()> {
        self.drained()?;
        let _shared = self.callers(unit)?.read().unwrap_or_else(PoisonError::into_inner);
        match plane {
            PlaneName::Gradient => self.shared.read_gradient(unit, tensor, start, out),
            PlaneName::State(plane) if self.shared.on_device(unit) && !is_stored(plane) => {
                let (dtype, _) = self.shared.plane_of(unit, tensor, plane)?;
                self.shared.through_window(unit, tensor, start, out.len(), dtype, |w| {
                    w.copy_out()?;
                    w.planes.read(&w.layout, 0, plane, 0, &mut out[w.bytes.clone()])
                })
            }
            PlaneName::State(plane) => {
                if self.shared.on_device(unit) {
                    let (dtype, held) = self.shared.plane_of(unit, tensor, plane)?;
                    elements_in(self.shared.find(unit, tensor)?.1, start, out.len(), dtype, held)?;
                    drop(self.shared.enter()?);
                    return self
                        .shared
                        .guard(unit, "read", || self.shared.read_stored(unit, tensor, plane, start, out));
                }
                self.shared.read_stored(unit, tensor, plane, start, out)
            }
        }
    }

    /// Overwrites elements of a plane from `start` on, after every pending update. `Master` takes bf16, fp16, fp32 and
    /// fp64, the others their own dtype.
    ///
    /// # Errors
    /// [`Error`] naming the tensor when there is no such plane or range, the dtype is another one, or a value
    /// is not finite. Nothing is written then to state on the host; on the device and on disk, chunks before it have been.
    pub fn write(
        &self,
        unit: usize,
        tensor: usize,
        plane: PlaneName,
        start: u64,
        dtype: Dtype,
        source: &[u8],
    ) -> Result<()> {
        self.drained()?;
        let PlaneName::State(plane) = plane else {
            return Err(Error::GradientReadOnly);
        };
        if self.shared.lock().computing() {
            return Err(Error::PassUnderWay { remedy: "write its weights before it or after it" });
        }
        let _alone = self.callers(unit)?.write().unwrap_or_else(PoisonError::into_inner);
        if !self.shared.on_device(unit) {
            // Whatever of it is on the device must be sent again.
            self.shared.lock().resident.retain(|held| held.unit as usize != unit);
            if self.shared.keeps_on_disk(unit, tensor)? {
                return self.shared.write_to_disk(unit, tensor, plane, start, dtype, source);
            }
            return self.shared.memory.store.write(unit, tensor, plane, start, dtype, source);
        }
        if is_stored(plane) {
            return self.shared.write_on_device(unit, tensor, plane, start, dtype, source);
        }
        self.shared.through_window(unit, tensor, start, source.len(), dtype, |w| {
            w.copy_out()?;
            w.planes.write(&w.layout, 0, plane, 0, dtype, &source[w.bytes.clone()])?;
            w.copy_in()
        })
    }

    /// How often a tensor has been updated.
    ///
    /// # Errors
    /// [`Error`] when there is no such tensor.
    pub fn step_count(&self, unit: usize, tensor: usize) -> Result<u64> {
        self.drained()?;
        self.shared.memory.store.step_count(unit, tensor)
    }

    /// Sets how often a tensor has been updated.
    ///
    /// # Errors
    /// [`Error`] when there is no such tensor.
    pub fn set_step_count(&self, unit: usize, tensor: usize, count: u64) -> Result<()> {
        self.drained()?;
        self.shared.memory.store.set_step_count(unit, tensor, count)
    }

    /// The lock of callers that read and write a unit's planes. It guards no value that a panic could leave half-changed.
    fn callers(&self, unit: usize) -> Result<&RwLock<()>> {
        let units = &self.shared.memory.callers;
        units.get(unit).ok_or(Error::UnknownUnit { index: unit, units: units.len() })
    }

    pub(super) fn drained(&self) -> Result<()> {
        while self.shared.drain(FOREVER)? == Poll::Pending {}
        Ok(())
    }
}

/// A part of one tensor of a unit on the device, with a host copy of its planes laid out as a unit of its own.
struct Window<'a> {
    shared: &'a Shared,
    unit: usize,
    planes: UnitPlanes,
    layout: UnitLayout,
    /// The part's range of the caller's bytes.
    bytes: std::ops::Range<usize>,
    pairs: Vec<(HostSpan, DeviceMemory)>,
}

impl Window<'_> {
    fn copy_out(&self) -> Result<()> {
        let device = &self.shared.device;
        self.shared.guard(self.unit, "read", || {
            for (span, memory) in &self.pairs {
                // SAFETY: the spans are parts of the transfer window, which whoever made this has to himself. The copies
                // are waited for below; should that fail, the window is not used again, because the engine is broken.
                unsafe { device.copy_to_host(Stream::Download, memory, span) }?;
            }
            device.synchronize(&device.record(Stream::Download)?)
        })
    }

    fn copy_in(&self) -> Result<()> {
        let device = &self.shared.device;
        self.shared.guard(self.unit, "write", || {
            for (span, memory) in &self.pairs {
                // SAFETY: as in `copy_out`.
                unsafe { device.copy_to_device(Stream::Upload, span, memory) }?;
            }
            device.synchronize(&device.record(Stream::Upload)?)
        })
    }
}

impl Shared {
    fn on_device(&self, unit: usize) -> bool {
        self.placement.device_state.get(unit).is_some_and(Option::is_some)
    }

    /// Whether anything of a tensor is on disk: frozen ones are part of the image.
    fn keeps_on_disk(&self, unit: usize, tensor: usize) -> Result<bool> {
        let (_, found) = self.find(unit, tensor)?;
        Ok(self.on_disk(unit) && (found.spec.role == Role::Trainable || self.weights_on_disk(unit)))
    }

    /// The dtype in which a plane of a tensor is read, and how many values of it there are.
    pub(super) fn plane_of(&self, unit: usize, tensor: usize, plane: Plane) -> Result<(Dtype, u64)> {
        let (layout, tensor) = self.find(unit, tensor)?;
        let (name, frozen) = (&tensor.spec.name, tensor.spec.role == Role::Frozen);
        let dtype = match plane {
            Plane::Weights if frozen => tensor.spec.dtype,
            Plane::Weights => layout.precision.dtype(),
            _ if frozen => {
                let dtype = tensor.spec.dtype.name();
                return Err(Error::Frozen { tensor: name.clone(), what: plane.name(), dtype });
            }
            Plane::Residual if layout.precision == Precision::Fp32 => {
                return Err(Error::NoResidual { tensor: name.clone() });
            }
            Plane::Residual => layout.state.residual_dtype(),
            Plane::Master => Dtype::F32,
            Plane::ExpAvg | Plane::ExpAvgSq => layout.state.moments.dtype(),
        };
        let numel = tensor.spec.numel();
        let moments = matches!(plane, Plane::ExpAvg | Plane::ExpAvgSq);
        Ok((dtype, if moments { layout.state.moments.stored(numel) } else { numel }))
    }

    /// Reads elements of a plane as it is stored, from `start` on, without waiting for anything: the schedule has seen
    /// to it that nobody changes them.
    pub(super) fn read_stored(
        &self,
        unit: usize,
        tensor: usize,
        plane: Plane,
        start: u64,
        out: &mut [u8],
    ) -> Result<()> {
        if self.keeps_on_disk(unit, tensor)? {
            return self.read_from_disk(unit, tensor, plane, start, out);
        }
        if !self.on_device(unit) {
            return self.memory.store.read(unit, tensor, plane, start, out);
        }
        let plane = self.stored_on_device(unit, tensor, plane, start, out.len() as u64)?;
        // It guards no value that a panic could leave half-changed.
        let _alone = self.memory.window_use.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        for out in out.chunks_mut(self.memory.window.len()) {
            let (span, len) = (self.memory.window.slice(0, out.len()), out.len() as u64);
            // SAFETY: the window is ours while its lock is held, and the copy is waited for at once.
            unsafe { self.device.copy_to_host(Stream::Download, &plane.slice(done, len), &span) }?;
            self.device.synchronize(&self.device.record(Stream::Download)?)?;
            span.copy_to(out);
            done += len;
        }
        Ok(())
    }

    /// Bytes of a plane as the device holds it.
    fn stored_on_device(&self, unit: usize, tensor: usize, plane: Plane, start: u64, len: u64) -> Result<DeviceMemory> {
        let (dtype, _) = self.plane_of(unit, tensor, plane)?;
        let (layout, found) = self.find(unit, tensor)?;
        let state = self.placement.device_state[unit].as_ref().expect("a unit whose state is on the device");
        let (range, first) = match plane {
            Plane::Weights | Plane::Master => {
                (self.placement.own[unit].expect("state on the device has a place of its own"), found.byte)
            }
            Plane::Residual => (state.residual, stored_offset(layout, plane, found.element)),
            Plane::ExpAvg => (state.exp_avg, stored_offset(layout, plane, found.element)),
            Plane::ExpAvgSq => (state.exp_avg_sq, stored_offset(layout, plane, found.element)),
        };
        Ok(self.memory.at(range).slice(first + start * dtype.size(), len))
    }

    /// Overwrites values of a plane that the device holds as callers give them.
    fn write_on_device(
        &self,
        unit: usize,
        tensor: usize,
        plane: Plane,
        start: u64,
        dtype: Dtype,
        source: &[u8],
    ) -> Result<()> {
        let (own, held) = self.plane_of(unit, tensor, plane)?;
        let (_, found) = self.find(unit, tensor)?;
        check_stored(found, plane, own, start, dtype, source)?;
        elements_in(found, start, source.len(), own, held)?;
        let memory = self.stored_on_device(unit, tensor, plane, start, source.len() as u64)?;
        // It guards no value that a panic could leave half-changed.
        let _alone = self.memory.window_use.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever had the window before may have broken the engine and left copies in it under way.
        drop(self.enter()?);
        let mut done = 0;
        for source in source.chunks(self.memory.window.len()) {
            let (span, len) = (self.memory.window.slice(0, source.len()), source.len() as u64);
            span.copy_from(source);
            self.guard(unit, "write", || {
                // SAFETY: the window is ours while its lock is held, and the copy is waited for at once.
                unsafe { self.device.copy_to_device(Stream::Upload, &span, &memory.slice(done, len)) }?;
                self.device.synchronize(&self.device.record(Stream::Upload)?)
            })?;
            done += len;
        }
        Ok(())
    }

    pub(super) fn find(&self, unit: usize, tensor: usize) -> Result<(&UnitLayout, &TensorLayout)> {
        let layouts = &self.placement.layouts;
        let layout = layouts.get(unit).ok_or(Error::UnknownUnit { index: unit, units: layouts.len() })?;
        let unknown =
            || Error::UnknownTensor { unit: layout.name.clone(), index: tensor, tensors: layout.tensors.len() };
        let tensor = layout.tensors.get(tensor).ok_or_else(unknown)?;
        Ok((layout, tensor))
    }

    /// Works on `[start, ..)` of a tensor on the device part by part, each as large as the window holds.
    fn through_window(
        &self,
        unit: usize,
        tensor: usize,
        start: u64,
        bytes: usize,
        dtype: Dtype,
        mut work: impl FnMut(&Window<'_>) -> Result<()>,
    ) -> Result<()> {
        let (layout, tensor) = self.find(unit, tensor)?;
        let size = dtype.size();
        let len = elements_in(tensor, start, bytes, dtype, tensor.spec.numel())?;
        // It guards no value that a panic could leave half-changed.
        let _alone = self.memory.window_use.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever had the window before may have broken the engine and left copies in it under way.
        drop(self.enter()?);
        // At most 16 bytes an element (a frozen fp64 tensor takes 8, a split master 4), in whole lines.
        let most = (self.memory.window.len() as u64 / 16) & !2047;
        let mut done = 0;
        while done < len {
            let count = most.min(len - done);
            let window = self.window(layout, unit, tensor, start + done, count)?;
            let range = done * size..(done + count) * size;
            let fits = "inside the caller's bytes";
            let bytes = usize::try_from(range.start).expect(fits)..usize::try_from(range.end).expect(fits);
            work(&Window { bytes, ..window })?;
            done += count;
        }
        Ok(())
    }

    fn window(
        &self,
        unit: &UnitLayout,
        index: usize,
        tensor: &TensorLayout,
        first: u64,
        count: u64,
    ) -> Result<Window<'_>> {
        let state = self.placement.device_state[index].as_ref().expect("a unit whose state is on the device");
        let image = self.placement.own[index].expect("state on the device has a place of its own");
        let mut spec = tensor.spec.clone();
        spec.shape = vec![count];
        let layout = UnitLayout::new(unit.name.as_str(), vec![spec], unit.precision)?.with_state(unit.state);
        let mut at = 0;
        let mut carve = |bytes: u64| {
            let len = usize::try_from(bytes).expect("inside the window");
            at += len.next_multiple_of(512);
            self.memory.window.slice(at - len.next_multiple_of(512), len)
        };
        let mut pairs = Vec::new();
        let trainable = tensor.spec.role == Role::Trainable;
        let element = if trainable { unit.precision.dtype().size() } else { tensor.spec.dtype.size() };
        let on_device = |range: DeviceRange, byte: u64, len: u64| self.memory.at(range).slice(byte, len);
        let whole = carve(layout.image_bytes.max(count * element));
        let weights = whole.slice(0, usize::try_from(count * element).expect("inside the window"));
        pairs.push((weights, on_device(image, tensor.byte + first * element, count * element)));
        let residual = (unit.precision == Precision::Bf16).then(|| {
            if !trainable {
                return carve(0);
            }
            let size = unit.residual_size();
            let span = carve(count * size);
            pairs.push((span.clone(), on_device(state.residual, (tensor.element + first) * size, count * size)));
            span
        });
        // Moments are copied as they are stored.
        let (exp_avg, exp_avg_sq) = (whole.slice(0, 0), whole.slice(0, 0));
        let planes = UnitPlanes { image: whole, residual, exp_avg, exp_avg_sq };
        Ok(Window { shared: self, unit: index, planes, layout, bytes: 0..0, pairs })
    }

    /// The last gradient: in the store where passes are accumulated, in its slab, or still on the device.
    fn read_gradient(&self, unit: usize, tensor: usize, start: u64, out: &mut [u8]) -> Result<()> {
        let (layout, found) = self.find(unit, tensor)?;
        let (name, len) = (&found.spec.name, out.len() as u64 / 4);
        if found.spec.role == Role::Frozen {
            let dtype = found.spec.dtype.name();
            return Err(Error::Frozen { tensor: name.clone(), what: "gradient", dtype });
        }
        elements_in(found, start, out.len(), Dtype::F32, found.spec.numel())?;
        debug_assert!(layout.elements > 0, "a trainable tensor has elements");
        let (span, dtype) = self.offloaded_gradient(unit, name)?;
        let first = found.element + start;
        let mut values = vec![0f32; usize::try_from(len).expect("as long as the caller's bytes")];
        if dtype == Dtype::Bf16 {
            kernels::bf16_to_f32(&span.elements::<u16>(first, len), &mut values);
        } else {
            values.copy_from_slice(&span.elements::<f32>(first, len));
        }
        for (to, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *to = value.to_ne_bytes();
        }
        Ok(())
    }

    fn offloaded_gradient(&self, unit: usize, name: &str) -> Result<(HostSpan, Dtype)> {
        let core = self.enter()?;
        if !core.trained {
            return Err(Error::NoGradientYet { tensor: name.to_owned() });
        }
        drop(core);
        let dtype = self.placement.grad_precision.dtype();
        if self.inputs.accumulate {
            return Ok((self.memory.accumulated[unit].clone(), Dtype::F32));
        }
        if let Some(slab) = self.placement.own_slab[unit] {
            return Ok((self.slab(slab, unit), dtype));
        }
        if let Some(grad) = self.placement.own_grad[unit].filter(|_| self.on_device(unit)) {
            let bytes = self.placement.grad_bytes(unit);
            let span = HostSpan::map(usize::try_from(bytes).expect("a region's length"))?;
            let grad = self.memory.at(self.placement.grads[grad as usize]).slice(0, bytes);
            self.guard(unit, "read", || {
                // SAFETY: the span is this function's own, and the copy is waited for at once; should that fail, the device
                // keeps the span mapped and nobody else has it.
                unsafe { self.device.copy_to_host(Stream::Download, &grad, &span) }?;
                self.device.synchronize(&self.device.record(Stream::Download)?)
            })?;
            return Ok((span, dtype));
        }
        Err(Error::GradientGone { tensor: name.to_owned() })
    }
}
