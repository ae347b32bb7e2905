//! Writes a pass down in program order.
use rustc_hash::FxHashMap;

use super::hazards::Tracker;
use super::inputs::UnitInputs;
use super::slots::{Turn, assign};
use super::{Kind, Lane, NEXT_PASS, Op, Pass, Resident, Schedule, ScheduleInputs, Shape};
use crate::error::{Error, Result};

/// Shared slabs that circulate: one is filled, one is consumed, and two absorb the difference.
const CIRCULATING_SLABS: usize = 4;
/// After whatever holds up backward, before all that may wait until the next forward.
const EARLY: u32 = NEXT_PASS - 1;

struct Builder<'a> {
    inputs: &'a ScheduleInputs,
    shape: Shape,
    resident: &'a [Resident],
    tracker: Tracker,
    ops: Vec<Op>,
    /// Compute operations so far: the priority of what the next one waits for.
    computed: u32,
    /// Uses so far of staging buffers, shared gradient buffers and shared slabs, each handed out in turn.
    staged: u32,
    backed: usize,
    offloads: usize,
    /// Uses so far of state buffers, handed out in turn too: of those for what holds up an offload, and of the others.
    state_buffered: [u32; 2],
    /// Uses of buffers for state on disk, and of those for weights there.
    disk_buffered: u32,
    weights_read: u32,
    /// Uses of buffers for inputs that wait on disk.
    inputs_moved: u32,
}

/// The order of a pass whose operations follow what `tracker` has seen, and the tracker that has seen it too.
pub(super) fn build(
    inputs: &ScheduleInputs,
    shape: Shape,
    tracker: Tracker,
    resident: &[Resident],
) -> Result<(Schedule, Tracker)> {
    let fits = match shape.pass {
        Pass::Write => shape.micro_batches == 0,
        Pass::Train | Pass::Eval => (1..=inputs.micro_batches).contains(&shape.micro_batches),
    };
    if !fits {
        return Err(Error::PassSize { asked: shape.micro_batches, most: inputs.micro_batches });
    }
    let ops = Vec::new();
    let mut builder = Builder {
        inputs,
        shape,
        resident,
        tracker,
        ops,
        computed: 0,
        staged: 0,
        backed: 0,
        offloads: 0,
        state_buffered: [0; 2],
        disk_buffered: 0,
        weights_read: 0,
        inputs_moved: 0,
    };
    builder.pass();
    Ok((Schedule { shape, resident: resident.to_vec(), ops: builder.ops }, builder.tracker))
}

