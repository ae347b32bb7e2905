//! Writes a pass down in program order.
use std::collections::HashMap;

use super::hazards::Tracker;
use super::inputs::UnitFacts;
use super::slots::{Turn, assign};
use super::{Facts, Kind, Lane, NEXT_PASS, Op, Pass, Resident, Schedule, Shape};
use crate::error::{Error, Result};

/// Shared slabs that go round: one lands, one is consumed, and two absorb the difference.
const CIRCULATING_SLABS: usize = 4;
/// Behind whatever holds up backward, before all that may wait until the next forward.
const EARLY: u32 = NEXT_PASS - 1;

struct Builder<'a> {
    facts: &'a Facts,
    shape: Shape,
    resident: &'a [Resident],
    tracker: Tracker,
    ops: Vec<Op>,
    /// Compute operations so far: the priority of what the next one waits for.
    computed: u32,
    /// Uses so far of staging buffers, shared gradient buffers and shared slabs, each handed out in turn.
    staged: u32,
    backed: usize,
    landed: usize,
    /// Uses so far of visiting buffers, handed out in turn too: of those for what holds up a landing, and of the others.
    visited: [u32; 2],
}

pub(super) fn build(
    facts: &Facts,
    shape: Shape,
    previous: Option<&Schedule>,
    resident: &[Resident],
) -> Result<Schedule> {
    let fits = match shape.pass {
        Pass::Write => shape.micro_batches == 0,
        Pass::Train | Pass::Eval => (1..=facts.micro_batches).contains(&shape.micro_batches),
    };
    if !fits {
        return Err(Error::PassSize { asked: shape.micro_batches, most: facts.micro_batches });
    }
    let tracker = previous.map_or_else(Tracker::default, |p| Tracker::after(facts, p.shape, &p.ops));
    let ops = Vec::new();
    let mut builder =
        Builder { facts, shape, resident, tracker, ops, computed: 0, staged: 0, backed: 0, landed: 0, visited: [0; 2] };
    builder.pass();
    Ok(Schedule { shape, resident: resident.to_vec(), ops: builder.ops })
}

