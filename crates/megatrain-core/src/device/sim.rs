//! The simulated device: host memory, four streams, and the most inconvenient legal order of events.
//!
//! Queued work runs only when something waits ([`Device::synchronize`], [`Device::query`]), one piece at a time, and
//! which stream goes next is drawn from a seed. So a forgotten wait is not hidden by luck: work that nothing orders
//! does run in the wrong order under some seed. Without a seed, work runs in the order in which it was queued.
//!
//! A virtual clock moves with the work (bytes at 10 GB/s, plus delays asked for); [`Device::elapsed_ms`] reads it.
//! Faults are asked for in JSON, see [`Faults`].
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Deserialize;

mod memory;
mod planes;

pub use self::memory::SimMemory;
use self::memory::{Allocated, Allocation};
use self::planes::{Planes, block_sum};
use super::{Device, DeviceAdamw, DeviceFacts, DeviceMemory, Event, Pin, Stream};
use crate::error::{Error, Result};
use crate::host::{HostSpan, Process};
use crate::layout::Dtype;
use crate::random::SplitMix;

/// What is to go wrong. `{"pin_limit_bytes": 1048576, "fail": [{"call": "copy_to_host", "nth": 5}],
/// "delay_ms": {"download": 5}, "memory_bytes": 1073741824}`, every part optional.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// Pinning fails once this many bytes would be pinned at a time.
    pub pin_limit_bytes: Option<u64>,
    /// Calls that fail.
    pub fail: Vec<FailedCall>,
    /// Virtual milliseconds before each piece of work of a stream; such a stream also lags the others.
    pub delay_ms: BTreeMap<String, f64>,
    /// Memory of the device; by default that of the machine.
    pub memory_bytes: Option<u64>,
}

/// One call that fails.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailedCall {
    /// The name of a [`Device`] method, such as `copy_to_host`.
    pub call: String,
    /// Which call of that name, counted from 1.
    pub nth: u64,
    /// Whether it panics, as a bug would, instead of answering an error.
    #[serde(default)]
    pub panic: bool,
    /// Whether the device is lost with it: every later call of any name fails in the same way.
    #[serde(default)]
    pub lost: bool,
}

/// The device. Cheap to clone; clones are the same device.
#[derive(Clone)]
pub struct SimDevice {
    shared: Arc<Mutex<State>>,
    faults: Arc<Faults>,
    allocated: Arc<Allocated>,
    queued_compute: bool,
}

struct State {
    queues: [VecDeque<(u64, Work)>; 4],
    clocks: [u64; 4],
    sequence: u64,
    random: Option<SplitMix>,
    calls: HashMap<&'static str, u64>,
    refused: u64,
    lost: bool,
    pinned: Vec<(usize, usize)>,
    memory: SimMemory,
}

enum Work {
    Run { cost_ns: u64, run: Box<dyn FnOnce(&mut SimMemory) + Send> },
    Record(Arc<Moment>),
    Wait(Arc<Moment>),
}

/// A recorded point; the time is virtual nanoseconds plus one, zero until it has passed.
#[derive(Default)]
struct Moment(AtomicU64);

impl Moment {
    fn passed(&self) -> Option<u64> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            time => Some(time - 1),
        }
    }
}

struct Registration {
    start: usize,
    shared: Arc<Mutex<State>>,
    process: Process,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return;
        }
        lock(&self.shared).pinned.retain(|&(start, _)| start != self.start);
    }
}

