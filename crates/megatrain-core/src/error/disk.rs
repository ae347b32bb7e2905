use std::path::{Path, PathBuf};

/// A call on a disk that failed, with what it was to do.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {} failed: {source}", self.action(), path = path.display())]
pub struct DiskError {
    /// The call, such as `write`.
    pub call: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// The first byte that was to be read or written; 0 for calls on a whole file.
    pub offset: u64,
    /// Bytes that were to be read, written or allocated; 0 for all other calls.
    pub bytes: u64,
    /// The system's error.
    pub source: std::io::Error,
}

impl DiskError {
    /// A call on a whole file or folder.
    #[must_use]
    pub fn new(call: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self { call, path: path.to_owned(), offset: 0, bytes: 0, source }
    }

    /// A call on a range of a file's bytes.
    #[must_use]
    pub fn at(self, offset: u64, bytes: usize) -> Self {
        Self { offset, bytes: bytes as u64, ..self }
    }

    /// The call with its range.
    #[must_use]
    pub fn action(&self) -> String {
        let Self { call, offset, bytes, .. } = self;
        if *bytes == 0 { (*call).to_owned() } else { format!("{call} of {bytes} bytes at byte {offset}") }
    }
}
