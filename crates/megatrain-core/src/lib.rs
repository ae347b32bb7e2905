//! The core of megatrain: memory, order and the optimizer of host-streamed training. Neither Python nor CUDA in its tree.
#![warn(missing_docs)]

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
