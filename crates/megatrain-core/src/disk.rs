//! What the core asks of a disk.
//!
//! [`RealDisk`] is the system's. [`SimDisk`] keeps files in memory, keeps what was flushed apart from what was not, and
//! gives every state in which a power cut can leave it; any call on it can be made to fail.
use std::io::{Error as SystemError, ErrorKind};
use std::os::fd::BorrowedFd;
use std::path::Path;

pub use crate::error::DiskError;

#[expect(unsafe_code, reason = "free space, flags, preallocation, advice to the kernel")]
mod real;
mod sim;

pub use real::RealDisk;
pub use sim::{CrashState, Fault, FaultKind, SimDisk};

/// A multiple of every disk's block: direct reads and writes want addresses, offsets and lengths that are multiples of it.
pub const BLOCK: usize = 4096;

/// The result of a call on a disk.
pub type DiskResult<T> = std::result::Result<T, DiskError>;

/// Files and folders. What is written reaches the disk with [`DiskFile::sync`], and the entry of a folder (a file made or
/// removed in it) when that folder is flushed; until then a power cut may lose either without the other (POSIX, fsync(2)).
pub trait Disk: Send + Sync {
    /// Makes a file that is not there yet, for reading and writing, with these permissions (such as `0o644`).
    ///
    /// # Errors
    /// [`DiskError`], also when the path is in use.
    fn create(&self, path: &Path, mode: u32) -> DiskResult<Box<dyn DiskFile>>;

    /// Opens a file that is there, for reading and writing.
    ///
    /// # Errors
    /// [`DiskError`].
    fn open(&self, path: &Path) -> DiskResult<Box<dyn DiskFile>>;

    /// Makes a folder in one that is there.
    ///
    /// # Errors
    /// [`DiskError`], also when the path is in use.
    fn create_folder(&self, path: &Path) -> DiskResult<()>;

    /// Removes a file or an empty folder. A file that is open stays readable and writable until it is closed.
    ///
    /// # Errors
    /// [`DiskError`].
    fn remove(&self, path: &Path) -> DiskResult<()>;

    /// Bytes that an ordinary user may still write on the disk of a folder.
    ///
    /// # Errors
    /// [`DiskError`].
    fn free_bytes(&self, folder: &Path) -> DiskResult<u64>;
}

/// An open file. Several threads may read and write different ranges at a time.
pub trait DiskFile: Send + Sync {
    /// Where it was made or opened.
    fn path(&self) -> &Path;

    /// Its length in bytes.
    ///
    /// # Errors
    /// [`DiskError`].
    fn size(&self) -> DiskResult<u64>;

    /// Reads from `offset` on; returns how many bytes, which may be fewer than asked for, and 0 at the end only.
    ///
    /// # Errors
    /// [`DiskError`].
    fn read_at(&self, offset: u64, out: &mut [u8]) -> DiskResult<usize>;

    /// Writes from `offset` on; returns how many bytes, which may be fewer than given.
    ///
    /// # Errors
    /// [`DiskError`].
    fn write_at(&self, offset: u64, bytes: &[u8]) -> DiskResult<usize>;

    /// Cuts it, or fills it up with zeros.
    ///
    /// # Errors
    /// [`DiskError`].
    fn set_size(&self, bytes: u64) -> DiskResult<()>;

    /// Makes it at least so long, with room on the disk for all of it. False where the file system cannot reserve that: it
    /// has the room now, but others may take it.
    ///
    /// # Errors
    /// [`DiskError`], `ENOSPC` where there is no room.
    fn preallocate(&self, bytes: u64) -> DiskResult<bool>;

    /// Waits until its bytes and its length are on the disk.
    ///
    /// # Errors
    /// [`DiskError`].
    fn sync(&self) -> DiskResult<()>;

    /// Says that it will not be read again soon, so that its pages need not stay in memory.
    fn forget_pages(&self);

    /// Its file descriptor, which `io_uring` needs; `None` for a file that is not the system's.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

impl dyn DiskFile + '_ {
    /// Fills `out`.
    ///
    /// # Errors
    /// [`DiskError`] with what was still missing, also when the file ends before.
    pub fn read_exact_at(&self, mut offset: u64, mut out: &mut [u8]) -> DiskResult<()> {
        while !out.is_empty() {
            let read = match self.read_at(offset, out) {
                Err(error) if error.source.kind() == ErrorKind::Interrupted => continue,
                other => other?,
            };
            if read == 0 {
                let ends = SystemError::new(ErrorKind::UnexpectedEof, "the file ends before");
                return Err(DiskError::new("read", self.path(), ends).at(offset, out.len()));
            }
            offset += read as u64;
            out = &mut out[read..];
        }
        Ok(())
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// [`DiskError`] with what was still to be written.
    pub fn write_all_at(&self, mut offset: u64, mut bytes: &[u8]) -> DiskResult<()> {
        while !bytes.is_empty() {
            let written = match self.write_at(offset, bytes) {
                Err(error) if error.source.kind() == ErrorKind::Interrupted => continue,
                other => other?,
            };
            if written == 0 {
                let full = SystemError::from(ErrorKind::WriteZero);
                return Err(DiskError::new("write", self.path(), full).at(offset, bytes.len()));
            }
            offset += written as u64;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}
