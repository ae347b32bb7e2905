//! Figures of a step: who was busy for how long, and what moved.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::state::Shared;
use crate::error::Result;
use crate::plan::Placement;
use crate::schedule::{Kind, Lane, Op};

/// Figures from one decision to the next: a step's computing and copies, with the updates of the step before, which run
/// during it. After an evaluation: those of the evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Stats {
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Seconds busy, by lane: compute, upload, download, host, update (on the device), and disk, `state_read` and `state_write`
    /// where anything was.
    pub lanes: BTreeMap<String, f64>,
    /// Bytes sent to the device.
    pub bytes_to_device: u64,
    /// Bytes sent to the host.
    pub bytes_to_host: u64,
    /// Bytes of state and layer inputs read from disk, and of weights that are there too each time that they are sent to the device.
    pub state_bytes_read: u64,
    /// Bytes of state, weights and layer inputs written to disk.
    pub state_bytes_written: u64,
    /// Parameters updated by the host's optimizer.
    pub parameters_updated: u64,
    /// Seconds for which the caller waited for an operation's inputs.
    pub waited_s: f64,
    /// Seconds in which the caller queued operations on a device that had come to the end of all before them. A device
    /// that is kept busy lags its caller; here it waited for launches, which the compute lane counts as busy.
    pub launching_s: f64,
    /// The lane that was busy longest; `launching` where that is compute, and most of it is `launching_s`.
    pub bound: String,
}

/// What is being counted.
pub(super) struct Counters {
    since: Instant,
    lanes: [f64; Lane::COUNT],
    to_device: u64,
    to_host: u64,
    state_read: u64,
    state_written: u64,
    updated: u64,
    waited: Duration,
    launching: Duration,
    last: Stats,
    /// Whether a training pass is being counted, which ends with its clip decision and not with its last computation.
    deciding: bool,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            lanes: [0.0; Lane::COUNT],
            to_device: 0,
            to_host: 0,
            state_read: 0,
            state_written: 0,
            updated: 0,
            waited: Duration::ZERO,
            launching: Duration::ZERO,
            last: Stats::default(),
            deciding: false,
        }
    }
}

impl Counters {
    pub(super) fn waited(&mut self, time: Duration) {
        self.waited += time;
    }

    pub(super) fn launching(&mut self, time: Duration) {
        self.launching += time;
    }

    pub(super) fn busy(&mut self, lane: Lane, seconds: f64) {
        self.lanes[lane as usize] += seconds;
    }

    pub(super) fn moved(&mut self, op: &Op, placement: &Placement) {
        let unit = op.unit as usize;
        let part = || &placement.parts[unit][op.part as usize];
        match op.kind {
            Kind::Load => self.to_device += part().image.end - part().image.start,
            Kind::FetchActivation => self.to_device += placement.staged[unit].bytes(op.micro_batch),
            Kind::OffloadActivation => self.to_host += placement.staged[unit].bytes(op.micro_batch),
            Kind::OffloadGrad if op.slab.is_some() => {
                let elements = part().elements.end - part().elements.start;
                self.to_host += elements * placement.grad_precision.dtype().size();
            }
            Kind::FetchState => self.to_device += placement.device_update_bytes(unit, op.part as usize).0,
            Kind::WriteBackState => self.to_host += placement.device_update_bytes(unit, op.part as usize).1,
            Kind::ReadState => self.state_read += placement.disk_bytes(unit, op.part as usize),
            Kind::ReadWeights => self.state_read += placement.layouts[unit].image_bytes,
            Kind::WriteState => self.state_written += placement.disk_bytes(unit, op.part as usize),
            Kind::ReadInput => self.state_read += placement.staged[unit].disk_bytes(op.micro_batch),
            Kind::WriteInput => self.state_written += placement.staged[unit].disk_bytes(op.micro_batch),
            // The last part speaks for all.
            Kind::Update
                if op.lane == Lane::Host
                    && !op.early
                    && op.part as usize + 1 == placement.parts[unit].len().max(placement.disk_parts[unit].len()) =>
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
        let reported = lanes.filter(|&(lane, busy)| lane != Lane::Caller && (lane.always_used() || busy > 0.0));
        let lanes: BTreeMap<String, f64> = reported.map(|(lane, busy)| (lane.name().to_owned(), busy)).collect();
        let launching_s = self.launching.as_secs_f64();
        let longest = lanes.iter().max_by(|a, b| a.1.total_cmp(b.1));
        let bound = longest.map_or("", |(name, &busy)| {
            if name == Lane::Compute.name() && launching_s > busy / 2.0 { "launching" } else { name }
        });
        let bound = bound.to_owned();
        let last = Stats {
            seconds: self.since.elapsed().as_secs_f64(),
            lanes,
            bytes_to_device: self.to_device,
            bytes_to_host: self.to_host,
            state_bytes_read: self.state_read,
            state_bytes_written: self.state_written,
            parameters_updated: self.updated,
            waited_s: self.waited.as_secs_f64(),
            launching_s,
            bound,
        };
        *self = Self { last, ..Self::default() };
    }
}

impl Shared {
    pub(super) fn stats(&self) -> Result<Stats> {
        Ok(self.enter()?.counters.last.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_bound_by_its_longest_lane_or_by_launching_where_that_is_most_of_computing() {
        for (compute, launching, upload, bound) in [
            (1.0, 0.4, 0.5, "compute"),
            (1.0, 0.6, 0.5, "launching"),
            (1.0, 0.6, 1.5, "upload"),
            (0.0, 0.0, 0.1, "upload"),
        ] {
            let mut counters = Counters::default();
            counters.busy(Lane::Compute, compute);
            counters.launching(Duration::from_secs_f64(launching));
            counters.busy(Lane::Upload, upload);
            counters.applied();
            assert_eq!((counters.last.bound.as_str(), counters.last.launching_s), (bound, launching));
        }
    }
}
