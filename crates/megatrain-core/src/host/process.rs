//! Which process something belongs to: a fork has copies of everything and none of the threads.

/// The process that made something.
///
/// After a fork, the child's copies must be let go without a word: threads that it would join do not run there, locks that
/// they held stay locked, and a device's driver works only in the process that opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// The one that runs this.
    #[must_use]
    pub fn current() -> Self {
        Self(std::process::id())
    }

    /// Whether this runs in a fork of it.
    #[must_use]
    pub fn is_forked(self) -> bool {
        self != Self::current()
    }
}
