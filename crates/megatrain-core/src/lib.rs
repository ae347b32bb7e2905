//! The core of megatrain: memory, order and the optimizer of host-streamed training. Neither Python nor CUDA in its tree.
//!
//! Full-precision training of models larger than device memory, after MegaTrain (arXiv 2604.05091): host memory holds
//! weights, gradients and moments, and each unit's weights are streamed through the device when it is computed. Each module
//! uses only those listed before it (`tests/layers.rs`), so the list is also a reading order:
//!
//! 1. [`error`], [`layout`]: what can go wrong; the offset of each tensor in its unit's flat planes.
//! 2. [`disk`], [`host`]: files; mapped memory and the optimizer's threads.
//! 3. [`adamw`]: AdamW, the gradient norm and clipping over slices, bit-equal on every instruction set.
//! 4. [`device`]: what the engine asks of a device; the simulated one runs everything without a GPU, in adversarial order.
//! 5. [`store`]: the planes of every unit in registered host memory, and files of them.
//! 6. [`plan`]: a request (model, batch, machine), a plan, and the placement of every byte under it: data only.
//! 7. [`schedule`]: the order of one pass as a list of operations, derived from what each reads and writes, and checked.
//! 8. [`estimate`]: the same order on a virtual clock: how long a step takes and what bounds it.
//! 9. [`planner`]: chooses the plan ([`plan::plan`]), or says whether there is one ([`plan::fits`]).
//! 10. [`optimizer`]: AdamW over whole units of the store, divided over threads.
//! 11. [`stream`]: the engine, which runs schedules on lanes and lends each unit's weights to whoever computes.
//!
//! | word | means |
//! |---|---|
//! | unit | what moves at once: `embed`, a decoder layer, `head` |
//! | image | a unit's weights as the device sees them: one contiguous copy |
//! | slot | a device buffer that layers' weights use in turn |
//! | slab | a host buffer that a unit's gradient is offloaded to |
//! | lane | who issues operations: computing, copies up and down, the host's optimizer, files |
//! | pass | forward and loss over all micro-batches, in training with backward and update |
//!
//! The numbered examples are the embedding guide. It is tested on x86-64 Linux with the GNU C library, the only target that
//! the Python package is built for; alone it compiles for AArch64 Linux too, where it is not tested.
#![warn(missing_docs)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("megatrain-core compiles for 64-bit little-endian Linux; this target is another one");

pub mod adamw;
pub mod device;
pub mod disk;
pub mod error;
pub mod estimate;
pub mod host;
pub mod layout;
pub mod optimizer;
pub mod planner;
#[doc(hidden)]
pub mod random;
pub mod schedule;
pub mod store;
pub mod stream;
mod trace;

/// What a plan is made from, the plan, and where it puts everything: data only. [`plan::plan`] is the planner's.
pub mod plan {
    mod compute_time;
    mod groups;
    mod placement;
    #[expect(clippy::module_inception, reason = "the type and its file are called after the noun")]
    mod plan;
    mod request;

    pub use self::groups::Groups;
    pub use self::placement::{
        DeviceRange, DeviceState, HostState, NormPlace, Part, Placement, Region, Staged, StateBuffer,
    };
    pub(crate) use self::placement::{TRANSFER_WINDOW, disk_cuts, largest_torch_lines, part_bytes, torch_lines};
    pub use self::plan::{Activation, Forecast, Place, Plan, State, Totals, UnitPlan};
    pub use self::request::{
        Auto, Budget, Count, DeviceKind, Rates, Request, Requests, Routed, UnitRequest, UnitRole, UpdateMode,
    };
    pub use crate::planner::{fits, plan};
}

pub use error::{Error, Item, Result, Tier};