// A panic inside queued work poisons the lock, but every field stays usable: what ran has been taken off its queue.
fn lock(shared: &Mutex<State>) -> MutexGuard<'_, State> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimDevice {
    /// A device on which the caller computes at once on the host, as Python does: [`Device::compute_is_host`].
    #[must_use]
    pub fn new(seed: Option<u64>, faults: Faults) -> Self {
        let allocated = Arc::<Allocated>::default();
        let state = State {
            queues: Default::default(),
            clocks: [0; 4],
            sequence: 0,
            random: seed.map(SplitMix),
            calls: HashMap::new(),
            refused: 0,
            lost: false,
            pinned: Vec::new(),
            memory: SimMemory { device: Arc::clone(&allocated) },
        };
        let (shared, faults) = (Arc::new(Mutex::new(state)), Arc::new(faults));
        Self { shared, faults, allocated, queued_compute: false }
    }

    /// The same with `faults` as JSON.
    ///
    /// # Errors
    /// [`Error`] when the JSON says something else than faults.
    pub fn from_json(seed: Option<u64>, faults: Option<&str>) -> Result<Self> {
        let faults = match faults {
            Some(text) => serde_json::from_str(text)
                .map_err(|source| Error::Json { what: "faults of the simulated device", source })?,
            None => Faults::default(),
        };
        Ok(Self::new(seed, faults))
    }

    /// Lets the caller compute with [`SimDevice::launch`], so that computing is as asynchronous as on a GPU.
    #[must_use]
    pub fn queueing_compute(mut self) -> Self {
        self.queued_compute = true;
        self
    }

    /// Queues `run` on a stream.
    pub fn launch(&self, stream: Stream, run: impl FnOnce(&mut SimMemory) + Send + 'static) {
        lock(&self.shared).push(stream, Work::Run { cost_ns: 1000, run: Box::new(run) });
    }

    /// Bytes allocated now, and at most so far.
    #[must_use]
    pub fn allocated_bytes(&self) -> (u64, u64) {
        (self.allocated.now.load(Ordering::Acquire), self.allocated.peak.load(Ordering::Acquire))
    }

    /// Bytes pinned now.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        lock(&self.shared).pinned.iter().map(|&(_, len)| len as u64).sum()
    }

    /// How often each call was made, to place faults.
    #[must_use]
    pub fn calls(&self) -> HashMap<&'static str, u64> {
        lock(&self.shared).calls.clone()
    }

    /// How many calls failed because they were asked to.
    #[must_use]
    pub fn refused(&self) -> u64 {
        lock(&self.shared).refused
    }

    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.shared);
        let count = state.calls.entry(call).or_insert(0);
        *count += 1;
        let count = *count;
        let lost = state.lost;
        let fails = |f: &&FailedCall| (f.call == call && f.nth == count) || (f.lost && lost);
        if let Some(fault) = self.faults.fail.iter().find(fails) {
            state.refused += 1;
            state.lost |= fault.lost;
            assert!(!fault.panic, "call {count} of {call} was asked to panic");
            return Err(Error::Device { call, code: 999, detail: format!("call {count} of {call} was asked to fail") });
        }
        Ok(state)
    }

    fn queue(&self, state: &mut State, stream: Stream, bytes: u64, run: impl FnOnce(&mut SimMemory) + Send + 'static) {
        let delay = self.faults.delay_ms.get(stream.name()).copied().unwrap_or(0.0);
        let cost_ns = 1000 + bytes / 10 + (delay * 1e6) as u64;
        state.push(stream, Work::Run { cost_ns, run: Box::new(run) });
    }
}

impl State {
    fn push(&mut self, stream: Stream, work: Work) {
        self.sequence += 1;
        self.queues[stream.index()].push_back((self.sequence, work));
    }

    /// Runs one piece of ready work; false when there is none.
    fn advance(&mut self, faults: &Faults) -> bool {
        let ready: Vec<usize> = (0..4)
            .filter(|&s| match self.queues[s].front() {
                None => false,
                Some((_, Work::Wait(moment))) => moment.passed().is_some(),
                Some(_) => true,
            })
            .collect();
        if ready.is_empty() {
            return false;
        }
        let stream = self.pick(&ready, faults);
        let Some((_, work)) = self.queues[stream].pop_front() else { return false };
        match work {
            Work::Run { cost_ns, run } => {
                self.clocks[stream] += cost_ns;
                run(&mut self.memory);
            }
            Work::Record(moment) => moment.0.store(self.clocks[stream] + 1, Ordering::Release),
            Work::Wait(moment) => {
                let time = moment.passed().expect("a wait is ready once its event has passed");
                self.clocks[stream] = self.clocks[stream].max(time);
            }
        }
        true
    }

    fn pick(&mut self, ready: &[usize], faults: &Faults) -> usize {
        let delayed = |s: usize| faults.delay_ms.contains_key(Stream::ALL[s].name());
        let sequence = |s: usize| self.queues[s].front().map_or(u64::MAX, |&(sequence, _)| sequence);
        let Some(random) = self.random.as_mut() else {
            let first =
                ready.iter().copied().min_by_key(|&s| (if delayed(s) { self.clocks[s] } else { 0 }, sequence(s)));
            return first.unwrap_or(ready[0]);
        };
        let prompt: Vec<usize> = ready.iter().copied().filter(|&s| !delayed(s)).collect();
        // A delayed stream lags, but not always: both orders are legal.
        let pool = if prompt.is_empty() || random.below(8) == 0 { ready } else { &prompt };
        pool[usize::try_from(random.below(pool.len() as u64)).expect("an index below four")]
    }

    fn check_registration(&self, call: &'static str, span: &HostSpan) -> Result<()> {
        let (start, end) = (span.address() as usize, span.address() as usize + span.len());
        let straddles = self.pinned.iter().any(|&(base, len)| {
            let overlaps = start < base + len && base < end;
            overlaps && !(base <= start && end <= base + len)
        });
        if straddles {
            let detail = format!("{} bytes at {start:#x} straddle the border of a registration", span.len());
            return Err(Error::Device { call, code: 1, detail });
        }
        Ok(())
    }
}

