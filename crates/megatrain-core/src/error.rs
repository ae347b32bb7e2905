//! Everything that can go wrong in the core, each variant naming a condition and carrying its numbers.
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// GPU memory (HBM), or the simulated device's share of host memory.
    Device,
    /// Host memory.
    Host,
}

/// One line of a memory budget: what it is for, where it lives, and how many bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// What the bytes are for, in the words of the plan table.
    pub what: String,
    /// Where they live.
    pub tier: Tier,
    /// How many bytes.
    pub bytes: u64,
    /// Whether the device must be able to copy from or to them without a bounce (pinned host memory).
    pub pinned: bool,
}

/// The error type of the whole core.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A plan needs more than a tier offers. Nothing was allocated.
    #[error("does not fit: {tier:?} memory needs {needed} bytes but {available} are available")]
    DoesNotFit {
        /// The tier that is too small.
        tier: Tier,
        /// The sum of the items on that tier, in bytes.
        needed: u64,
        /// The budget of that tier, in bytes.
        available: u64,
        /// Every line of the sum.
        items: Vec<Item>,
    },
    /// The operating system refused host memory.
    #[error("host memory: {call} of {bytes} bytes failed: {source}")]
    HostMemory {
        /// The system call.
        call: &'static str,
        /// The bytes asked for.
        bytes: usize,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A device call failed.
    #[error("device call {call} failed with code {code}: {detail}")]
    Device {
        /// The driver call.
        call: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's words, or ours.
        detail: String,
    },
    /// No usable device; the reason and the remedy are in the message.
    #[error("{reason}")]
    NoDevice {
        /// What is missing and what to install.
        reason: String,
    },
    /// A file operation failed.
    #[error("{op} {path}: {source}", path = path.display())]
    Storage {
        /// The operation, such as `read`.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A thread of the optimizer's pool failed.
    #[error("an optimizer thread failed: {0}")]
    Worker(String),
    /// A request that cannot be honoured as written.
    #[error("{0}")]
    Invalid(String),
    /// An operation of a step failed; the engine refuses everything from then on.
    #[error("the engine is broken since {op} of unit {unit}: {cause}")]
    Broken {
        /// The unit's name.
        unit: String,
        /// The operation.
        op: String,
        /// What happened.
        cause: String,
    },
}

/// The core's result.
pub type Result<T> = std::result::Result<T, Error>;
