//! What it takes and gives to have optimizer state, weights and layer inputs on disk.
use std::ops::Range;

use super::point::{DISK_BUFFERS, INPUT_BUFFERS, Point, WEIGHT_BUFFERS, disk_order, evenly, groups};
use super::space::{Space, total};
use crate::layout::UnitLayout;
use crate::plan::{TRANSFER_WINDOW, disk_cuts, part_bytes};
use crate::store::spill::weights_bytes;

/// What it takes and gives to have the state of some units on disk, and the weights of some of those.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OnDisk {
    /// How many units, in the order in which their state goes there.
    pub(super) units: usize,
    /// How many of them have their weights there too, the first ones.
    pub(super) weights: usize,
    /// Bytes on disk.
    pub(super) disk: u64,
    /// Bytes that a step reads and writes: see [`disk_traffic`].
    pub(super) traffic: u64,
    /// Host bytes that are no longer needed, and those of the buffers that are.
    pub(super) freed: u64,
    pub(super) buffers: u64,
    /// The most host bytes that this choice spares, or one with less traffic.
    pub(super) most_spared: u64,
    /// Of the traffic, what is read and what is written at least.
    pub(super) read: u64,
    pub(super) written: u64,
}

/// What it takes and gives to have the inputs of some layers on disk that would wait on the host.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InputsOnDisk {
    /// How many layers.
    pub(super) layers: usize,
    /// Bytes on disk, which the host no longer needs.
    pub(super) disk: u64,
    /// Bytes that a step writes, and reads again.
    pub(super) moved: u64,
    /// Host bytes of the buffers that they pass through.
    pub(super) buffers: u64,
}

impl InputsOnDisk {
    /// What they add to [`disk_traffic`].
    pub(super) const fn traffic(&self) -> u64 {
        input_traffic(self.moved)
    }
}

/// What writing so many bytes of inputs in a step, and reading them again, counts for in comparison with [`disk_traffic`]: a
/// quarter more than as many bytes of state, which are read and written while others are computed. An input that is late holds
/// up its layer. So state goes to disk first, then inputs, and then weights, which are read several times.
pub(super) const fn input_traffic(moved: u64) -> u64 {
    moved.saturating_mul(2).saturating_add(moved / 2)
}

/// Sums over the first units whose state goes to disk.
#[derive(Clone, Copy, Default)]
struct FirstOnDisk {
    /// Bytes of their state on disk, and those that the host no longer holds.
    state: u64,
    freed: u64,
    /// Bytes of the weights that are updated with it, and of their images, which hold what is frozen too.
    updated_weights: u64,
    images: u64,
    /// The largest of these, and of the parts in which state comes and goes, without and with its weights.
    largest_image: u64,
    largest_part: u64,
    largest_whole_part: u64,
}

impl FirstOnDisk {
    fn and(self, layout: &UnitLayout, parts: &[Range<u64>]) -> Self {
        let bytes = |weights: bool| parts.iter().map(move |part| part_bytes(layout, part, weights));
        let largest = |weights| bytes(weights).max().unwrap_or(0);
        Self {
            state: self.state.saturating_add(bytes(false).sum()),
            freed: total([self.freed, layout.residual_bytes(), 2 * layout.moment_bytes()]),
            updated_weights: self.updated_weights.saturating_add(weights_bytes(layout, layout.elements)),
            images: self.images.saturating_add(layout.image_bytes),
            largest_image: self.largest_image.max(layout.image_bytes),
            largest_part: self.largest_part.max(largest(false)),
            largest_whole_part: self.largest_whole_part.max(largest(true)),
        }
    }
}

