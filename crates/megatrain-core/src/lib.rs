//! The core of megatrain: memory, order and the optimizer of host-streamed training. Neither Python nor CUDA in its tree.
//!
//! Full-precision training of models larger than device memory: host memory is where weights, gradients and moments
//! live, and each unit's weights pass through the device when its turn comes. Read in this order, which is also that of
//! the data:
//!
//! 1. [`layout`]: where each tensor lies in its unit's flat planes.
//! 2. [`plan`]: a model, a batch and a machine in; what fits, where everything goes, and every line of the sum out.
//! 3. [`schedule`]: the order of one pass as a list of operations, derived from what each reads and writes, and checked.
//! 4. [`estimate`]: the same order on a virtual clock: how long a step takes and what bounds it.
//! 5. [`store`]: the host's planes, in mapped and registered memory.
//! 6. [`device`]: what is asked of a device; the simulated one runs everything without a GPU, as inconveniently as is legal.
//! 7. [`stream`]: the engine, which runs schedules on lanes and lends each unit's weights to whoever computes.
//! 8. [`optimizer`]: AdamW over the planes, bit-equal whatever the instruction set, the thread count, or the device.
//!
//! | word | means |
//! |---|---|
//! | unit | what moves at once: `embed`, a decoder layer, `head` |
//! | image | a unit's weights as the device sees them: one contiguous copy |
//! | slot | a device buffer that layers' images take turns in |
//! | slab | a host buffer that a unit's gradient lands in |
//! | lane | who issues operations: computing, copies up and down, the host's optimizer, files |
//! | pass | forward and loss over all micro-batches, in training with backward and update |
//!
//! The numbered examples are the embedding guide. It is tested on x86-64 Linux with the GNU C library, the only target that
//! the Python package is built for; alone it compiles for AArch64 Linux too, where it is not tested.
#![warn(missing_docs)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("megatrain-core compiles for 64-bit little-endian Linux; this target is another one");

pub mod device;
pub mod error;
pub mod estimate;
pub mod layout;
pub mod optimizer;
pub mod plan;
pub mod schedule;
pub mod store;
pub mod stream;
mod trace;

pub use error::{Error, Item, Result, Tier};
