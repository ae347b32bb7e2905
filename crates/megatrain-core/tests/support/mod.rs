//! A small model computed with [`SimDevice::launch`], so that computing is as asynchronous as on a GPU.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use megatrain_core::device::sim::{SimDevice, SimMemory};
use megatrain_core::device::{Device, DeviceMemory, Stream};
use megatrain_core::disk::{Disk, SimDisk};
use megatrain_core::error::Result;
use megatrain_core::layout::{Dtype, Precision, Role, TensorSpec};
use megatrain_core::plan::{
    Activation, Budget, Count, Place, Plan, Region, Request, Requests, Routed, UnitRequest, UnitRole, UpdateMode,
};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::store::spill::{StateFiles, StateIo};
use megatrain_core::stream::{Begin, ComputeOp, Engine, Group, Options, Outcome, Phase, PlaneName, Rows};
use proptest::prelude::*;

/// Elements of a hidden state.
pub const WIDTH: usize = 37;
pub const FOREVER: Duration = Duration::from_secs(600);
pub const GROUPS: [Group; 2] = [
    Group { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, idle: false },
    Group { lr: 3e-2, beta1: 0.8, beta2: 0.9, eps: 1e-6, weight_decay: 0.0, idle: false },
];

/// A model of `layers` layers whose tensors have odd sizes.
pub fn request(layers: usize, micro_batches: u32) -> Request {
    let tensor = |name: String, shape: Vec<u64>, group: u32, role: Role| TensorSpec {
        name,
        shape,
        dtype: Dtype::F32,
        role,
        group,
        begin: 0,
    };
    let unit = |name: &str, role: UnitRole, size: u64| {
        let tensors = vec![
            tensor(format!("{name}.weight"), vec![size, 3], 0, Role::Trainable),
            tensor(format!("{name}.scale"), vec![5], 0, Role::Frozen),
            tensor(format!("{name}.bias"), vec![WIDTH as u64], 1, Role::Trainable),
        ];
        UnitRequest {
            kept_bytes: 4096,
            input_bytes: (WIDTH * 4) as u64,
            flops: 1e9,
            ..UnitRequest::new(name, role, tensors)
        }
    };
    let mut units = vec![unit("embed", UnitRole::Embed, 1001)];
    units.extend((0..layers).map(|i| unit(&format!("layers.{i}"), UnitRole::Layer, 701 + 13 * i as u64)));
    units.push(unit("head", UnitRole::Head, 333));
    let budget = Budget { device: 1 << 30, host: 1 << 30, disk: 0 };
    let requests = Requests { keep: Some(0), slots: Some(2), ..Requests::default() };
    Request { requests, ..Request::new(units, Precision::Fp32, micro_batches, budget) }
}

/// Has a unit computed with the weights of another one.
pub fn join(request: &mut Request, unit: usize, holder: usize) {
    request.units[unit].tensors.clear();
    request.units[unit].weights_of = Some(holder as u32);
}

/// Gives a unit experts, `WIDTH` of them, those of which are sent that the unit before it routes to.
pub fn route(request: &mut Request, unit: usize) {
    let experts = WIDTH as u64;
    for tensor in &mut request.units[unit].tensors {
        tensor.shape = vec![experts, tensor.numel().div_ceil(experts)];
    }
    request.units[unit].routed = Some(Routed { by: unit as u32 - 1, experts: WIDTH as u32, share: 0.5 });
}

/// Whether the toy routes a micro-batch to an expert of a unit.
fn wants(unit: u32, micro_batch: u32, step: u64, expert: usize) -> bool {
    (expert * 7 + unit as usize + 3 * micro_batch as usize + step as usize).is_multiple_of(3)
}

