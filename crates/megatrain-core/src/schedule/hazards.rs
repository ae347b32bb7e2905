//! What each operation reads and writes, and the dependencies that follow from it.
use rustc_hash::FxHashMap;

use super::{Dep, Edge, Kind, Lane, Op, Pass, ScheduleInputs, Shape};

/// Something that operations share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Resource {
    /// A part of a unit's planes on the host; of one whose weights are on disk, those.
    Image(u32, u32),
    /// A part of a unit's state on disk.
    Disk(u32, u32),
    /// A host buffer for state on disk.
    DiskBuffer(u32),
    /// A host buffer for weights on disk.
    WeightBuffer(u32),
    /// A part of a unit's own place on the device.
    Own(u32, u32),
    /// A slot.
    Slot(u32),
    /// A gradient buffer.
    Grad(u32),
    /// A part of a slab.
    Slab(u32, u32),
    /// A staging buffer.
    Stage(u32),
    /// A state buffers.
    StateBuffer(u32),
    /// A unit's place on the host, or on disk, for one micro-batch's activations.
    Area(u32, u32),
    /// A host buffer for activations that go to disk or come from there.
    InputBuffer(u32),
    /// The norm sums of a part of a unit on the host.
    Sums(u32, u32),
    /// The fp32 store of a unit.
    Store(u32),
    /// How often a unit has been updated.
    Count(u32),
    /// What a unit's forward has decided about which weights of others are sent.
    Route(u32),
    /// The loss, which the caller has found to be finite.
    Loss,
    /// The caller's decision.
    ClipDecision,
    /// The files of a checkpoint, which end with a unit.
    Files,
}

/// How a resource is touched, and what it must hold or will hold: a unit and a micro-batch; of a buffer for state or for
/// inputs on disk, a unit and what [`buffer_content`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Reads what was written for this unit and micro-batch.
    Read(u32, u32),
    /// Overwrites.
    Write(u32, u32),
    /// Adds to what was written for this unit (a sum over micro-batches).
    Add(u32, u32),
}

/// Whether the micro-batch's backward writes the unit's gradient buffer: where sums are formed apart, only the last.
fn writes_grad(inputs: &ScheduleInputs, shape: Shape, unit: u32, micro_batch: u32) -> bool {
    inputs.unit(unit).trains && (!inputs.unit(unit).sums_apart || micro_batch + 1 == shape.micro_batches)
}

/// What a buffer for state holds of a unit: which part, and whether that has been updated. Of a buffer for inputs on disk: which
/// micro-batch's, and whether that has been read again.
const fn buffer_content(part: u32, updated: bool) -> u32 {
    2 * part + updated as u32
}

/// Everything that an operation touches.
pub(super) fn accesses(inputs: &ScheduleInputs, shape: Shape, op: &Op) -> Vec<(Resource, Access)> {
    let mut list = Vec::new();
    list_accesses(inputs, shape, op, &mut list);
    list
}

