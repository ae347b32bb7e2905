//! Figures of a step: who was busy for how long, and what moved.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::shared::Shared;
use crate::error::Result;
use crate::plan::Placement;
use crate::schedule::{Kind, Lane, Op};

/// Figures from one decision to the next: a step's computing and copies, with the updates of the step before, which run
/// beneath it. After an evaluation: those of the evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Seconds busy, by lane: compute, upload, download, host, update (on the device), and disk where anything was written.
    pub lanes: BTreeMap<String, f64>,
    /// Bytes sent to the device.
    pub bytes_to_device: u64,
    /// Bytes sent to the host.
    pub bytes_to_host: u64,
    /// Parameters updated by the host's optimizer.
    pub parameters_updated: u64,
    /// Seconds for which the caller waited for an operation's inputs.
    pub waited_s: f64,
    /// The lane that was busy longest.
    pub longest: String,
}

/// What is being counted.
pub(super) struct Counters {
    since: Instant,
    lanes: [f64; Lane::COUNT],
    to_device: u64,
    to_host: u64,
    updated: u64,
    waited: Duration,
    last: Stats,
    /// Whether a training pass is being counted, which ends with its verdict and not with its last computation.
    deciding: bool,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            lanes: [0.0; Lane::COUNT],
            to_device: 0,
            to_host: 0,
            updated: 0,
            waited: Duration::ZERO,
            last: Stats::default(),
            deciding: false,
        }
    }
}

impl Counters {
    pub(super) fn waited(&mut self, time: Duration) {
        self.waited += time;
    }

    pub(super) fn busy(&mut self, lane: Lane, seconds: f64) {
        self.lanes[lane as usize] += seconds;
    }

    pub(super) fn moved(&mut self, op: &Op, placement: &Placement) {
        let unit = op.unit as usize;
        let part = || &placement.parts[unit][op.part as usize];
        match op.kind {
            Kind::Load => self.to_device += part().image.end - part().image.start,
            Kind::Fetch => self.to_device += placement.staged[unit],
            Kind::Save => self.to_host += placement.staged[unit],
            Kind::Land if op.slab.is_some() => {
                let elements = part().elements.end - part().elements.start;
                self.to_host += elements * placement.grad_precision.dtype().size();
            }
            Kind::Bring => self.to_device += placement.visit_bytes(unit, op.part as usize).0,
            Kind::Return => self.to_host += placement.visit_bytes(unit, op.part as usize).1,
            // The last part speaks for all.
            Kind::Update
                if op.lane == Lane::Host && !op.early && op.part as usize + 1 == placement.parts[unit].len() =>
            {
                self.updated += placement.layouts[unit].num_trainable()
            }
            _ => {}
        }
    }

    pub(super) fn pass_begun(&mut self, train: bool) {
        self.deciding = train;
    }

    pub(super) fn pass_computed(&mut self) {
        if !self.deciding {
            self.close();
        }
    }

    pub(super) fn applied(&mut self) {
        self.close();
    }

    fn close(&mut self) {
        let lanes = Lane::ALL.into_iter().map(|lane| (lane, self.lanes[lane as usize]));
        let reported = lanes.filter(|&(lane, busy)| lane != Lane::Caller && (lane != Lane::Disk || busy > 0.0));
        let lanes: BTreeMap<String, f64> = reported.map(|(lane, busy)| (lane.name().to_owned(), busy)).collect();
        let longest = lanes.iter().max_by(|a, b| a.1.total_cmp(b.1)).map(|(name, _)| name.clone()).unwrap_or_default();
        let last = Stats {
            seconds: self.since.elapsed().as_secs_f64(),
            lanes,
            bytes_to_device: self.to_device,
            bytes_to_host: self.to_host,
            parameters_updated: self.updated,
            waited_s: self.waited.as_secs_f64(),
            longest,
        };
        *self = Self { last, ..Self::default() };
    }
}

impl Shared {
    pub(super) fn stats(&self) -> Result<Stats> {
        Ok(self.enter()?.counters.last.clone())
    }
}
