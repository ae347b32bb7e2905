//! What the core asks of the host's system: memory and threads.
#[expect(unsafe_code, reason = "jobs borrowed for the length of a run, affinity calls")]
pub mod pool;
mod process;
#[expect(unsafe_code, reason = "host pages: mmap, spans as slices, advice to the kernel")]
pub mod span;

pub use self::pool::{Affinity, Pool};
pub use self::process::Process;
pub use self::span::HostSpan;