impl Builder<'_> {
    fn pass(&mut self) {
        let (layers, total) = (self.facts.head() - 1, self.shape.micro_batches);
        let train = self.shape.pass == Pass::Train;
        if self.shape.writes {
            // In the order in which files hold the units, so that each is appended to.
            for unit in 0..=self.facts.head() {
                self.push(Kind::Write, unit, 0, Lane::Disk, unit, |_| {});
            }
        }
        let groups: Vec<std::ops::Range<u32>> = (0..total)
            .step_by(self.facts.group as usize)
            .map(|start| start..(start + self.facts.group).min(total))
            .collect();
        let mut turns = Vec::new();
        for _ in &groups {
            turns.extend(1..=layers);
            if train {
                turns.extend((1..=layers).rev());
            }
        }
        let mut turns = assign(self.facts, &turns, self.resident).into_iter();
        for group in groups {
            let last = group.end == total;
            self.forward(&group, &mut turns);
            if train {
                self.backward(&group, last, &mut turns);
            }
        }
        if train {
            self.push(Kind::Verdict, 0, 0, Lane::Caller, 0, |_| {});
            if self.facts.immediate {
                self.reuse_slabs_first();
            } else {
                for unit in 0..=self.facts.head() {
                    self.update(unit, self.facts.unit(unit).own_slab);
                }
            }
        }
    }

    fn forward(&mut self, group: &std::ops::Range<u32>, turns: &mut impl Iterator<Item = Option<Turn>>) {
        let (head, train) = (self.facts.head(), self.shape.pass == Pass::Train);
        self.load_own(0, group);
        for mb in group.clone() {
            self.compute(Kind::Embed, 0, mb, None);
        }
        for unit in 1..head {
            let turn = turns.next().flatten();
            self.load(unit, turn);
            for mb in group.clone() {
                let stage = self.next_stage(unit, train);
                self.push(Kind::Forward, unit, mb, Lane::Compute, self.computed, |op| {
                    (op.slot, op.stage) = (turn.map(|t| t.slot), stage);
                });
                if stage.is_some() {
                    self.push(Kind::Save, unit, mb, Lane::Download, self.computed, |op| op.stage = stage);
                }
                self.computed += 1;
            }
        }
        self.load_own(head, group);
        for mb in group.clone() {
            let grad = self.facts.unit(head).own_grad.filter(|_| train);
            self.compute(Kind::Loss, head, mb, grad);
        }
    }

    fn backward(&mut self, group: &std::ops::Range<u32>, last: bool, turns: &mut impl Iterator<Item = Option<Turn>>) {
        let head = self.facts.head();
        if last {
            self.land(head, self.facts.unit(head).own_grad);
            if self.facts.early {
                self.update_early();
            }
        }
        for unit in (1..head).rev() {
            let turn = turns.next().flatten();
            self.load(unit, turn);
            // Across groups a sum is formed apart or in a buffer of the unit's own, so a shared one serves one turn.
            let grad = self.grad_buffer(unit, last);
            for mb in group.clone() {
                let stage = self.next_stage(unit, true);
                if stage.is_some() {
                    self.push(Kind::Fetch, unit, mb, Lane::Upload, self.computed, |op| op.stage = stage);
                }
                self.push(Kind::Backward, unit, mb, Lane::Compute, self.computed, |op| {
                    (op.slot, op.stage, op.grad) = (turn.map(|t| t.slot), stage, grad);
                });
                self.computed += 1;
            }
            if last {
                self.land(unit, grad);
            }
        }
        for mb in group.clone() {
            self.compute(Kind::EmbedBackward, 0, mb, self.facts.unit(0).own_grad);
        }
        if last {
            self.land(0, self.facts.unit(0).own_grad);
        }
    }

    fn grad_buffer(&mut self, unit: u32, last: bool) -> Option<u32> {
        let facts = self.facts.unit(unit);
        if !facts.trains || facts.own_grad.is_some() {
            return facts.own_grad;
        }
        let buffers = &self.facts.shared_grads;
        let grad = buffers[self.backed % buffers.len()];
        self.backed += usize::from(last);
        Some(grad)
    }

    fn next_stage(&mut self, unit: u32, train: bool) -> Option<u32> {
        if !train || !self.facts.unit(unit).staged {
            return None;
        }
        let stage = self.staged % self.facts.stage_buffers;
        self.staged += 1;
        Some(stage)
    }

    /// Embed and head keep their place all pass long, so that they are loaded once.
    fn load_own(&mut self, unit: u32, group: &std::ops::Range<u32>) {
        let there = self.facts.unit(unit).on_device || self.resident.contains(&Resident { unit, slot: None });
        if group.start == 0 && !there {
            for part in 0..self.facts.unit(unit).parts {
                self.push(Kind::Load, unit, 0, Lane::Upload, self.computed, |op| op.part = part);
            }
        }
    }

    fn load(&mut self, unit: u32, turn: Option<Turn>) {
        if let Some(Turn { slot, load: true }) = turn {
            self.push(Kind::Load, unit, 0, Lane::Upload, self.computed, |op| op.slot = Some(slot));
        }
    }

    fn compute(&mut self, kind: Kind, unit: u32, micro_batch: u32, grad: Option<u32>) {
        self.push(kind, unit, micro_batch, Lane::Compute, self.computed, |op| op.grad = grad);
        self.computed += 1;
    }

    fn land(&mut self, unit: u32, grad: Option<u32>) {
        let facts = self.facts.unit(unit);
        if !facts.trains {
            return;
        }
        let slab = match facts.own_slab {
            None if !facts.on_device => Some(self.next_slab()),
            own => own,
        };
        // What backward has just left behind is landed before anything that comes later.
        for part in 0..facts.parts {
            self.push(Kind::Land, unit, 0, Lane::Download, self.computed - 1, |op| {
                (op.grad, op.slab, op.part) = (grad, slab, part);
            });
        }
        if self.facts.accumulate {
            self.push(Kind::Gather, unit, 0, Lane::Host, self.computed - 1, |op| op.slab = slab);
        }
        if self.facts.immediate {
            self.update(unit, slab);
        }
    }

    /// What the embedding's backward will not change: beneath the layers' backward, so that behind it only the rows that
    /// were looked up are updated between this step and the next. A tied embedding's gradient is then the head's, which
    /// is landed for that; otherwise those rows have none.
    fn update_early(&mut self) {
        let UnitFacts { own_grad: grad, own_slab: slab, parts, .. } = *self.facts.unit(0);
        if self.facts.tied {
            for part in 0..parts {
                self.push(Kind::Land, 0, 0, Lane::Download, EARLY, |op| {
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

    /// A shared slab. A few go round; the others are each used once, by the layers that land first, which are the last
    /// ones that the next forward needs: so their updates can wait until the host would be idle, beneath that forward,
    /// without holding up a landing.
    fn next_slab(&mut self) -> u32 {
        let (slabs, waiting) = (&self.facts.shared_slabs, self.waiting_slabs().len());
        let turn = self.landed;
        let slab =
            if turn < waiting { slabs[turn] } else { slabs[waiting + (turn - waiting) % (slabs.len() - waiting)] };
        self.landed += 1;
        slab
    }

    /// Those that are each used once.
    fn waiting_slabs(&self) -> &[u32] {
        let slabs = &self.facts.shared_slabs;
        &slabs[..slabs.len().saturating_sub(CIRCULATING_SLABS)]
    }

    fn update(&mut self, unit: u32, slab: Option<u32>) {
        let facts = self.facts.unit(unit);
        if !facts.trains {
            return;
        }
        if facts.visits > 0 {
            self.visit(unit, slab);
            return;
        }
        let (lane, grad) = if facts.on_device { (Lane::Update, facts.own_grad) } else { (Lane::Host, None) };
        let slab = slab.filter(|_| !self.facts.accumulate);
        for part in 0..facts.parts {
            self.push(Kind::Update, unit, 0, lane, self.next_turn(unit), |op| {
                (op.grad, op.slab, op.part) = (grad, slab, part);
            });
        }
    }

    /// Updates on the device a unit whose state lives on the host, part by part. Under immediate updates, gradients that
    /// wait in slabs of their own have half of the buffers to themselves: they give the link work while nothing holds up
    /// a landing, and never stand before what does.
    fn visit(&mut self, unit: u32, slab: Option<u32>) {
        let priority = self.next_turn(unit);
        let all = self.facts.visit_buffers;
        let urgent = if self.facts.immediate { all.div_ceil(2) } else { all };
        let waits = urgent < all && slab.is_some_and(|slab| self.waiting_slabs().contains(&slab));
        let (first, count) = if waits { (urgent, all - urgent) } else { (0, urgent) };
        for part in 0..self.facts.unit(unit).visits {
            let turn = &mut self.visited[usize::from(waits)];
            let buffer = Some(first + *turn % count);
            *turn += 1;
            self.push(Kind::Bring, unit, 0, Lane::Upload, priority, |op| {
                (op.slab, op.part, op.visit) = (slab, part, buffer);
            });
            self.push(Kind::Update, unit, 0, Lane::Update, priority, |op| (op.part, op.visit) = (part, buffer));
            // Not among the downloads: there it would stand behind landings that wait for their backward.
            self.push(Kind::Return, unit, 0, Lane::Update, priority, |op| (op.part, op.visit) = (part, buffer));
        }
    }

    /// The priority number of an update: that of the load for the next forward, which meets the units in this order;
    /// see also `reuse_slabs_first`.
    fn next_turn(&self, unit: u32) -> u32 {
        NEXT_PASS + unit * self.facts.group.min(self.shape.micro_batches)
    }

    /// Under immediate updates, a slab that another gradient of this pass will need is emptied first, in the order of
    /// landing: otherwise the gradient that landed first would wait longest, and hold up every landing behind it.
    fn reuse_slabs_first(&mut self) {
        let landings = || self.ops.iter().filter(|op| op.kind == Kind::Land && !op.early);
        let slabs: HashMap<u32, u32> = landings().filter_map(|op| Some((op.unit, op.slab?))).collect();
        let last: HashMap<u32, u32> = landings().filter_map(|op| Some((op.slab?, op.id))).collect();
        for op in self.ops.iter_mut().filter(|op| !op.early) {
            let again = slabs.get(&op.unit).is_some_and(|slab| last[slab] > op.id);
            if again && matches!(op.kind, Kind::Bring | Kind::Update | Kind::Return) {
                op.priority = op.id;
            }
        }
    }

    fn push(&mut self, kind: Kind, unit: u32, micro_batch: u32, lane: Lane, priority: u32, fill: impl FnOnce(&mut Op)) {
        let id = u32::try_from(self.ops.len()).expect("fewer operations than 2^32");
        let mut op = Op::new(id, kind, unit, lane);
        (op.micro_batch, op.priority) = (micro_batch, priority);
        fill(&mut op);
        op.deps = self.tracker.depend(self.facts, self.shape, &op);
        self.ops.push(op);
    }
}
