//! State files on real disks: made, given room, and read and written by threads.
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::folder::Folder;
use super::uring::Rings;
use super::{BlockFiles, Direction, EachPiece, Failed, Piece};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::host::span::PAGE;

/// How state files are read and written. The bytes are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateIo {
    /// By io_uring where the system allows it, else by threads.
    #[default]
    Auto,
    /// By threads, each of which reads or writes one block at a time.
    Threads,
}

/// Where state whose home is a disk is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateFiles {
    /// Folders, best on different drives: blocks are dealt to them in turn.
    pub paths: Vec<PathBuf>,
    /// How they are read and written.
    #[serde(default)]
    pub io: StateIo,
}

/// Threads that read or write for one transfer.
const THREADS: usize = 8;

struct Files {
    // Closed before the folders go.
    files: Vec<File>,
    paths: Vec<PathBuf>,
    rings: Option<Rings>,
    note: Option<String>,
    _folders: Vec<Folder>,
}

/// Makes one file in a folder of its own below each path. They have no names any more when this returns, and go when they are
/// closed.
///
/// # Errors
/// [`Error::NoStateFolder`], [`Error::StateFolder`].
pub fn open(wanted: &StateFiles) -> Result<Arc<dyn BlockFiles>> {
    if wanted.paths.is_empty() {
        return Err(Error::NoStateFolder);
    }
    let folders = wanted.paths.iter().map(|path| Folder::create(path)).collect::<Result<Vec<_>>>()?;
    let paths: Vec<PathBuf> = folders.iter().map(|folder| folder.path().join("state")).collect();
    let files = paths.iter().map(|path| create(path)).collect::<Result<Vec<_>>>()?;
    let (rings, note) = match wanted.io {
        StateIo::Threads => (None, None),
        StateIo::Auto => match Rings::new(&files[0]) {
            Ok(rings) => (Some(rings), None),
            Err(error) => {
                let note = format!("io_uring cannot be used ({error}); threads read and write state on disk");
                (None, Some(note))
            }
        },
    };
    Ok(Arc::new(Files { files, paths, rings, note, _folders: folders }))
}

/// A file past the page cache where its file system takes that.
fn create(path: &Path) -> Result<File> {
    let failed = |source| Error::StateFolder { path: path.to_owned(), what: "cannot be made", source };
    if let Ok(file) = unnamed(path, libc::O_DIRECT)
        && takes_blocks(&file).is_ok()
    {
        return Ok(file);
    }
    let file = unnamed(path, 0).map_err(failed)?;
    takes_blocks(&file).map_err(failed)?;
    Ok(file)
}

fn unnamed(path: &Path, flags: i32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).custom_flags(flags).open(path);
    // Some file systems refuse a flag only after they have made the file.
    match std::fs::remove_file(path) {
        Err(error) if file.is_ok() => Err(error),
        _ => file,
    }
}

/// Writes a page and reads it back.
fn takes_blocks(file: &File) -> io::Result<()> {
    let span = HostSpan::map(PAGE).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    span.fill(0x5a);
    file.write_all_at(&span.elements::<u8>(0, PAGE as u64), 0)?;
    span.fill(0);
    file.read_exact_at(&mut span.elements_mut::<u8>(0, PAGE as u64), 0)?;
    let same = span.elements::<u8>(0, PAGE as u64).iter().all(|&byte| byte == 0x5a);
    file.set_len(0)?;
    if same { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

impl BlockFiles for Files {
    fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    fn allocate(&self, file: usize, bytes: u64) -> io::Result<()> {
        let file = &self.files[file];
        file.set_len(bytes)?;
        match allocate(file, bytes) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
                write_zeros(file, bytes)
            }
            other => other,
        }
    }

    fn transfer(
        &self,
        direction: Direction,
        pieces: &[Piece],
        each: &EachPiece<'_>,
    ) -> std::result::Result<(), Failed> {
        match &self.rings {
            Some(rings) => rings.transfer(&self.files, direction, pieces, each),
            None => by_threads(&self.files, direction, pieces, each),
        }
    }

    fn note(&self) -> Option<String> {
        self.note.clone()
    }
}

/// Has the file system promise room for all of a file.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the descriptor is open as long as the file lives, and the call takes no pointer.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes the room that a file system does not promise.
fn write_zeros(file: &File, bytes: u64) -> io::Result<()> {
    let span = HostSpan::map(super::BLOCK_BYTES).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    let zeros = span.elements::<u8>(0, span.len() as u64);
    for start in (0..bytes).step_by(super::BLOCK_BYTES) {
        let len = usize::try_from(bytes - start).map_or(zeros.len(), |left| left.min(zeros.len()));
        file.write_all_at(&zeros[..len], start)?;
    }
    Ok(())
}

fn by_threads(
    files: &[File],
    direction: Direction,
    pieces: &[Piece],
    each: &EachPiece<'_>,
) -> std::result::Result<(), Failed> {
    let (next, stop, failure) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
    let work = || {
        while !stop.load(Ordering::Acquire) {
            let index = next.fetch_add(1, Ordering::AcqRel);
            let Some(piece) = pieces.get(index) else { return };
            let done = match direction {
                Direction::Read => read(files, index, piece).and_then(|()| each(index).map_err(Failed::Piece)),
                Direction::Write => each(index).map_err(Failed::Piece).and_then(|()| write(files, index, piece)),
            };
            if let Err(error) = done {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                stop.store(true, Ordering::Release);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS.min(pieces.len()) {
            // This thread works too, so that one that cannot be started only makes it slower.
            let _ = std::thread::Builder::new().name("megatrain-state".to_owned()).spawn_scoped(scope, work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn read(files: &[File], index: usize, piece: &Piece) -> std::result::Result<(), Failed> {
    let mut out = piece.span.elements_mut::<u8>(0, piece.span.len() as u64);
    let mut done = 0;
    while done < out.len() {
        match files[piece.file].read_at(&mut out[done..], piece.offset + done as u64) {
            Ok(0) => return Err(Failed::Short(index, done)),
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failed::System(index, error)),
        }
    }
    Ok(())
}

fn write(files: &[File], index: usize, piece: &Piece) -> std::result::Result<(), Failed> {
    let bytes = piece.span.elements::<u8>(0, piece.span.len() as u64);
    files[piece.file].write_all_at(&bytes, piece.offset).map_err(|error| Failed::System(index, error))
}
