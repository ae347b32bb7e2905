//! The system's files, past the page cache where the file system allows.
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Disk, DiskFile, DiskResult};
use crate::error::DiskError;

/// The system's file systems. Files are read and written directly (`O_DIRECT`); where a file system refuses that, for
/// files at all or for a range that is no multiple of its blocks, the same calls go through its cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

struct RealFile {
    file: File,
    path: PathBuf,
    /// Whether it was opened for direct calls.
    direct: bool,
    /// Whether any call went through the cache.
    cached: AtomicBool,
}

/// An outcome with the call and the path that it belongs to.
fn named<T>(call: &'static str, path: &Path, outcome: io::Result<T>) -> DiskResult<T> {
    outcome.map_err(|source| DiskError::new(call, path, source))
}

/// The outcome of a system call that answers -1 with an error number, anything else without.
fn checked(answer: libc::c_int) -> io::Result<libc::c_int> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

impl Disk for RealDisk {
    fn create(&self, path: &Path, mode: u32) -> DiskResult<Box<dyn DiskFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(mode);
        open("create", path, &options)
    }

    fn open(&self, path: &Path) -> DiskResult<Box<dyn DiskFile>> {
        open("open", path, OpenOptions::new().read(true).write(true))
    }

    fn create_folder(&self, path: &Path) -> DiskResult<()> {
        named("create folder", path, std::fs::create_dir(path))
    }

    fn remove(&self, path: &Path) -> DiskResult<()> {
        let folder = path.symlink_metadata().is_ok_and(|found| found.is_dir());
        named("remove", path, if folder { std::fs::remove_dir(path) } else { std::fs::remove_file(path) })
    }

    #[allow(clippy::unnecessary_cast, reason = "the fields differ between systems")]
    fn free_bytes(&self, folder: &Path) -> DiskResult<u64> {
        let name = named("statvfs", folder, std::ffi::CString::new(folder.as_os_str().as_bytes()).map_err(Into::into))?;
        let mut facts = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: the name is a live string that ends in a zero, and the facts have room for what is written there.
        let answer = unsafe { libc::statvfs(name.as_ptr(), facts.as_mut_ptr()) };
        named("statvfs", folder, checked(answer))?;
        // SAFETY: the call has succeeded, so it has filled in all of the facts.
        let facts = unsafe { facts.assume_init() };
        Ok(facts.f_bavail as u64 * facts.f_frsize as u64)
    }
}

fn open(call: &'static str, path: &Path, options: &OpenOptions) -> DiskResult<Box<dyn DiskFile>> {
    let (file, direct) = match options.clone().custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) => (file, true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            if call == "create" {
                // Some file systems refuse only after they have made the file.
                let _ = std::fs::remove_file(path);
            }
            (named(call, path, options.open(path))?, false)
        }
        Err(error) => return named(call, path, Err(error)),
    };
    Ok(Box::new(RealFile { file, path: path.to_owned(), direct, cached: AtomicBool::new(!direct) }))
}

impl RealFile {
    /// Runs a call, once more through the cache where the file system wants other blocks than it was given, or has
    /// stopped in the middle of one.
    fn transfer(
        &self,
        call: &'static str,
        offset: u64,
        bytes: usize,
        mut run: impl FnMut() -> io::Result<usize>,
    ) -> DiskResult<usize> {
        let mut outcome = run();
        let refused = outcome.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL));
        if refused && self.direct {
            self.cached.store(true, Ordering::Release);
            outcome = self.go_through_cache().and_then(|()| run());
        }
        outcome.map_err(|source| DiskError::new(call, &self.path, source).at(offset, bytes))
    }

    /// Makes it so long without reserving room, which there must be now.
    fn lengthen(&self, bytes: u64) -> DiskResult<()> {
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        if RealDisk.free_bytes(folder)? < bytes.saturating_sub(self.size()?) {
            let full = io::Error::from_raw_os_error(libc::ENOSPC);
            return Err(DiskError::new("preallocate", &self.path, full).at(0, bytes as usize));
        }
        self.set_size(bytes)
    }

    /// Takes the file's direct flag back.
    fn go_through_cache(&self) -> io::Result<()> {
        // SAFETY: the descriptor is open as long as the file lives, and the command takes no pointer.
        let flags = checked(unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_GETFL) })?;
        // SAFETY: as before; only this file's own flags are changed.
        checked(unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) })?;
        Ok(())
    }
}

impl DiskFile for RealFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn size(&self) -> DiskResult<u64> {
        named("stat", &self.path, self.file.metadata().map(|found| found.len()))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> DiskResult<usize> {
        self.transfer("read", offset, out.len(), || self.file.read_at(out, offset))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> DiskResult<usize> {
        self.transfer("write", offset, bytes.len(), || self.file.write_at(bytes, offset))
    }

    fn set_size(&self, bytes: u64) -> DiskResult<()> {
        named("set size", &self.path, self.file.set_len(bytes))
    }

    fn preallocate(&self, bytes: u64) -> DiskResult<bool> {
        if self.size()? >= bytes {
            return Ok(true);
        }
        let error = |source| DiskError::new("preallocate", &self.path, source).at(0, bytes as usize);
        let len = libc::off_t::try_from(bytes).map_err(|_| error(io::Error::from_raw_os_error(libc::EFBIG)))?;
        loop {
            // SAFETY: the descriptor is open as long as the file lives, and the call takes no pointer.
            match checked(unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, len) }) {
                Err(refused) if refused.kind() == io::ErrorKind::Interrupted => {}
                Err(refused) if matches!(refused.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
                    return self.lengthen(bytes).map(|()| false);
                }
                other => return other.map(|_| true).map_err(error),
            }
        }
    }

    fn sync(&self) -> DiskResult<()> {
        named("sync", &self.path, self.file.sync_all())
    }

    fn forget_pages(&self) {
        if self.cached.load(Ordering::Acquire) {
            // SAFETY: the descriptor is open as long as the file lives; the advice changes no byte, and may be refused.
            let _ = unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_reserve_room_is_only_made_longer_where_there_is_room() {
        let path = std::env::temp_dir().join(format!("megatrain-real-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        let file = RealFile { file, path: path.clone(), direct: false, cached: AtomicBool::new(true) };
        std::fs::remove_file(&path).unwrap();
        file.lengthen(1 << 20).unwrap();
        assert_eq!(file.size().unwrap(), 1 << 20);
        let more = RealDisk.free_bytes(&std::env::temp_dir()).unwrap() + (1 << 40);
        assert_eq!(file.lengthen(more).unwrap_err().source.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(file.size().unwrap(), 1 << 20);
    }
}
