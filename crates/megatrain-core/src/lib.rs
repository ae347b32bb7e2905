//! The core of megatrain: memory, order and the optimizer of host-streamed training. Neither Python nor CUDA in its tree.
#![warn(missing_docs)]

pub mod device;
pub mod error;
pub mod layout;
pub mod optimizer;
pub mod store;

pub use error::{Error, Item, Result, Tier};