/// As [`accesses`], in place of what is in `list`.
fn list_accesses(inputs: &ScheduleInputs, shape: Shape, op: &Op, list: &mut Vec<(Resource, Access)>) {
    let (unit, mb) = (op.unit, op.micro_batch);
    let parts = |u: u32| 0..inputs.unit(u).parts;
    list.clear();
    let reads_weights = |list: &mut Vec<_>, u: u32| {
        let holder = inputs.holder(u);
        match op.slot {
            Some(slot) if u == op.unit => {
                list.push((Resource::Slot(slot), Access::Read(holder, inputs.sent(holder, mb))));
            }
            _ => list.extend(parts(holder).map(|part| (Resource::Own(holder, part), Access::Read(holder, 0)))),
        }
    };
    let sum = |list: &mut Vec<_>, u: u32, grad: Option<u32>, first: bool| {
        if let Some(grad) = grad
            && writes_grad(inputs, shape, u, mb)
        {
            let fresh = inputs.unit(u).sums_apart || (first && mb == 0);
            list.push((Resource::Grad(grad), if fresh { Access::Write(u, mb) } else { Access::Add(u, mb) }));
        }
    };
    // Which weights are sent is known when the last micro-batch of the group has been routed.
    let reads_route = |list: &mut Vec<_>| {
        if let Some(by) = inputs.unit(unit).routed_by {
            let last =
                inputs.groups.ranges(shape.micro_batches).find(|group| group.contains(&mb)).map_or(mb, |g| g.end - 1);
            list.push((Resource::Route(by), Access::Read(by, last)));
        }
    };
    match op.kind {
        Kind::Load if inputs.unit(unit).weights_on_disk => {
            reads_route(list);
            list.push((weight_buffer(op), Access::Read(unit, 0)));
            list.push((op.slot.map_or(Resource::Own(unit, op.part), Resource::Slot), Access::Write(unit, mb)));
        }
        Kind::ReadWeights => {
            for part in 0..inputs.unit(unit).disk_parts {
                list.push((Resource::Image(unit, part), Access::Read(unit, 0)));
                list.push((Resource::Disk(unit, part), Access::Read(unit, 0)));
            }
            list.push((weight_buffer(op), Access::Write(unit, 0)));
        }
        Kind::Load => {
            reads_route(list);
            // The whole of a unit is sent, whatever the parts in which it is updated.
            let images = if inputs.unit(unit).updated_apart() {
                0..inputs.unit(unit).update_parts()
            } else {
                op.part..op.part + 1
            };
            list.extend(images.map(|part| (Resource::Image(unit, part), Access::Read(unit, 0))));
            let place = op.slot.map_or(Resource::Own(unit, op.part), Resource::Slot);
            list.push((place, Access::Write(unit, mb)));
        }
        Kind::Embed => reads_weights(list, unit),
        Kind::Forward => {
            reads_weights(list, unit);
            if let (Pass::Train, Some(stage)) = (shape.pass, op.stage) {
                list.push((Resource::Stage(stage), Access::Write(unit, mb)));
            }
            if inputs.unit(unit).routes {
                let first = inputs.groups.start(mb) == mb;
                list.push((Resource::Route(unit), if first { Access::Write(unit, mb) } else { Access::Add(unit, mb) }));
            }
        }
        Kind::Loss => {
            reads_weights(list, unit);
            if inputs.tied {
                reads_weights(list, 0);
            }
            if shape.pass == Pass::Train {
                sum(list, unit, op.grad, true);
                if inputs.tied && inputs.unit(0).trains && (!inputs.unit(0).sums_apart || inputs.early) {
                    sum(list, 0, inputs.unit(0).own_grad, true);
                }
                if inputs.early && !inputs.tied {
                    list.push((Resource::Loss, Access::Write(unit, mb)));
                }
            }
        }
        Kind::Backward => {
            reads_weights(list, unit);
            if let Some(stage) = op.stage {
                list.push((Resource::Stage(stage), Access::Read(unit, mb)));
            }
            sum(list, unit, op.grad, true);
        }
        Kind::EmbedBackward => {
            reads_weights(list, unit);
            // A tied embedding's sum was begun by the loss.
            sum(list, unit, op.grad, !inputs.tied);
        }
        Kind::OffloadActivation => {
            list.push((Resource::Stage(op.stage.unwrap_or(0)), Access::Read(unit, mb)));
            list.push(match op.input_buffer {
                Some(buffer) => (Resource::InputBuffer(buffer), Access::Write(unit, buffer_content(mb, false))),
                None => (area(inputs, op), Access::Write(unit, mb)),
            });
        }
        Kind::WriteInput => {
            list.push((input_buffer(op), Access::Read(unit, buffer_content(mb, false))));
            list.push((area(inputs, op), Access::Write(unit, mb)));
        }
        Kind::ReadInput => {
            list.push((area(inputs, op), Access::Read(unit, mb)));
            list.push((input_buffer(op), Access::Write(unit, buffer_content(mb, true))));
        }
        Kind::FetchActivation => {
            list.push(match op.input_buffer {
                Some(buffer) => (Resource::InputBuffer(buffer), Access::Read(unit, buffer_content(mb, true))),
                None => (area(inputs, op), Access::Read(unit, mb)),
            });
            list.push((Resource::Stage(op.stage.unwrap_or(0)), Access::Write(unit, mb)));
        }
        Kind::OffloadGrad => {
            if let Some(grad) = op.grad {
                list.push((Resource::Grad(grad), Access::Read(unit, shape.micro_batches - 1)));
            }
            if let Some(slab) = op.slab {
                list.push((Resource::Slab(slab, op.part), Access::Write(unit, 0)));
            }
            // The norm is that of the whole gradient, and so comes with the last offload.
            if !op.early {
                list.push((Resource::Sums(unit, op.part), Access::Write(unit, 0)));
            }
        }
        Kind::AccumulateGrad => {
            list.push((Resource::Slab(op.slab.unwrap_or(0), 0), Access::Read(unit, 0)));
            list.push((Resource::Store(unit), Access::Write(unit, 0)));
            list.push((Resource::Sums(unit, 0), Access::Add(unit, 0)));
        }
        Kind::ClipDecision => {
            let trained = (0..=inputs.head()).filter(|&u| inputs.unit(u).trains);
            let sums = trained.flat_map(|u| parts(u).map(move |part| (Resource::Sums(u, part), Access::Read(u, 0))));
            list.extend(sums);
            list.push((Resource::ClipDecision, Access::Write(0, 0)));
        }
        Kind::FetchState => {
            list.push(decided(inputs, unit));
            list.push((Resource::Image(unit, op.part), Access::Read(unit, 0)));
            list.push((Resource::Slab(op.slab.unwrap_or(0), 0), Access::Read(unit, 0)));
            list.push((
                Resource::StateBuffer(op.state_buffer.unwrap_or(0)),
                Access::Write(unit, buffer_content(op.part, false)),
            ));
        }
        Kind::WriteBackState => {
            list.push((
                Resource::StateBuffer(op.state_buffer.unwrap_or(0)),
                Access::Read(unit, buffer_content(op.part, true)),
            ));
            list.push((Resource::Image(unit, op.part), Access::Write(unit, 0)));
        }
        Kind::Update if inputs.unit(unit).device_update_parts > 0 => {
            list.push(decided(inputs, unit));
            let buffer = Resource::StateBuffer(op.state_buffer.unwrap_or(0));
            list.push((buffer, Access::Read(unit, buffer_content(op.part, false))));
            list.push((buffer, Access::Write(unit, buffer_content(op.part, true))));
            list.push((Resource::Count(unit), Access::Write(unit, 0)));
        }
        Kind::ReadState => {
            list.push(decided(inputs, unit));
            list.push((Resource::Disk(unit, op.part), Access::Read(unit, 0)));
            list.push((disk_buffer(op), Access::Write(unit, buffer_content(op.part, false))));
        }
        Kind::WriteState => {
            list.push((disk_buffer(op), Access::Read(unit, buffer_content(op.part, true))));
            list.push((Resource::Disk(unit, op.part), Access::Write(unit, 0)));
            if inputs.unit(unit).weights_on_disk {
                list.push((Resource::Image(unit, op.part), Access::Write(unit, 0)));
            }
        }
        Kind::Update if inputs.unit(unit).disk_parts > 0 => {
            list.push(decided(inputs, unit));
            list.push((disk_buffer(op), Access::Read(unit, buffer_content(op.part, false))));
            list.push((disk_buffer(op), Access::Write(unit, buffer_content(op.part, true))));
            if inputs.accumulate {
                list.push((Resource::Store(unit), Access::Read(unit, 0)));
            } else {
                list.push((Resource::Slab(op.slab.unwrap_or(0), 0), Access::Read(unit, 0)));
            }
            if inputs.unit(unit).disk_parts > 1 || inputs.unit(unit).weights_on_disk {
                list.push((Resource::Count(unit), Access::Write(unit, 0)));
            }
            if !inputs.unit(unit).weights_on_disk {
                list.push((Resource::Image(unit, op.part), Access::Write(unit, 0)));
            }
        }
        Kind::Update => {
            if op.early {
                if !inputs.tied {
                    list.push((Resource::Loss, Access::Read(inputs.head(), shape.micro_batches - 1)));
                }
            } else if inputs.immediate {
                list.push((Resource::Sums(unit, op.part), Access::Read(unit, 0)));
            } else {
                list.push((Resource::ClipDecision, Access::Read(0, 0)));
            }
            if inputs.accumulate {
                list.push((Resource::Store(unit), Access::Read(unit, 0)));
            } else if let Some(slab) = op.slab {
                // Without a tied head's gradient, zeros are put there to update by.
                let zeros = op.early && !inputs.tied;
                let access = if zeros { Access::Write(unit, 0) } else { Access::Read(unit, 0) };
                list.push((Resource::Slab(slab, op.part), access));
            }
            if inputs.unit(unit).parts > 1 || (unit == 0 && inputs.early) {
                list.push((Resource::Count(unit), Access::Write(unit, 0)));
            }
            if inputs.unit(unit).on_device {
                if let Some(grad) = op.grad {
                    list.push((Resource::Grad(grad), Access::Read(unit, shape.micro_batches - 1)));
                }
                list.push((Resource::Own(unit, 0), Access::Write(unit, 0)));
            } else {
                list.push((Resource::Image(unit, op.part), Access::Write(unit, 0)));
            }
        }
        Kind::WriteCheckpoint => {
            let on_device = inputs.unit(unit).on_device;
            let place = |part| if on_device { Resource::Own(unit, part) } else { Resource::Image(unit, part) };
            let held = if on_device { inputs.unit(unit).parts } else { inputs.unit(unit).update_parts() };
            list.extend((0..held).map(|part| (place(part), Access::Read(unit, 0))));
            let on_disk = 0..inputs.unit(unit).disk_parts;
            list.extend(on_disk.map(|part| (Resource::Disk(unit, part), Access::Read(unit, 0))));
            // Of state that is updated on the device, or in a buffer with its weights, the next update counts before it changes
            // what the host or the disk holds.
            if inputs.unit(unit).device_update_parts > 0 || inputs.unit(unit).weights_on_disk {
                list.push((Resource::Count(unit), Access::Read(unit, 0)));
            }
            if unit > 0 {
                list.push((Resource::Files, Access::Read(unit - 1, 0)));
            }
            list.push((Resource::Files, Access::Write(unit, 0)));
        }
    }
}

