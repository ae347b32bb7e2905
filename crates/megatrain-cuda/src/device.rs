//! [`CudaDevice`]: the core's device over one GPU.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
use megatrain_core::device::{Device, DeviceAdamw, DeviceFacts, DeviceMemory, Event, Pin, Stream};
use megatrain_core::host::HostSpan;
use megatrain_core::layout::Dtype;
use megatrain_core::{Error, Result};

use crate::driver::{self, Context, OwnedStream, RawEvent, Region, Registration, StreamHandle};
use crate::error::OUT_OF_MEMORY;
use crate::kernels::Kernels;

/// Bytes to which device memory is aligned.
const ALIGN: u64 = 512;

/// One GPU, in the context and beside the compute stream of PyTorch.
pub struct CudaDevice {
    context: Arc<Context>,
    ordinal: u32,
    name: String,
    total_bytes: u64,
    capability: (u32, u32),
    /// PyTorch's current stream: not ours, so never destroyed. 0 is the legacy default stream.
    compute: AtomicU64,
    upload: OwnedStream,
    download: OwnedStream,
    update: OwnedStream,
    kernels: Kernels,
    events: Arc<EventPool>,
}

impl CudaDevice {
    /// Opens device `ordinal`, numbered as CUDA (and PyTorch) does under `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with what is missing and what to do about it; [`Error::Device`] when a driver call fails.
    pub fn new(ordinal: u32) -> Result<Self> {
        let api = driver::api().map_err(|reason| Error::NoDevice { reason: reason.to_owned() })?;
        let count = api.device_count()?;
        let index = i32::try_from(ordinal).ok().filter(|&i| i < count).ok_or_else(|| Error::NoDevice {
            reason: format!("CUDA device {ordinal} was asked for, but {count} are visible (numbered from 0)"),
        })?;
        let device = api.device(index)?;
        let capability = api.capability(device)?;
        let name = api.name(device)?;
        if capability < (7, 0) {
            return Err(Error::NoDevice {
                reason: format!(
                    "{name} has compute capability {}.{}, and 7.0 (Volta) is the oldest that is supported",
                    capability.0, capability.1
                ),
            });
        }
        let context = Context::retain(api, device)?;
        let multiprocessors = api.attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Self {
            ordinal,
            name,
            total_bytes: api.total_bytes(device)?,
            capability,
            compute: AtomicU64::new(0),
            upload: OwnedStream::new(&context)?,
            download: OwnedStream::new(&context)?,
            update: OwnedStream::new(&context)?,
            kernels: Kernels::assemble(&context, multiprocessors.unsigned_abs())?,
            events: Arc::default(),
            context,
        })
    }

    /// The device's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn stream(&self, stream: Stream) -> StreamHandle {
        match stream {
            Stream::Compute => StreamHandle(self.compute.load(Ordering::Acquire)),
            Stream::Upload => self.upload.handle(),
            Stream::Download => self.download.handle(),
            Stream::Update => self.update.handle(),
        }
    }
}

impl Device for CudaDevice {
    fn facts(&self) -> Result<DeviceFacts> {
        let (free_bytes, _) = self.context.memory()?;
        Ok(DeviceFacts {
            kind: "cuda",
            name: self.name.clone(),
            total_bytes: self.total_bytes,
            free_bytes,
            capability: self.capability,
        })
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        let allocate = |bytes: u64| {
            Region::new(&self.context, bytes.max(1)).map_err(|error| {
                let free = self.context.memory().map_or_else(|_| "?".to_owned(), |(free, _)| free.to_string());
                match error.code {
                    OUT_OF_MEMORY => Error::Device {
                        call: error.call,
                        code: error.code,
                        detail: format!("out of device memory: {bytes} bytes were asked for, {free} are free"),
                    },
                    _ => error.into(),
                }
            })
        };
        let mut region = allocate(bytes)?;
        let mut address = region.address();
        // The driver promises 256 bytes; more is its habit.
        if !address.is_multiple_of(ALIGN) {
            region = allocate(bytes + ALIGN)?;
            address = region.address().next_multiple_of(ALIGN);
        }
        // Waits for the zeros, so that no stream needs an order after them.
        let memory = DeviceMemory { owner: Arc::new(region), address, len: bytes };
        self.fill(Stream::Upload, &memory, 0)?;
        self.context.synchronize_stream(self.upload.handle())?;
        Ok(memory)
    }

    fn pin(&self, span: &HostSpan) -> Result<Pin> {
        Ok(Pin(Box::new(Registration::new(&self.context, span)?)))
    }

