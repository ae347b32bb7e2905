//! The state of a model between two engines: what stays where it is when a plan changes in what a step works in.
use std::sync::{Arc, Mutex, Weak};

use super::Engine;
use super::state::Shared;
use crate::device::DeviceMemory;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::host::Process;
use crate::plan::{DeviceState, Placement, Region};
use crate::store::Store;
use crate::store::spill::{Spill, StateFiles};

/// All weights, residuals, moments and counts of a model whose engine was closed. Nothing is copied: the next engine takes the
/// memory and the files over, and only what a step works in is allocated anew.
pub struct Kept {
    placement: Placement,
    pub(super) store: Arc<Store>,
    pub(super) spill: Option<Arc<Spill>>,
    /// The regions of weights and state, where the device holds any state.
    on_device: Option<[DeviceMemory; 2]>,
    /// The engine that has taken it over last.
    pub(super) taken: Mutex<Weak<Shared>>,
    /// Its disk, and the folders that it was given there.
    pub(super) disk: Arc<dyn Disk>,
    pub(super) folders: Option<StateFiles>,
    process: Process,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.process.is_forked() {
            // What the device and the folders hold is the parent's.
            std::mem::forget((Arc::clone(&self.store), self.spill.take(), self.on_device.take()));
        }
    }
}

impl Engine {
    /// Closes the engine and keeps the model's state, after every pending update. Other memory of the engine goes with the
    /// engine itself.
    ///
    /// # Errors
    /// [`Error`] when a pass is under way, gradients wait for a decision, a save has not been finished, or the engine is broken.
    /// Nothing is closed then.
    pub fn keep(&self) -> Result<Kept> {
        self.drained()?;
        let shared = &self.shared;
        {
            let mut core = shared.enter()?;
            if core.computing() || core.undecided.is_some() || core.accumulated {
                return Err(Error::PassUnderWay { remedy: "apply or abandon its gradients before the plan changes" });
            }
            if core.saving.is_some() {
                return Err(Error::SaveUnderWay);
            }
            if !core.is_drained() {
                return Err(Error::PassUnderWay { remedy: "another thread has begun one" });
            }
            // Nothing begins from here on.
            core.closing = true;
        }
        let holds_state = shared.placement.device_state.iter().any(Option::is_some);
        let kept = Kept {
            placement: shared.placement.clone(),
            store: Arc::clone(&shared.memory.store),
            spill: shared.memory.spill(),
            on_device: holds_state.then(|| [Region::Weights, Region::State].map(|region| self.region(region))),
            taken: Mutex::default(),
            disk: Arc::clone(&shared.disk),
            folders: shared.options.disk.clone(),
            process: Process::current(),
        };
        self.close();
        Ok(kept)
    }
}

impl Kept {
    /// Refuses a placement by which some of the state would be elsewhere.
    pub(super) fn check(&self, next: &Placement) -> Result<()> {
        let before = &self.placement;
        let places = |p: &Placement| -> Vec<_> {
            let state = |unit: usize| p.device_state[unit].as_ref().map(ranges);
            // Weights of state on the host are sent again; of state on the device they are nowhere else.
            (0..p.layouts.len()).map(|unit| state(unit).zip(p.own[unit])).collect()
        };
        let differs = if before.layouts != next.layouts {
            Some("the model")
        } else if before.host_state != next.host_state {
            Some("which units have their state on the host")
        } else if before.disk_parts != next.disk_parts {
            Some("which state is on disk")
        } else if places(before) != places(next) {
            Some("which units have their state on the device")
        } else if self.on_device.is_some() && before.region_bytes(Region::Weights) != next.region_bytes(Region::Weights)
        {
            Some("the number of slots, beside which units have their state on the device,")
        } else {
            None
        };
        differs.map_or(Ok(()), |what| Err(Error::OtherState { what }))
    }

    /// The memory of a device region that holds state.
    pub(super) fn region(&self, region: Region) -> Option<DeviceMemory> {
        let [weights, state] = self.on_device.as_ref()?;
        match region {
            Region::Weights => Some(weights.clone()),
            Region::State => Some(state.clone()),
            _ => None,
        }
    }
}

fn ranges(state: &DeviceState) -> [crate::plan::DeviceRange; 3] {
    [state.residual, state.exp_avg, state.exp_avg_sq]
}
