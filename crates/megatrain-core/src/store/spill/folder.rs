//! The folders that hold state files: one for each engine, locked, gone with it.
//!
//! The files in it have no names: they are unlinked while they are open, so that nothing is left behind when the process is
//! killed but a folder with a lock that nobody holds. The next engine that is given the same path removes it.
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

const PREFIX: &str = "megatrain-";
const LOCK: &str = "lock";

/// A folder of this engine's own below a path that was asked for.
pub(super) struct Folder {
    path: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

impl Folder {
    /// Makes one, after those that killed processes have left below `parent` were removed.
    ///
    /// # Errors
    /// [`Error::StateFolder`].
    pub(super) fn create(parent: &Path) -> Result<Self> {
        let failed =
            |what: &'static str| move |source: io::Error| Error::StateFolder { path: parent.to_owned(), what, source };
        remove_leftovers(parent).map_err(failed("cannot be read"))?;
        for number in 0u64.. {
            let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(failed("cannot be written")(error)),
            }
            let lock = lock_file(&path, true).map_err(failed("cannot be written"))?;
            // Whoever was removing leftovers may have taken it between these two lines.
            if let Some(lock) = lock {
                return Ok(Self { path, _lock: lock });
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
        let _ = remove(&self.path);
    }
}

/// The lock of a folder, taken; `None` where somebody else holds it or has removed it.
fn lock_file(folder: &Path, create: bool) -> io::Result<Option<File>> {
    let path = folder.join(LOCK);
    let file = match OpenOptions::new().read(true).write(true).create(create).truncate(false).mode(0o600).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => return Ok(None),
        Err(std::fs::TryLockError::Error(error)) => return Err(error),
    }
    let named = std::fs::metadata(&path).ok().map(|facts| (facts.dev(), facts.ino()));
    let own = file.metadata()?;
    Ok((named == Some((own.dev(), own.ino()))).then_some(file))
}

fn remove_leftovers(parent: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(parent)?.flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        // What belongs to another user, or goes meanwhile, is not ours to remove.
        if ours && let Ok(Some(lock)) = lock_file(&path, false) {
            let _ = remove(&path);
            drop(lock);
        }
    }
    Ok(())
}

/// Removes a folder whose lock is held. Anything else in it stays, and so does the folder.
fn remove(folder: &Path) -> io::Result<()> {
    std::fs::remove_file(folder.join(LOCK))?;
    std::fs::remove_dir(folder)
}