    fn set_compute_stream(&self, handle: u64) -> Result<()> {
        let before = self.compute.swap(handle, Ordering::AcqRel);
        if before != handle {
            // One stream in the engine's eyes: what it queues on the new one comes after what it queued on the old.
            let event = self.events.take(&self.context)?;
            event.raw().record(StreamHandle(before))?;
            self.context.wait(StreamHandle(handle), event.raw())?;
        }
        Ok(())
    }

    unsafe fn copy_to_device(&self, stream: Stream, src: &HostSpan, dst: &DeviceMemory) -> Result<()> {
        same_length("copy_to_device", src.len() as u64, dst.len)?;
        if src.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller keeps the trait's contract, which is the same.
        Ok(unsafe { self.context.copy_to_device(self.stream(stream), src, dst) }?)
    }

    unsafe fn copy_to_host(&self, stream: Stream, src: &DeviceMemory, dst: &HostSpan) -> Result<()> {
        same_length("copy_to_host", src.len, dst.len() as u64)?;
        if dst.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller keeps the trait's contract, which is the same.
        Ok(unsafe { self.context.copy_to_host(self.stream(stream), src, dst) }?)
    }

    fn copy_on_device(&self, stream: Stream, src: &DeviceMemory, dst: &DeviceMemory) -> Result<()> {
        same_length("copy_on_device", src.len, dst.len)?;
        if dst.len == 0 { Ok(()) } else { Ok(self.context.copy_on_device(self.stream(stream), src, dst)?) }
    }

    fn fill(&self, stream: Stream, dst: &DeviceMemory, byte: u8) -> Result<()> {
        if dst.len == 0 { Ok(()) } else { Ok(self.context.fill(self.stream(stream), dst.address, dst.len, byte)?) }
    }

    fn sum_squares(
        &self,
        stream: Stream,
        src: &DeviceMemory,
        dtype: Dtype,
        blocks: &DeviceMemory,
        num_blocks: u64,
        out: &DeviceMemory,
    ) -> Result<()> {
        self.kernels.sum_squares(self.stream(stream), src, dtype, blocks, num_blocks, out)
    }

    fn adamw(&self, stream: Stream, update: &DeviceAdamw<'_>) -> Result<()> {
        self.kernels.adamw(self.stream(stream), update)
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let event = self.events.take(&self.context)?;
        event.raw().record(self.stream(stream))?;
        Ok(Event(Arc::new(event)))
    }

    fn wait(&self, stream: Stream, event: &Event) -> Result<()> {
        Ok(self.context.wait(self.stream(stream), raw(event)?)?)
    }

    fn query(&self, event: &Event) -> Result<bool> {
        Ok(raw(event)?.query()?)
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        Ok(raw(event)?.synchronize()?)
    }

    fn elapsed_ms(&self, from: &Event, to: &Event) -> Result<Option<f64>> {
        Ok(Some(f64::from(raw(from)?.elapsed_ms(raw(to)?)?)))
    }
}

fn same_length(call: &str, src: u64, dst: u64) -> Result<()> {
    if src == dst {
        return Ok(());
    }
    Err(Error::WrongLength { what: call.to_owned(), of: "the source", expected: dst, got: src })
}

/// Events that were recorded before and may be recorded again: creating one costs more than the record itself.
#[derive(Default)]
struct EventPool {
    free: Mutex<Vec<RawEvent>>,
}

impl EventPool {
    fn free(&self) -> MutexGuard<'_, Vec<RawEvent>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>, context: &Arc<Context>) -> Result<PooledEvent> {
        let free = self.free().pop();
        let raw = match free {
            Some(raw) => raw,
            None => RawEvent::new(context)?,
        };
        Ok(PooledEvent { raw: Some(raw), pool: Arc::clone(self) })
    }
}

/// An event on loan from the pool. Streams that wait for it have taken its state, so that it may be
/// recorded anew as soon as nobody asks for it any more.
struct PooledEvent {
    raw: Option<RawEvent>,
    pool: Arc<EventPool>,
}

impl PooledEvent {
    fn raw(&self) -> &RawEvent {
        self.raw.as_ref().expect("present until dropped")
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            self.pool.free().push(raw);
        }
    }
}

fn raw(event: &Event) -> Result<&RawEvent> {
    event.0.downcast_ref::<PooledEvent>().map(PooledEvent::raw).ok_or(Error::ForeignEvent)
}