/// Total and available memory of the machine, as the kernel reports them; zeros where it does not.
fn machine_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    (field("MemTotal:"), field("MemAvailable:"))
}

fn same_length(call: &'static str, from: u64, to: u64) -> Result<()> {
    if from == to {
        return Ok(());
    }
    Err(Error::Device { call, code: 1, detail: format!("source has {from} bytes, destination {to}") })
}

fn moment(event: &Event) -> Result<Arc<Moment>> {
    Arc::clone(&event.0).downcast::<Moment>().map_err(|_| Error::Device {
        call: "event",
        code: 1,
        detail: "the event belongs to another device".to_owned(),
    })
}

impl Device for SimDevice {
    fn facts(&self) -> Result<DeviceFacts> {
        drop(self.enter("facts")?);
        let (total, free) = match self.faults.memory_bytes {
            Some(bytes) => (bytes, bytes.saturating_sub(self.allocated_bytes().0)),
            None => machine_memory(),
        };
        Ok(DeviceFacts {
            kind: "cpu",
            name: "CPU".to_owned(),
            total_bytes: total,
            free_bytes: free,
            capability: (0, 0),
        })
    }

    fn compute_is_host(&self) -> bool {
        !self.queued_compute
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        let _state = self.enter("allocate")?;
        let in_use = self.allocated.now.load(Ordering::Acquire);
        if let Some(limit) = self.faults.memory_bytes
            && in_use.saturating_add(bytes) > limit
        {
            let detail = format!("{bytes} bytes asked, {in_use} of {limit} in use");
            return Err(Error::Device { call: "allocate", code: 2, detail });
        }
        let len = usize::try_from(bytes).map_err(|_| Error::AddressSpace { bytes })?;
        let span = HostSpan::map(len)?;
        self.allocated.now.fetch_add(bytes, Ordering::AcqRel);
        self.allocated.peak.fetch_max(in_use + bytes, Ordering::AcqRel);
        let address = span.address() as u64;
        let owner = Arc::new(Allocation { span, allocated: Arc::clone(&self.allocated) });
        Ok(DeviceMemory { owner, address, len: bytes })
    }

    fn pin(&self, span: &HostSpan) -> Result<Pin> {
        let mut state = self.enter("pin")?;
        let (start, len) = (span.address() as usize, span.len());
        if state.pinned.iter().any(|&(base, size)| start < base + size && base < start + len) {
            let detail = format!("{len} bytes at {start:#x} are registered already");
            return Err(Error::Device { call: "pin", code: 712, detail });
        }
        let pinned: usize = state.pinned.iter().map(|&(_, size)| size).sum();
        if let Some(limit) = self.faults.pin_limit_bytes
            && (pinned + len) as u64 > limit
        {
            let detail = format!("{len} bytes asked, {pinned} pinned, limit {limit}");
            return Err(Error::Device { call: "pin", code: 2, detail });
        }
        state.pinned.push((start, len));
        Ok(Pin(Box::new(Registration { start, shared: Arc::clone(&self.shared), process: Process::current() })))
    }

    fn set_compute_stream(&self, _handle: u64) -> Result<()> {
        self.enter("set_compute_stream").map(|_| ())
    }

    unsafe fn copy_to_device(&self, stream: Stream, src: &HostSpan, dst: &DeviceMemory) -> Result<()> {
        let mut state = self.enter("copy_to_device")?;
        same_length("copy_to_device", src.len() as u64, dst.len)?;
        state.check_registration("copy_to_device", src)?;
        let (src, dst) = (src.clone(), dst.clone());
        self.queue(&mut state, stream, dst.len, move |memory| {
            memory.bytes_mut(&dst).copy_from_slice(&src.elements(0, dst.len))
        });
        Ok(())
    }

    unsafe fn copy_to_host(&self, stream: Stream, src: &DeviceMemory, dst: &HostSpan) -> Result<()> {
        let mut state = self.enter("copy_to_host")?;
        same_length("copy_to_host", src.len, dst.len() as u64)?;
        state.check_registration("copy_to_host", dst)?;
        let (src, dst) = (src.clone(), dst.clone());
        self.queue(&mut state, stream, src.len, move |memory| {
            dst.elements_mut(0, src.len).copy_from_slice(memory.bytes(&src))
        });
        Ok(())
    }