const fn disk_buffer(op: &Op) -> Resource {
    match op.disk_buffer {
        Some(buffer) => Resource::DiskBuffer(buffer),
        None => Resource::DiskBuffer(0),
    }
}

const fn input_buffer(op: &Op) -> Resource {
    match op.input_buffer {
        Some(buffer) => Resource::InputBuffer(buffer),
        None => Resource::InputBuffer(0),
    }
}

/// Where what the operation's micro-batch has staged waits, in the turn of its group.
const fn area(inputs: &ScheduleInputs, op: &Op) -> Resource {
    Resource::Area(op.unit, op.micro_batch - inputs.groups.start(op.micro_batch))
}

const fn weight_buffer(op: &Op) -> Resource {
    match op.weight_buffer {
        Some(buffer) => Resource::WeightBuffer(buffer),
        None => Resource::WeightBuffer(0),
    }
}

/// What an update of a whole unit waits for, or fetching or reading its state: the clip decision; without one, the sums by which
/// a gradient is seen to be finite.
fn decided(inputs: &ScheduleInputs, unit: u32) -> (Resource, Access) {
    if inputs.immediate {
        (Resource::Sums(unit, 0), Access::Read(unit, 0))
    } else {
        (Resource::ClipDecision, Access::Read(0, 0))
    }
}