impl Builder<'_> {
    fn pass(&mut self) {
        let (layers, total) = (self.inputs.head() - 1, self.shape.micro_batches);
        let train = self.shape.pass == Pass::Train;
        if self.shape.writes {
            // In the order in which files hold the units, so that each is appended to.
            for unit in 0..=self.inputs.head() {
                self.push(Kind::WriteCheckpoint, unit, 0, Lane::Disk, unit, |_| {});
            }
        }
        let groups: Vec<std::ops::Range<u32>> = self.inputs.groups.ranges(total).collect();
        let mut turns = Vec::new();
        for group in &groups {
            let turn = |unit: u32| {
                let holder = self.inputs.holder(unit);
                (holder, self.inputs.sent(holder, group.start))
            };
            turns.extend((1..=layers).map(turn));
            if train {
                turns.extend((1..=layers).rev().map(turn));
            }
        }
        let mut turns = assign(self.inputs, &turns, self.resident).into_iter();
        for group in groups {
            let last = group.end == total;
            self.forward(&group, &mut turns);
            if train {
                self.backward(&group, last, &mut turns);
            }
        }
        if train {
            self.push(Kind::ClipDecision, 0, 0, Lane::Caller, 0, |_| {});
            if self.inputs.immediate {
                self.reuse_slabs_first();
            } else {
                for unit in 0..=self.inputs.head() {
                    self.update(unit, self.inputs.unit(unit).own_slab);
                }
            }
        }
    }

    fn forward(&mut self, group: &std::ops::Range<u32>, turns: &mut impl Iterator<Item = Option<Turn>>) {
        let (head, train) = (self.inputs.head(), self.shape.pass == Pass::Train);
        self.load_own(0, group);
        for mb in group.clone() {
            self.compute(Kind::Embed, 0, mb, None);
        }
        for unit in 1..head {
            let turn = turns.next().flatten();
            self.load(self.inputs.holder(unit), group.start, turn);
            for mb in group.clone() {
                let stage = self.next_stage(unit, mb, train);
                self.push(Kind::Forward, unit, mb, Lane::Compute, self.computed, |op| {
                    (op.slot, op.stage) = (turn.map(|t| t.slot), stage);
                });
                if stage.is_some() {
                    let buffer = self.next_input_buffer(unit, mb);
                    self.push(Kind::OffloadActivation, unit, mb, Lane::Download, self.computed, |op| {
                        (op.stage, op.input_buffer) = (stage, buffer);
                    });
                    if buffer.is_some() {
                        self.push(Kind::WriteInput, unit, mb, Lane::StateWrite, self.computed, |op| {
                            op.input_buffer = buffer;
                        });
                    }
                }
                self.computed += 1;
            }
        }
        self.load_own(head, group);
        for mb in group.clone() {
            let grad = self.inputs.unit(head).own_grad.filter(|_| train);
            self.compute(Kind::Loss, head, mb, grad);
        }
    }

    fn backward(&mut self, group: &std::ops::Range<u32>, last: bool, turns: &mut impl Iterator<Item = Option<Turn>>) {
        let head = self.inputs.head();
        if last {
            self.offload_grad(head, self.inputs.unit(head).own_grad);
            if self.inputs.early {
                self.update_early();
            }
        }
        for unit in (1..head).rev() {
            let turn = turns.next().flatten();
            self.load(self.inputs.holder(unit), group.start, turn);
            // Across groups a sum is formed apart or in a buffer of the unit's own, so a shared one serves one use.
            let grad = self.grad_buffer(unit, last);
            for mb in group.clone() {
                let stage = self.next_stage(unit, mb, true);
                if stage.is_some() {
                    let buffer = self.next_input_buffer(unit, mb);
                    if buffer.is_some() {
                        self.push(Kind::ReadInput, unit, mb, Lane::StateRead, self.computed, |op| {
                            op.input_buffer = buffer;
                        });
                    }
                    self.push(Kind::FetchActivation, unit, mb, Lane::Upload, self.computed, |op| {
                        (op.stage, op.input_buffer) = (stage, buffer);
                    });
                }
                self.push(Kind::Backward, unit, mb, Lane::Compute, self.computed, |op| {
                    (op.slot, op.stage, op.grad) = (turn.map(|t| t.slot), stage, grad);
                });
                self.computed += 1;
            }
            if last {
                self.offload_grad(unit, grad);
            }
        }
        for mb in group.clone() {
            self.compute(Kind::EmbedBackward, 0, mb, self.inputs.unit(0).own_grad);
        }
        if last {
            self.offload_grad(0, self.inputs.unit(0).own_grad);
        }
    }

    fn grad_buffer(&mut self, unit: u32, last: bool) -> Option<u32> {
        let inputs = self.inputs.unit(unit);
        if !inputs.trains || inputs.own_grad.is_some() {
            return inputs.own_grad;
        }
        let buffers = &self.inputs.shared_grads;
        let grad = buffers[self.backed % buffers.len()];
        self.backed += usize::from(last);
        Some(grad)
    }

    fn next_stage(&mut self, unit: u32, micro_batch: u32, train: bool) -> Option<u32> {
        if !train || self.inputs.unit(unit).staged.bytes(micro_batch) == 0 {
            return None;
        }
        let stage = self.staged % self.inputs.stage_buffers;
        self.staged += 1;
        Some(stage)
    }

    /// The host buffer through which what a unit stages goes to disk, or comes back, where it waits there: each in turn, so that
    /// as many are written, or read ahead of their backward, as there are buffers.
    fn next_input_buffer(&mut self, unit: u32, micro_batch: u32) -> Option<u32> {
        if self.inputs.unit(unit).staged.disk_bytes(micro_batch) == 0 {
            return None;
        }
        let buffer = self.inputs_moved % self.inputs.input_buffers;
        self.inputs_moved += 1;
        Some(buffer)
    }

    /// Embed and head keep their place all pass long, so that they are loaded once.
    fn load_own(&mut self, unit: u32, group: &std::ops::Range<u32>) {
        let there = self.inputs.unit(unit).on_device || self.resident.contains(&Resident { unit, slot: None });
        if group.start == 0 && !there {
            let buffer = self.read_weights(unit);
            for part in 0..self.inputs.unit(unit).parts {
                self.push(Kind::Load, unit, 0, Lane::Upload, self.computed, |op| {
                    (op.part, op.weight_buffer) = (part, buffer);
                });
            }
        }
    }

    /// Loads a unit for the group that begins with `micro_batch`.
    fn load(&mut self, unit: u32, micro_batch: u32, turn: Option<Turn>) {
        if let Some(Turn { slot, load: true }) = turn {
            let buffer = self.read_weights(unit);
            let sent = self.inputs.sent(unit, micro_batch);
            self.push(Kind::Load, unit, sent, Lane::Upload, self.computed, |op| {
                (op.slot, op.weight_buffer) = (Some(slot), buffer);
            });
        }
    }

    /// Reads what is about to be loaded from disk, where it is there; the buffers are handed out in turn. What an update has
    /// just written is read again: by the time that the next pass loads it, other units' weights have had its buffer.
    fn read_weights(&mut self, unit: u32) -> Option<u32> {
        if !self.inputs.unit(unit).weights_on_disk {
            return None;
        }
        let buffer = Some(self.weights_read % self.inputs.weight_buffers);
        self.weights_read += 1;
        self.push(Kind::ReadWeights, unit, 0, Lane::StateRead, self.computed, |op| op.weight_buffer = buffer);
        buffer
    }

    fn compute(&mut self, kind: Kind, unit: u32, micro_batch: u32, grad: Option<u32>) {
        self.push(kind, unit, micro_batch, Lane::Compute, self.computed, |op| op.grad = grad);
        self.computed += 1;
    }

    fn offload_grad(&mut self, unit: u32, grad: Option<u32>) {
        let inputs = self.inputs.unit(unit);
        if !inputs.trains {
            return;
        }
        let slab = match inputs.own_slab {
            None if !inputs.on_device => Some(self.next_slab()),
            own => own,
        };
        // The gradient that backward has just finished is offloaded before anything that comes later.
        for part in 0..inputs.parts {
            self.push(Kind::OffloadGrad, unit, 0, Lane::Download, self.computed - 1, |op| {
                (op.grad, op.slab, op.part) = (grad, slab, part);
            });
        }
        if self.inputs.accumulate {
            self.push(Kind::AccumulateGrad, unit, 0, Lane::Host, self.computed - 1, |op| op.slab = slab);
        }
        if self.inputs.immediate {
            self.update(unit, slab);
        }
    }

    /// Updates the embedding rows that this step did not look up while the layers run backward, so that only looked-up
    /// rows are left for the gap between steps. With a tied embedding their gradient is the head's, which is offloaded
    /// for that; otherwise they have none.
    fn update_early(&mut self) {
        let UnitInputs { own_grad: grad, own_slab: slab, parts, .. } = *self.inputs.unit(0);
        if self.inputs.tied {
            for part in 0..parts {
                self.push(Kind::OffloadGrad, 0, 0, Lane::Download, EARLY, |op| {
                    (op.grad, op.slab, op.part, op.early) = (grad, slab, part, true);
                });
            }
        }
        for part in 0..parts {
            self.push(Kind::Update, 0, 0, Lane::Host, EARLY, |op| {
                (op.slab, op.part, op.early) = (slab, part, true);
            });
        }
    }

    /// A shared slab. A few circulate; the others are each used once, by the layers that are offloaded first, which are the last
    /// ones that the next forward needs: so their updates can wait until the host would be idle, during that forward,
    /// without holding up an offload.
    fn next_slab(&mut self) -> u32 {
        let (slabs, waiting) = (&self.inputs.shared_slabs, self.waiting_slabs().len());
        let turn = self.offloads;
        let slab =
            if turn < waiting { slabs[turn] } else { slabs[waiting + (turn - waiting) % (slabs.len() - waiting)] };
        self.offloads += 1;
        slab
    }

    /// Those that are each used once.
    fn waiting_slabs(&self) -> &[u32] {
        let slabs = &self.inputs.shared_slabs;
        &slabs[..slabs.len().saturating_sub(CIRCULATING_SLABS)]
    }

    fn update(&mut self, unit: u32, slab: Option<u32>) {
        let inputs = self.inputs.unit(unit);
        if !inputs.trains {
            return;
        }
        if inputs.device_update_parts > 0 {
            self.device_update(unit, slab);
            return;
        }
        if inputs.disk_parts > 0 {
            self.disk_update(unit, slab);
            return;
        }
        let (lane, grad) = if inputs.on_device { (Lane::Update, inputs.own_grad) } else { (Lane::Host, None) };
        let slab = slab.filter(|_| !self.inputs.accumulate);
        for part in 0..inputs.parts {
            self.push(Kind::Update, unit, 0, lane, self.next_turn(unit), |op| {
                (op.grad, op.slab, op.part) = (grad, slab, part);
            });
        }
    }

    /// Updates on the device a unit whose state lives on the host, part by part. Under immediate updates, gradients that
    /// wait in slabs of their own have half of the buffers to themselves: they give the link work while nothing holds up
    /// an offload, and are never queued before what does.
    fn device_update(&mut self, unit: u32, slab: Option<u32>) {
        let priority = self.next_turn(unit);
        let all = self.inputs.state_buffers;
        let urgent = if self.inputs.immediate { all.div_ceil(2) } else { all };
        let waits = urgent < all && slab.is_some_and(|slab| self.waiting_slabs().contains(&slab));
        let (first, count) = if waits { (urgent, all - urgent) } else { (0, urgent) };
        for part in 0..self.inputs.unit(unit).device_update_parts {
            let turn = &mut self.state_buffered[usize::from(waits)];
            let buffer = Some(first + *turn % count);
            *turn += 1;
            self.push(Kind::FetchState, unit, 0, Lane::Upload, priority, |op| {
                (op.slab, op.part, op.state_buffer) = (slab, part, buffer);
            });
            self.push(Kind::Update, unit, 0, Lane::Update, priority, |op| (op.part, op.state_buffer) = (part, buffer));
            // Not on the download lane: there it would be queued after offloads that wait for their backward.
            self.push(Kind::WriteBackState, unit, 0, Lane::Update, priority, |op| {
                (op.part, op.state_buffer) = (part, buffer)
            });
        }
    }

    /// Updates on the host a unit whose state lives on disk, part by part: one is read and one is written while another is
    /// updated.
    fn disk_update(&mut self, unit: u32, slab: Option<u32>) {
        let priority = self.next_turn(unit);
        let slab = slab.filter(|_| !self.inputs.accumulate);
        for part in 0..self.inputs.unit(unit).disk_parts {
            let buffer = Some(self.disk_buffered % self.inputs.disk_buffers);
            self.disk_buffered += 1;
            self.push(Kind::ReadState, unit, 0, Lane::StateRead, priority, |op| {
                (op.part, op.disk_buffer) = (part, buffer);
            });
            self.push(Kind::Update, unit, 0, Lane::Host, priority, |op| {
                (op.slab, op.part, op.disk_buffer) = (slab, part, buffer);
            });
            self.push(Kind::WriteState, unit, 0, Lane::StateWrite, priority, |op| {
                (op.part, op.disk_buffer) = (part, buffer);
            });
        }
    }

    /// The priority number of an update: that of the load for the next forward, which meets the units in this order;
    /// see also `reuse_slabs_first`.
    fn next_turn(&self, unit: u32) -> u32 {
        NEXT_PASS + unit * self.inputs.groups.large().min(self.shape.micro_batches)
    }

    /// Under immediate updates, a slab that another gradient of this pass will need is emptied first, in the order of
    /// offload: otherwise the gradient that was offloaded first would wait longest, and hold up every offload after it.
    fn reuse_slabs_first(&mut self) {
        let landings = || self.ops.iter().filter(|op| op.kind == Kind::OffloadGrad && !op.early);
        let slabs: FxHashMap<u32, u32> = landings().filter_map(|op| Some((op.unit, op.slab?))).collect();
        let last: FxHashMap<u32, u32> = landings().filter_map(|op| Some((op.slab?, op.id))).collect();
        for op in self.ops.iter_mut().filter(|op| !op.early) {
            let again = slabs.get(&op.unit).is_some_and(|slab| last[slab] > op.id);
            let updates = matches!(
                op.kind,
                Kind::FetchState | Kind::ReadState | Kind::Update | Kind::WriteBackState | Kind::WriteState
            );
            if again && updates {
                op.priority = op.id;
            }
        }
    }

    fn push(&mut self, kind: Kind, unit: u32, micro_batch: u32, lane: Lane, priority: u32, fill: impl FnOnce(&mut Op)) {
        let id = u32::try_from(self.ops.len()).expect("fewer operations than 2^32");
        let mut op = Op::new(id, kind, unit, lane);
        (op.micro_batch, op.priority) = (micro_batch, priority);
        fill(&mut op);
        op.deps = self.tracker.depend(self.inputs, self.shape, &op);
        self.ops.push(op);
    }
}