    fn copy_on_device(&self, stream: Stream, src: &DeviceMemory, dst: &DeviceMemory) -> Result<()> {
        let mut state = self.enter("copy_on_device")?;
        same_length("copy_on_device", src.len, dst.len)?;
        let (src, dst) = (src.clone(), dst.clone());
        self.queue(&mut state, stream, src.len, move |memory| memory.copy(&src, &dst));
        Ok(())
    }

    fn fill(&self, stream: Stream, dst: &DeviceMemory, byte: u8) -> Result<()> {
        let mut state = self.enter("fill")?;
        let dst = dst.clone();
        self.queue(&mut state, stream, dst.len, move |memory| memory.bytes_mut(&dst).fill(byte));
        Ok(())
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
        let mut state = self.enter("sum_squares")?;
        if !matches!(dtype, Dtype::Bf16 | Dtype::F32) {
            let detail = format!("gradients are bf16 or fp32, not {dtype:?}");
            return Err(Error::Device { call: "sum_squares", code: 1, detail });
        }
        let (src, blocks, out) = (src.clone(), blocks.clone(), out.clone());
        self.queue(&mut state, stream, src.len, move |memory| {
            let sums: Vec<f64> = (0..num_blocks)
                .map(|b| {
                    let block = memory.bytes(&blocks);
                    let at = usize::try_from(b * 16).expect("a table inside memory");
                    let word = |i: usize| u64::from_ne_bytes(std::array::from_fn(|k| block[at + i * 8 + k]));
                    let (first, len) = (word(0), word(1));
                    let bytes = src.slice(first * dtype.size(), len * dtype.size());
                    block_sum(memory.bytes(&bytes), dtype)
                })
                .collect();
            let out = memory.bytes_mut(&out);
            for (to, sum) in out.chunks_exact_mut(8).zip(sums) {
                to.copy_from_slice(&sum.to_ne_bytes());
            }
        });
        Ok(())
    }

    fn adamw(&self, stream: Stream, update: &DeviceAdamw<'_>) -> Result<()> {
        let mut state = self.enter("adamw")?;
        let numel = update.numel;
        let weights = update.weights.clone();
        let residual = update.residual.cloned();
        let (exp_avg, exp_avg_sq) = (update.exp_avg.clone(), update.exp_avg_sq.clone());
        let (grad, grad_dtype, scalars) = (update.grad.clone(), update.grad_dtype, update.scalars);
        let (format, first) = (update.state, update.first);
        self.queue(&mut state, stream, numel * 26, move |memory| {
            let mut planes = Planes {
                weights: memory.bytes(&weights).to_vec(),
                residual: residual.as_ref().map(|r| memory.bytes(r).to_vec()),
                exp_avg: memory.bytes(&exp_avg).to_vec(),
                exp_avg_sq: memory.bytes(&exp_avg_sq).to_vec(),
            };
            planes.update(memory.bytes(&grad), grad_dtype, format, &scalars, first);
            memory.bytes_mut(&weights).copy_from_slice(&planes.weights);
            if let (Some(residual), Some(values)) = (&residual, &planes.residual) {
                memory.bytes_mut(residual).copy_from_slice(values);
            }
            memory.bytes_mut(&exp_avg).copy_from_slice(&planes.exp_avg);
            memory.bytes_mut(&exp_avg_sq).copy_from_slice(&planes.exp_avg_sq);
        });
        Ok(())
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let mut state = self.enter("record")?;
        let moment = Arc::new(Moment::default());
        state.push(stream, Work::Record(Arc::clone(&moment)));
        Ok(Event(moment))
    }

    fn wait(&self, stream: Stream, event: &Event) -> Result<()> {
        let mut state = self.enter("wait")?;
        state.push(stream, Work::Wait(moment(event)?));
        Ok(())
    }

    fn query(&self, event: &Event) -> Result<bool> {
        let mut state = self.enter("query")?;
        let moment = moment(event)?;
        if moment.passed().is_none() {
            state.advance(&self.faults);
        }
        Ok(moment.passed().is_some())
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        let mut state = self.enter("synchronize")?;
        let moment = moment(event)?;
        while moment.passed().is_none() {
            if !state.advance(&self.faults) {
                let detail = "no stream can go on: an event is waited for that was never recorded here".to_owned();
                return Err(Error::Device { call: "synchronize", code: 1, detail });
            }
            // Between two pieces of work other threads may queue theirs, as on a real device.
            drop(state);
            state = lock(&self.shared);
        }
        Ok(())
    }

    fn elapsed_ms(&self, from: &Event, to: &Event) -> Result<Option<f64>> {
        drop(self.enter("elapsed_ms")?);
        let (from, to) = (moment(from)?, moment(to)?);
        Ok(match (from.passed(), to.passed()) {
            (Some(from), Some(to)) => Some((to as f64 - from as f64) / 1e6),
            _ => None,
        })
    }
}