impl Space<'_> {
    /// With the first `state` units' state on the device: what it takes to have none, one, two, … of the others' on disk, with
    /// the weights of none, one, two, … of them; ascending in both.
    pub(super) fn on_disk(&self, state: usize) -> Vec<OnDisk> {
        let mut sums = vec![FirstOnDisk::default()];
        for unit in disk_order(self.request, state) {
            let last = sums[sums.len() - 1];
            sums.push(last.and(&self.layouts[unit], &disk_cuts(self.request, &self.layouts[unit])));
        }
        let all = sums.len() - 1;
        let mut found = Vec::new();
        for count in 0..=all {
            let weights = self.weights_beside(count, all);
            found.extend(weights.map(|weights| self.with_disk(&sums, count, weights, state)));
        }
        found
    }

    /// How many of `count` units with their state on disk may have their weights there too, where `all` could have their state
    /// there. Reading weights again and again costs most, so that state goes there first.
    fn weights_beside(&self, count: usize, all: usize) -> std::ops::RangeInclusive<usize> {
        let r = &self.request.requests;
        match r.weights_on_disk {
            Some(asked) => asked as usize..=(asked as usize).min(count),
            None if count == all || r.state_on_disk.is_some() => 0..=count,
            None => 0..=0,
        }
    }

    fn with_disk(&self, sums: &[FirstOnDisk], units: usize, weights: usize, state: usize) -> OnDisk {
        if units == 0 {
            return OnDisk::default();
        }
        let (of_state, of_weights) = (&sums[units], &sums[weights]);
        let disk = of_state.state.saturating_add(of_weights.images);
        let window = if state == 0 { TRANSFER_WINDOW } else { 0 };
        let part = of_state.largest_part.max(of_weights.largest_whole_part);
        let buffers = [
            u64::from(DISK_BUFFERS).saturating_mul(part),
            u64::from(WEIGHT_BUFFERS).saturating_mul(of_weights.largest_image),
            window,
        ];
        let updated = of_state.state.saturating_add(of_weights.updated_weights);
        OnDisk {
            units,
            weights,
            disk,
            traffic: disk_traffic(
                disk,
                of_weights.images,
                groups(self.request, self.asked_large()).count(self.request.micro_batches),
            ),
            freed: of_state.freed.saturating_add(of_weights.images),
            buffers: total(buffers),
            most_spared: 0,
            // Weights are read at least once to be sent.
            read: updated.saturating_add(of_weights.images),
            written: updated,
        }
    }

    /// What it takes to have the inputs of none, one, two, … layers of a point on disk, where all of them wait on the host.
    pub(super) fn inputs_on_disk(&self, point: &Point) -> Vec<InputsOnDisk> {
        let (left, left_in_others) = self.not_kept(point);
        let (groups, all) = (point.groups(self.request), self.request.micro_batches);
        let large = groups.large().min(all);
        let with = |count: usize| {
            let mut found = InputsOnDisk { layers: count, ..InputsOnDisk::default() };
            for layer in evenly(left, count).map(|index| index + 1) {
                let bytes = self.left_on_host(layer, left);
                let times = if layer <= left_in_others { all } else { large };
                found.disk = found.disk.saturating_add(bytes.saturating_mul(groups.large().into()));
                found.moved = found.moved.saturating_add(bytes.saturating_mul(times.into()));
                found.buffers = found.buffers.max(bytes.saturating_mul(INPUT_BUFFERS.into()));
            }
            found
        };
        (0..=left).map(with).collect()
    }

    /// Seconds that a step's reading and writing takes at least.
    pub(super) fn least_disk_s(&self, on_disk: &OnDisk, inputs: &InputsOnDisk) -> f64 {
        let seconds = |bytes: u64, gbs: f64| bytes.saturating_add(inputs.moved) as f64 / (gbs * 1e9);
        seconds(on_disk.read, self.rates.state_read_gbs).max(seconds(on_disk.written, self.rates.state_write_gbs))
    }
}

/// What a step reads and writes of so many bytes on disk, in as many groups of micro-batches: everything once, to be updated, and
/// weights for forward and backward of each group. (A slot may spare one of these, and frozen weights are not updated; which
/// plan is taken does not depend on that.)
pub(super) fn disk_traffic(disk: u64, weights: u64, groups: u32) -> u64 {
    disk.saturating_mul(2).saturating_add(weights.saturating_mul(2 * u64::from(groups)))
}
