//! The folders that hold state files: one for each engine, locked, gone with it.
//!
//! The files in it are unlinked as soon as they are open, so their space is freed when the process ends, however it ends. A
//! killed process leaves only its folder, with a lock that nobody holds; the next engine with the same path removes it.
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::{Disk, DiskFile};
use crate::error::{DiskError, Error, Result};

const PREFIX: &str = "megatrain-";
const LOCK: &str = "lock";

/// A folder of this engine's own below a path that was asked for.
pub(super) struct Folder {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    /// Open as long as the lock is held.
    _lock: Box<dyn DiskFile>,
}

impl Folder {
    /// Makes one, and removes those that killed processes have left below `parent`.
    ///
    /// # Errors
    /// [`Error::StateFolder`].
    pub(super) fn create(disk: &Arc<dyn Disk>, parent: &Path) -> Result<Self> {
        let failed = |source| Error::StateFolder { path: parent.to_owned(), what: "cannot be written", source };
        for number in 0u64.. {
            let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
            match disk.create_folder(&path) {
                Ok(()) => {}
                Err(DiskError { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(DiskError { source, .. }) => return Err(failed(source)),
            }
            let lock = disk.create(&path.join(LOCK), 0o600).map_err(|DiskError { source, .. }| {
                let _ = disk.remove(&path);
                failed(source)
            })?;
            match is_ours(&path, lock.as_ref()) {
                Ok(true) => {
                    if lock.descriptor().is_some() {
                        remove_leftovers(parent);
                    }
                    return Ok(Self { disk: Arc::clone(disk), path, _lock: lock });
                }
                // Another process, which has the same number in its own container, has taken it for a leftover.
                Ok(false) => {}
                Err(source) => {
                    let _ = disk.remove(&path.join(LOCK));
                    let _ = disk.remove(&path);
                    return Err(failed(source));
                }
            }
        }
        unreachable!("numbers do not end")
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = self.disk.remove(&self.path.join(LOCK));
        let _ = self.disk.remove(&self.path);
    }
}

/// Takes the lock of a folder, and looks whether it is still the folder's: whoever removes leftovers may have taken it for
/// one. On a disk without descriptors, which no other process sees, there is nothing to lock.
fn is_ours(folder: &Path, lock: &dyn DiskFile) -> io::Result<bool> {
    let Some(descriptor) = lock.descriptor() else { return Ok(true) };
    // The copy has the same lock, which ends when both are closed.
    locked(&File::from(descriptor.try_clone_to_owned()?), folder)
}

fn locked(file: &File, folder: &Path) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let named = std::fs::metadata(folder.join(LOCK)).ok().map(|facts| (facts.dev(), facts.ino()));
    let own = file.metadata()?;
    Ok(named == Some((own.dev(), own.ino())))
}

/// Removes what killed processes have left on the system's disk. What cannot be read or removed, another user's say, stays.
fn remove_leftovers(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        if let Ok(lock) = OpenOptions::new().read(true).write(true).open(path.join(LOCK))
            && locked(&lock, &path).unwrap_or(false)
        {
            let _ = std::fs::remove_file(path.join(LOCK));
            let _ = std::fs::remove_dir(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;
    use crate::disk::{DiskResult, RealDisk};

    /// The system's disk, on which no file can be locked, as on some network file systems.
    struct NoLocks;

    /// A descriptor that stands for a path only: a lock of it is an error.
    struct Unlockable(File, PathBuf);

    impl Disk for NoLocks {
        fn create(&self, path: &Path, mode: u32) -> DiskResult<Box<dyn DiskFile>> {
            drop(RealDisk.create(path, mode)?);
            let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
            Ok(Box::new(Unlockable(file, path.to_owned())))
        }

        fn open(&self, path: &Path) -> DiskResult<Box<dyn DiskFile>> {
            RealDisk.open(path)
        }

        fn create_folder(&self, path: &Path) -> DiskResult<()> {
            RealDisk.create_folder(path)
        }

        fn remove(&self, path: &Path) -> DiskResult<()> {
            RealDisk.remove(path)
        }

        fn free_bytes(&self, folder: &Path) -> DiskResult<u64> {
            RealDisk.free_bytes(folder)
        }
    }

    impl DiskFile for Unlockable {
        fn path(&self) -> &Path {
            &self.1
        }

        fn size(&self) -> DiskResult<u64> {
            Ok(0)
        }

        fn read_at(&self, _: u64, _: &mut [u8]) -> DiskResult<usize> {
            Ok(0)
        }

        fn write_at(&self, _: u64, _: &[u8]) -> DiskResult<usize> {
            Ok(0)
        }

        fn set_size(&self, _: u64) -> DiskResult<()> {
            Ok(())
        }

        fn preallocate(&self, _: u64) -> DiskResult<bool> {
            Ok(false)
        }

        fn sync(&self) -> DiskResult<()> {
            Ok(())
        }

        fn forget_pages(&self) {}

        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }
    }

    #[test]
    fn a_lock_that_cannot_be_taken_leaves_no_folder() {
        let parent = std::env::temp_dir().join(format!("megatrain-locks-{}", std::process::id()));
        std::fs::create_dir(&parent).unwrap();
        let disk: Arc<dyn Disk> = Arc::new(NoLocks);
        let error = Folder::create(&disk, &parent).err().unwrap();
        let left = std::fs::read_dir(&parent).unwrap().count();
        std::fs::remove_dir_all(&parent).unwrap();
        assert!(error.to_string().contains(parent.to_str().unwrap()), "{error}");
        assert_eq!(left, 0);
    }
}
