//! What the engine asks of a device, and nothing more.
//!
//! Streams run their work in order; across streams only [`Event`]s order anything. Every call returns at once except
//! [`Device::synchronize`]. A device owns its memory; host memory stays the core's, and a device only pins it.
//!
//! [`sim::SimDevice`] is the adversarial device that the engine is tested on, and what trains on the CPU;
//! [`conformance::conformance`] is the suite that every device passes.
use std::any::Any;
use std::sync::Arc;

#[expect(unsafe_code, reason = "copies of host memory that are queued, each waited for")]
pub mod conformance;
#[expect(unsafe_code, reason = "simulated device memory: copies and views over raw host addresses")]
pub mod sim;

use crate::adamw::AdamwScalars;
use crate::error::Result;
use crate::host::HostSpan;
use crate::layout::{Dtype, StateFormat};

/// The streams a device offers. `Compute` is PyTorch's current stream on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Where layers are computed.
    Compute,
    /// Host to device copies.
    Upload,
    /// Device to host copies.
    Download,
    /// Optimizer updates on the device, and state that returns from there to the host.
    Update,
}

/// A point in a stream's work. Cloning shares the point.
#[derive(Clone)]
pub struct Event(pub Arc<dyn Any + Send + Sync>);

/// Memory on the device, freed when the last clone goes. `address` is a device address (a host one on the simulator).
#[derive(Clone)]
pub struct DeviceMemory {
    /// Keeps the allocation alive.
    pub owner: Arc<dyn Any + Send + Sync>,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub len: u64,
}

impl Stream {
    /// Every stream.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Upload, Self::Download, Self::Update];

    /// Its position in [`Stream::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Its name in traces and faults.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Upload => "upload",
            Self::Download => "download",
            Self::Update => "update",
        }
    }
}

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceMemory({:#x}, {} bytes)", self.address, self.len)
    }
}

impl DeviceMemory {
    /// The sub-range `[offset, offset + len)`, sharing ownership.
    ///
    /// # Panics
    /// When the range leaves the memory.
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Self {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset}+{len} leaves device memory of {}",
            self.len
        );
        Self { owner: Arc::clone(&self.owner), address: self.address + offset, len }
    }
}

/// Host memory that is registered with the device for as long as this lives.
pub struct Pin(pub Box<dyn Any + Send + Sync>);

/// What a device is.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    /// `cuda` or `cpu`.
    pub kind: &'static str,
    /// The card's name.
    pub name: String,
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Free memory in bytes at the time of asking.
    pub free_bytes: u64,
    /// Compute capability, such as (9, 0); (0, 0) on the CPU.
    pub capability: (u32, u32),
}

/// One AdamW update on the device, over one parameter's range of the planes. All spans cover `numel` elements.
pub struct DeviceAdamw<'a> {
    /// bf16 upper plane, or fp32 weights when `residual` is `None`.
    pub weights: &'a DeviceMemory,
    /// What the master has beside it.
    pub residual: Option<&'a DeviceMemory>,
    /// First moments.
    pub exp_avg: &'a DeviceMemory,
    /// Second moments.
    pub exp_avg_sq: &'a DeviceMemory,
    /// How residual and moments are stored.
    pub state: StateFormat,
    /// The place of the first element in its parameter.
    pub first: u64,
    /// Gradient in `grad_dtype` (bf16 or fp32).
    pub grad: &'a DeviceMemory,
    /// Dtype of the gradient.
    pub grad_dtype: Dtype,
    /// Elements.
    pub numel: u64,
    /// Coefficients.
    pub scalars: AdamwScalars,
}

/// A device. Object safe; a step makes thousands of calls, not billions.
///
/// # Copies of host memory
/// A copy is queued and runs at any time until an event recorded after it has passed. Rust knows nothing of it, so that
/// [`Device::copy_to_device`] and [`Device::copy_to_host`] are `unsafe`: until then, nobody may write the bytes that a copy
/// reads, nor read or write those that it writes, through [`HostSpan::elements`], another device or anything else. Copies
/// that events order on the same device may overlap. (A device keeps the memory of a queued copy mapped by itself.)
#[expect(unsafe_code, reason = "the contract of queued copies")]
pub trait Device: Send + Sync {
    /// What it is.
    fn facts(&self) -> Result<DeviceFacts>;
    /// Whether what the caller computes happens at once on the host instead of on [`Stream::Compute`]: the engine then
    /// waits for an operation's inputs before it hands the operation out, and takes it as done when it is finished.
    fn compute_is_host(&self) -> bool {
        false
    }
    /// Zeroed memory of exactly `bytes` bytes, aligned to 512.
    fn allocate(&self, bytes: u64) -> Result<DeviceMemory>;
    /// Registers host memory for copies without a bounce. The caller bounds the number and size of pins.
    fn pin(&self, span: &HostSpan) -> Result<Pin>;
    /// Makes `handle` (a `CUstream`) the compute stream. The simulator ignores it.
    fn set_compute_stream(&self, handle: u64) -> Result<()>;
    /// Copies a host span to the device, in order on `stream`.
    ///
    /// # Safety
    /// Nobody writes the span until the copy is over: see [`Device`].
    unsafe fn copy_to_device(&self, stream: Stream, src: &HostSpan, dst: &DeviceMemory) -> Result<()>;
    /// Copies device memory to a host span, in order on `stream`.
    ///
    /// # Safety
    /// Nobody reads or writes the span until the copy is over: see [`Device`].
    unsafe fn copy_to_host(&self, stream: Stream, src: &DeviceMemory, dst: &HostSpan) -> Result<()>;
    /// Copies device memory to device memory, in order on `stream`.
    fn copy_on_device(&self, stream: Stream, src: &DeviceMemory, dst: &DeviceMemory) -> Result<()>;
    /// Fills device memory with a byte, in order on `stream`.
    fn fill(&self, stream: Stream, dst: &DeviceMemory, byte: u8) -> Result<()>;
    /// For each `(first element, length)` of `blocks`, one f64 into `out`: the sum of squares of `src[first..first+length]`
    /// (dtype bf16 or fp32), accumulated in f64 in an order fixed by the block alone. Non-finite inputs give a non-finite sum.
    fn sum_squares(
        &self,
        stream: Stream,
        src: &DeviceMemory,
        dtype: Dtype,
        blocks: &DeviceMemory,
        num_blocks: u64,
        out: &DeviceMemory,
    ) -> Result<()>;
    /// One AdamW update, bit-equal to the host kernels.
    fn adamw(&self, stream: Stream, update: &DeviceAdamw<'_>) -> Result<()>;
    /// An event after everything queued on `stream` so far.
    fn record(&self, stream: Stream) -> Result<Event>;
    /// Work queued on `stream` from now on runs after `event`.
    fn wait(&self, stream: Stream, event: &Event) -> Result<()>;
    /// Whether `event` has passed; an error of the device is an error, not "not yet".
    fn query(&self, event: &Event) -> Result<bool>;
    /// Blocks until `event` has passed.
    fn synchronize(&self, event: &Event) -> Result<()>;
    /// Whether events recorded from now on keep their time, for [`Device::elapsed_ms`].
    fn keep_times(&self, _on: bool) {}
    /// Milliseconds between two events, for the trace; `None` where the device keeps no time.
    fn elapsed_ms(&self, from: &Event, to: &Event) -> Result<Option<f64>>;
}