/// The kind of edge that leads from an operation on one lane to one on another: events order work on the device; as
/// soon as the host takes part at either end it must know that the earlier one is over. A device update starts only
/// after the host has seen the sums of the gradient, so what it waits for of others has to be over as well. So has what a
/// copy one way waits for of copies the other way: waiting on its stream it would hold up all copies after it there.
pub(super) fn edge(from: Lane, to: Lane) -> Edge {
    let known = match to {
        Lane::Update => from != Lane::Update,
        Lane::Upload => matches!(from, Lane::Download | Lane::Update),
        Lane::Download => from == Lane::Upload,
        _ => false,
    };
    if from.on_device() && to.on_device() && !known { Edge::Issued } else { Edge::Complete }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Touch {
    op: u32,
    prior: bool,
    lane: Lane,
}

#[derive(Clone, Debug, Default)]
struct Track {
    writer: Option<Touch>,
    /// Readers since; compute operations are a chain, so that of those only the latest counts.
    readers: Vec<Touch>,
}

/// Follows every resource through a pass and derives dependencies.
#[derive(Default)]
pub(super) struct Tracker {
    tracks: FxHashMap<Resource, Track>,
    last_compute: Option<Touch>,
    /// What one operation touches, and the operations before it that touched the same.
    list: Vec<(Resource, Access)>,
    before: Vec<Touch>,
}

impl Tracker {
    /// A tracker that has seen the pass before.
    pub(super) fn after(inputs: &ScheduleInputs, shape: Shape, ops: &[Op]) -> Self {
        let mut tracker = Self::default();
        for op in ops {
            list_accesses(inputs, shape, op, &mut tracker.list);
            tracker.touch(op, true);
        }
        tracker
    }

    /// As [`Tracker::after`], of the pass that this one has followed.
    pub(super) fn into_after(mut self) -> Self {
        let as_prior = |touch: &mut Touch| !std::mem::replace(&mut touch.prior, true);
        let of_this_pass = |mut touch: Touch| as_prior(&mut touch).then_some(touch);
        for track in self.tracks.values_mut() {
            track.writer = track.writer.and_then(of_this_pass);
            track.readers.retain_mut(as_prior);
        }
        self.last_compute = self.last_compute.and_then(of_this_pass);
        self
    }

    /// The dependencies of `op`, which is next in program order; it is then part of what later ones depend on.
    pub(super) fn depend(&mut self, inputs: &ScheduleInputs, shape: Shape, op: &Op) -> Vec<Dep> {
        list_accesses(inputs, shape, op, &mut self.list);
        let before = &mut self.before;
        before.clear();
        if op.lane == Lane::Compute {
            before.extend(self.last_compute);
        }
        for (resource, access) in &self.list {
            let Some(track) = self.tracks.get(resource) else { continue };
            // A chain of compute operations orders what its earlier links waited for.
            let seen = op.lane == Lane::Compute && track.readers.iter().any(|t| t.lane == Lane::Compute);
            match access {
                Access::Read(..) => before.extend(track.writer.filter(|_| !seen)),
                Access::Write(..) | Access::Add(..) if track.readers.is_empty() => before.extend(track.writer),
                Access::Write(..) | Access::Add(..) => before.extend(&track.readers),
            }
        }
        let mut deps: Vec<Dep> = Vec::with_capacity(before.len());
        let last = before.iter().filter(|t| t.lane == Lane::Compute).max_by_key(|t| (!t.prior, t.op)).copied();
        for touch in before {
            let dep = Dep { op: touch.op, edge: edge(touch.lane, op.lane), prior: touch.prior };
            let implied = touch.lane == Lane::Compute && last != Some(*touch);
            if !implied && !deps.contains(&dep) {
                deps.push(dep);
            }
        }
        deps.sort_by_key(|d| (!d.prior, d.op));
        self.touch(op, false);
        deps
    }

    /// `op` touches what is in the list.
    fn touch(&mut self, op: &Op, prior: bool) {
        let touch = Touch { op: op.id, prior, lane: op.lane };
        for (resource, access) in &self.list {
            let track = self.tracks.entry(*resource).or_default();
            match access {
                Access::Read(..) => {
                    if op.lane == Lane::Compute {
                        track.readers.retain(|t| t.lane != Lane::Compute);
                    }
                    track.readers.push(touch);
                }
                Access::Write(..) | Access::Add(..) => {
                    track.writer = Some(touch);
                    track.readers.clear();
                }
            }
        }
        if op.lane == Lane::Compute {
            self.last_compute = Some(touch);
        }
    }
}