/// Any request that a plan can be made for: the whole product of what may be asked for.
pub fn any_request() -> impl Strategy<Value = Request> {
    let counts = (1usize..7, 1u32..6, 1u32..9, 1u32..6, 2u32..5, 1u32..4);
    let choices = (0u32..9, 0u32..3, any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let updates = (0u32..7, 0u32..4, 0u32..9, 0u32..9, 0u32..9, 0usize..6);
    (counts, choices, 0u32..4, updates).prop_map(
        |(counts, choices, frozen, (device_updates, parts, on_disk, weights, inputs_on_disk, joins))| {
            let (layers, micro_batches, slots, group, stage, slabs) = counts;
            let (on_device, precision, immediate, tied, host_inputs, accumulate) = choices;
            let mut request = request(layers, micro_batches);
            request.tied = tied;
            (request.precision, request.grad_precision) = match precision {
                0 => (Precision::Fp32, Precision::Fp32),
                1 => (Precision::Bf16, Precision::Bf16),
                _ => (Precision::Bf16, Precision::Fp32),
            };
            request.update = if immediate { UpdateMode::Immediate } else { UpdateMode::JustInTime };
            let r = &mut request.requests;
            (r.slots, r.group, r.stage_buffers) = (Some(slots), Some(group.min(micro_batches)), Some(stage));
            // A group may be larger, and keep less.
            r.large_group = (slots % 3 == 0).then_some((group + parts).min(micro_batches));
            r.slabs = immediate.then_some(slabs);
            r.accumulate = accumulate && !immediate;
            r.state_on_device = Some(Count::Units(if r.accumulate { 0 } else { on_device.min(layers as u32 + 2) }));
            r.updates_on_device = Some(Count::Units(if r.accumulate { 0 } else { device_updates.min(layers as u32) }));
            let (resident, updated) = (r.state_on_device, r.updates_on_device);
            r.parts = (parts > 0).then_some(parts);
            r.inputs = host_inputs.then_some(Place::Host);
            r.activation = (on_device % 3 == 1).then_some(Activation::Offload);
            r.keep = (on_device % 3 != 1).then_some(on_device.min(layers as u32) / 2);
            r.large_keep = r.keep.map(|keep| keep.min(weights));
            r.offload = r.keep.filter(|_| weights % 2 == 1).map(|keep| weights.min(layers as u32 - keep));
            if host_inputs {
                // Layers that are kept in no group, and maybe those that are not in the large one only.
                let apart = r.large_group > r.group && r.large_group < Some(micro_batches);
                let kept = if apart { r.large_keep } else { r.keep };
                r.inputs_on_disk = Some(inputs_on_disk.min(layers as u32 - kept.unwrap_or(0)));
                request.budget.disk = 1 << 30;
            }
            // Some that are computed with the weights of another one, the one before it or one further off.
            if joins > 1 {
                for unit in (joins..=layers).step_by(joins) {
                    join(&mut request, unit, unit + 1 - joins);
                }
            }
            // Some that are sent in part, as the unit before them routes.
            if slabs == 1 {
                for unit in (2..=layers).step_by(2) {
                    if request.units[unit].weights_of.is_none() {
                        route(&mut request, unit);
                    }
                }
            }
            // Some units without anything to train.
            for unit in request.units.iter_mut().skip(frozen as usize).step_by(3).filter(|_| frozen > 0) {
                unit.tensors.iter_mut().for_each(|t| t.role = Role::Frozen);
            }
            if !request.units.iter().any(|u| u.tensors.iter().any(|t| t.role != Role::Frozen)) {
                request.units[0].tensors[0].role = Role::Trainable;
            }
            if updated == Some(Count::Units(0)) {
                // Of the units with state: those that train and are not among the first ones, whose state is on the device.
                let Some(Count::Units(resident)) = resident else { unreachable!("set above") };
                let order = [0, layers + 1].into_iter().chain(1..=layers).skip(resident as usize);
                let trains = |u: &usize| request.units[*u].tensors.iter().any(|t| t.role != Role::Frozen);
                let left = order.filter(trains).count() as u32;
                request.requests.state_on_disk = Some(on_disk.min(left));
                request.requests.weights_on_disk = Some(weights.min(on_disk).min(left));
                request.budget.disk = 1 << 30;
            }
            request
        },
    )
}

/// An engine whose files are in memory, with state on disk, where the plan has any, in two folders.
pub fn engine(device: &SimDevice, request: &Request, plan: &Plan, options: &Options) -> Result<Engine> {
    engine_on(&state_disk(), device, request, plan, options)
}

/// A disk in memory with two folders for state.
pub fn state_disk() -> SimDisk {
    let disk = SimDisk::default();
    for folder in STATE_FOLDERS {
        disk.create_folder(Path::new(folder)).unwrap();
    }
    disk
}

const STATE_FOLDERS: [&str; 2] = ["/state", "/more"];

pub fn engine_on(
    disk: &SimDisk,
    device: &SimDevice,
    request: &Request,
    plan: &Plan,
    options: &Options,
) -> Result<Engine> {
    let paths = STATE_FOLDERS.into_iter().map(PathBuf::from).collect();
    let options = Options { disk: Some(StateFiles { paths, io: StateIo::Auto }), ..options.clone() };
    Engine::with_disk(Arc::new(device.clone()), Arc::new(disk.clone()), request, plan, &options)
}

pub fn ready<T>(poll: Poll<T>) -> T {
    match poll {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the engine hangs"),
    }
}

type Activations = Arc<Mutex<HashMap<(u32, u32), Vec<f32>>>>;

/// Computes what an engine asks for.
pub struct Toy {
    pub device: SimDevice,
    pub request: Request,
    /// Makes the loss's gradient infinite.
    pub spoil: Arc<std::sync::atomic::AtomicBool>,
    /// Rows of the embedding that have a gradient of its own; all of them unless set.
    pub rows: Option<Vec<u64>>,
    /// Whether the engine is given these rows.
    pub give_rows: bool,
    /// Elements of experts that a micro-batch was not routed to and that were never sent: where buffers are poisoned.
    pub unsent: Arc<std::sync::atomic::AtomicUsize>,
    hidden: Activations,
    grads: Activations,
}

fn bf16(value: f32) -> u16 {
    let mut out = [0u16];
    megatrain_core::adamw::kernels::f32_to_bf16(&[value], &mut out);
    out[0]
}

fn floats(memory: &SimMemory, at: &DeviceMemory, precision: Precision) -> Vec<f32> {
    let bytes = memory.bytes(at);
    match precision {
        Precision::Fp32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Precision::Bf16 => {
            let widen = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            bytes.as_chunks::<2>().0.iter().map(widen).collect()
        }
    }
}

fn put(memory: &mut SimMemory, at: &DeviceMemory, precision: Precision, values: &[f32]) {
    let bytes: Vec<u8> = match precision {
        Precision::Fp32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Precision::Bf16 => values.iter().flat_map(|v| bf16(*v).to_le_bytes()).collect(),
    };
    memory.bytes_mut(at).copy_from_slice(&bytes);
}

impl Toy {
    pub fn new(device: SimDevice, request: Request) -> Self {
        let (spoil, unsent) = (Arc::default(), Arc::default());
        let (hidden, grads) = (Activations::default(), Activations::default());
        Self { device, request, spoil, rows: None, give_rows: false, unsent, hidden, grads }
    }

    /// Initial weights, the same whatever the plan.
    pub fn fill(&self, engine: &Engine) -> Result<()> {
        for (u, layout) in engine.layouts().iter().enumerate() {
            for (t, tensor) in layout.tensors.iter().enumerate() {
                let value = |i: u64| ((i * 7919 + u as u64 * 104_729 + t as u64 * 31) % 1009) as f32 / 1009.0 - 0.5;
                let bytes: Vec<u8> = (0..tensor.spec.numel()).flat_map(|i| value(i).to_le_bytes()).collect();
                let plane = if tensor.spec.role == Role::Trainable { Plane::Master } else { Plane::Weights };
                engine.write(u, t, PlaneName::State(plane), 0, Dtype::F32, &bytes)?;
            }
        }
        Ok(())
    }

    /// Every master weight and moment, bit for bit.
    pub fn state(&self, engine: &Engine) -> Result<Vec<Vec<u8>>> {
        let mut all = Vec::new();
        for (u, layout) in engine.layouts().iter().enumerate() {
            for (t, tensor) in layout.tensors.iter().enumerate().filter(|(_, t)| t.spec.role == Role::Trainable) {
                for plane in [Plane::Master, Plane::ExpAvg, Plane::ExpAvgSq] {
                    let bytes = match plane {
                        Plane::Master => tensor.spec.numel() * 4,
                        _ => layout.state.moments.bytes(tensor.spec.numel()),
                    };
                    let mut out = vec![0; bytes as usize];
                    engine.read(u, t, PlaneName::State(plane), 0, &mut out)?;
                    all.push(out);
                }
                all.push(engine.step_count(u, t)?.to_le_bytes().to_vec());
            }
        }
        Ok(all)
    }

    pub fn begin(&self, engine: &Engine, pass: Pass, micro_batches: u32, accumulate: bool) -> Result<()> {
        let groups = (self.request.update == UpdateMode::Immediate && pass == Pass::Train).then(|| GROUPS.to_vec());
        let given = self.rows.clone().filter(|_| self.give_rows && pass == Pass::Train);
        let rows = given.map(|rows| Rows { tensor: 0, rows });
        let mut begin = Begin::new(pass, micro_batches);
        (begin.groups, begin.rows, begin.accumulate) = (groups, rows, accumulate);
        engine.begin(&begin, FOREVER).map(ready)
    }

    /// Computes a whole pass.
    pub fn compute(&self, engine: &Engine, step: u64) -> Result<()> {
        while let Some(op) = engine.next(FOREVER).map(ready)? {
            self.launch(engine, &op, step);
            if op.phase == Phase::Forward {
                self.route(engine, &op, step)?;
            }
            engine.finish(op.id)?;
        }
        Ok(())
    }

    /// Names the experts that the micro-batch needs of the units that this one routes to.
    pub fn route(&self, engine: &Engine, op: &ComputeOp, step: u64) -> Result<()> {
        for (unit, _) in (0u32..).zip(&self.request.units).filter(|(_, u)| u.routed.is_some_and(|r| r.by == op.unit)) {
            let wanted: Vec<bool> = (0..WIDTH).map(|expert| wants(unit, op.micro_batch, step, expert)).collect();
            engine.route(unit as usize, &wanted)?;
        }
        Ok(())
    }

    pub fn apply(&self, engine: &Engine, max_norm: Option<f64>) -> Result<Outcome> {
        let max_norm = max_norm.filter(|_| self.request.update == UpdateMode::JustInTime);
        engine.apply(&GROUPS, max_norm, FOREVER).map(ready)
    }

    pub fn step(&self, engine: &Engine, step: u64, max_norm: Option<f64>) -> Result<Outcome> {
        self.begin(engine, Pass::Train, self.request.micro_batches, false)?;
        self.compute(engine, step)?;
        self.apply(engine, max_norm)
    }

    /// Queues one operation on the compute stream.
    pub fn launch(&self, engine: &Engine, op: &ComputeOp, step: u64) {
        let holder = self.request.units[op.unit as usize].weights_of.unwrap_or(op.unit);
        let layout = engine.layouts()[holder as usize].clone();
        let (precision, sent) = (self.request.precision, self.request.grad_precision);
        let plane =
            |region: Region, offset: u64, size: u64| engine.region(region).slice(offset, layout.elements * size);
        let weights = plane(Region::Weights, op.weights, precision.dtype().size());
        let grad = op.grad.map(|o| plane(Region::Grads, o, sent.dtype().size()));
        let sum = op.accumulator.map(|o| plane(Region::Accumulators, o, 4));
        let input_bytes = (WIDTH * 4) as u64;
        let stage = op.stage.map(|o| engine.region(Region::Stage).slice(o, input_bytes));
        let embed_plane = |region: Region, offset: u64, size: u64| {
            engine.region(region).slice(offset, engine.layouts()[0].elements * size)
        };
        // The head's use of a tied weight is summed where the embedding will add its own.
        let tied_sum = op.tied_accumulator.map(|o| (embed_plane(Region::Accumulators, o, 4), Precision::Fp32));
        let tied_sum = tied_sum
            .or(op.tied_grad.map(|o| (embed_plane(Region::Grads, o, sent.dtype().size()), sent)))
            .filter(|_| op.phase == Phase::Loss);
        let begun = self.request.tied && op.phase == Phase::EmbedBackward;
        let tied = op.tied_weights.map(|o| {
            let embed = &engine.layouts()[0];
            engine.region(Region::Weights).slice(o, embed.elements * precision.dtype().size())
        });
        let early = op.tied_grad.filter(|_| op.round_tied).map(|o| embed_plane(Region::Grads, o, sent.dtype().size()));
        let rows = self.rows.clone().filter(|_| op.unit == 0);
        let (hidden, grads, unsent) = (Arc::clone(&self.hidden), Arc::clone(&self.grads), Arc::clone(&self.unsent));
        let op = op.clone();
        let train = !matches!(op.phase, Phase::Loss) || op.grad.is_some();
        let host = self.device.compute_is_host();
        let spoil = self.spoil.load(std::sync::atomic::Ordering::Relaxed);
        self.device.launch(Stream::Compute, move |memory| {
            let (mut hidden, mut grads) = (hidden.lock().unwrap(), grads.lock().unwrap());
            let (unit, mb) = (op.unit, op.micro_batch);
            let first = layout.tensors[0].element as usize;
            let bias = layout.tensors[2].element as usize;
            let numel = layout.tensors[0].spec.numel() as usize;
            let mut w = floats(memory, &weights, precision);
            let of_experts = layout.tensors.iter().all(|t| t.spec.shape[0] == WIDTH as u64);
            let unwanted: Vec<usize> = (0..WIDTH).filter(|&e| of_experts && !wants(unit, mb, step, e)).collect();
            let elements_of = |expert: usize| {
                let each = numel / WIDTH;
                (first + expert * each..first + (expert + 1) * each).chain([bias + expert])
            };
            for j in unwanted.iter().flat_map(|&expert| elements_of(expert)) {
                unsent.fetch_add(usize::from(w[j].is_nan()), std::sync::atomic::Ordering::Relaxed);
                w[j] = 0.0;
            }
            assert!(w[first..first + numel].iter().all(|x| x.is_finite()), "poisoned weights of unit {unit}");
            let apply = |x: &[f32], w: &[f32]| -> Vec<f32> {
                (0..WIDTH).map(|i| x[i] * w[first + (i * 11) % numel] + w[bias + i]).collect()
            };
            match op.phase {
                Phase::Embed => {
                    let x: Vec<f32> = (0..WIDTH)
                        .map(|i| w[first + (i * 17 + mb as usize * 5 + step as usize) % numel] + w[bias + i])
                        .collect();
                    hidden.insert((1, mb), x);
                }
                Phase::Forward => {
                    let y = apply(&hidden[&(unit, mb)], &w);
                    if let Some(stage) = &stage {
                        let x = hidden.remove(&(unit, mb)).unwrap();
                        put(memory, stage, Precision::Fp32, &x);
                    }
                    hidden.insert((unit + 1, mb), y);
                }
                Phase::Loss | Phase::Backward | Phase::EmbedBackward => {
                    let x = match &stage {
                        Some(stage) => floats(memory, stage, Precision::Fp32),
                        None => hidden.get(&(unit, mb)).cloned().unwrap_or_else(|| vec![1.0; WIDTH]),
                    };
                    let y = apply(&x, &w);
                    let mut dy: Vec<f32> = match op.phase {
                        Phase::Loss if spoil => vec![f32::INFINITY; WIDTH],
                        Phase::Loss => y.iter().map(|y| y - 0.25).collect(),
                        _ => grads[&(unit, mb)].clone(),
                    };
                    if let Some(tied) = &tied {
                        let e = floats(memory, tied, precision);
                        dy.iter_mut().enumerate().for_each(|(i, d)| *d += e[i] * 0.5);
                    }
                    if !train {
                        return;
                    }
                    let mut dw = vec![0f32; layout.elements as usize];
                    for i in 0..WIDTH {
                        dw[first + (i * 11) % numel] += dy[i] * x[i];
                        dw[bias + i] += dy[i];
                    }
                    for (j, d) in dw[first..first + numel].iter_mut().enumerate() {
                        *d += dy[j % WIDTH] * 1e-3;
                    }
                    if let Some(rows) = &rows {
                        let own = |j: usize| rows.contains(&(j as u64 / 3));
                        dw[first..first + numel]
                            .iter_mut()
                            .enumerate()
                            .filter(|(j, _)| !own(*j))
                            .for_each(|(_, d)| *d = 0.0);
                    }
                    unwanted.iter().flat_map(|&expert| elements_of(expert)).for_each(|j| dw[j] = 0.0);
                    if let Some(below) = unit.checked_sub(1) {
                        let dx = (0..WIDTH).map(|i| dy[i] * w[first + (i * 11) % numel] + 0.01).collect();
                        grads.insert((below, mb), dx);
                    }
                    if let Some((at, precision)) = &tied_sum {
                        let mut total = floats(memory, at, *precision);
                        for (j, t) in total[..WIDTH].iter_mut().enumerate() {
                            *t = dy[j] * 0.5 + if op.first { 0.0 } else { *t };
                        }
                        if op.first {
                            total[WIDTH..].fill(0.0);
                        }
                        put(memory, at, *precision, &total);
                        if let Some(early) = &early {
                            put(memory, early, sent, &total);
                        }
                    }
                    let Some(grad) = &grad else { return };
                    let real = |j: usize| (first..first + numel).contains(&j) || (bias..bias + WIDTH).contains(&j);
                    let target = sum.as_ref().unwrap_or(grad);
                    let target_precision = if sum.is_some() { Precision::Fp32 } else { sent };
                    let mut total = floats(memory, target, target_precision);
                    if begun {
                        // Each use of a tied weight has a sum of its own, and the uses are added once.
                        let own = grads.entry((u32::MAX, 0)).or_default();
                        own.resize(dw.len(), 0.0);
                        for j in (0..dw.len()).filter(|&j| real(j)) {
                            own[j] = if op.first { dw[j] } else { own[j] + dw[j] };
                        }
                        if !op.last {
                            return;
                        }
                        dw.clone_from(own);
                    }
                    for j in (0..total.len()).filter(|&j| real(j)) {
                        total[j] = if op.first && !begun { dw[j] } else { total[j] + dw[j] };
                    }
                    put(memory, target, target_precision, &total);
                    if op.last && sum.is_some() {
                        put(memory, grad, sent, &total);
                    }
                }
            }
        });
        if host {
            let event = self.device.record(Stream::Compute).unwrap();
            self.device.synchronize(&event).unwrap();
        }
    }
}
