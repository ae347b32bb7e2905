//! State files: made, given room, and read and written block by block.
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::folder::Folder;
use super::uring::Rings;
use super::{Direction, Failed, Piece};
use crate::disk::{Disk, DiskFile};
use crate::error::{DiskError, Error, Result};
use crate::host::HostSpan;

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

/// Where state whose home is a disk is kept, and layer inputs that wait there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateFiles {
    /// Folders, best on different drives: blocks are dealt to them in turn.
    pub paths: Vec<PathBuf>,
    /// How they are read and written.
    #[serde(default)]
    pub io: StateIo,
}

/// Called with the index of each piece: of those that are read once they are there, of those that are written before.
pub(super) type EachPiece<'a> = dyn Fn(usize) -> Result<()> + Sync + 'a;

/// Threads that read or write for one transfer.
const THREADS: usize = 8;

/// Files of blocks. Several threads may transfer at once, but never the same block.
pub struct BlockFiles {
    // Closed before the folders go.
    files: Vec<Box<dyn DiskFile>>,
    rings: Option<Rings>,
    notes: Vec<String>,
    _folders: Vec<Folder>,
}

impl BlockFiles {
    /// Blocks in these files, which are empty and nobody else's.
    pub(super) fn new(files: Vec<Box<dyn DiskFile>>, io: StateIo) -> Self {
        let known = files.iter().all(|file| file.descriptor().is_some());
        let (rings, notes) = match io {
            StateIo::Auto if known => match Rings::new(&files) {
                Ok(rings) => (Some(rings), Vec::new()),
                Err(error) => {
                    let note = format!("io_uring cannot be used ({error}); threads read and write what is on disk");
                    (None, vec![note])
                }
            },
            _ => (None, Vec::new()),
        };
        Self { files, rings, notes, _folders: Vec::new() }
    }

    /// Makes one file, called `name`, in a folder of its own below each path. They have no names any more when this returns,
    /// and go when they are closed.
    ///
    /// # Errors
    /// [`Error::NoStateFolder`], [`Error::StateFolder`].
    pub fn open(disk: &Arc<dyn Disk>, wanted: &StateFiles, name: &str) -> Result<Self> {
        if wanted.paths.is_empty() {
            return Err(Error::NoStateFolder);
        }
        let folders = wanted.paths.iter().map(|path| Folder::create(disk, path)).collect::<Result<Vec<_>>>()?;
        let file = |folder: &Folder| unnamed(disk.as_ref(), &folder.path().join(name));
        let files = folders.iter().map(file).collect::<Result<Vec<_>>>()?;
        Ok(Self { _folders: folders, ..Self::new(files, wanted.io) })
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    /// Where a file was made.
    pub(super) fn path(&self, file: usize) -> PathBuf {
        self.files[file].path().to_owned()
    }

    /// What could not be used, each in a sentence.
    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Gives a file its size, with room on the disk for all of it; a note says where that cannot be reserved. It then reads
    /// as zeros.
    ///
    /// # Errors
    /// [`Error::StateFilesFull`] and [`Error::StateFolder`].
    pub(super) fn allocate(&mut self, file: usize, bytes: u64) -> Result<()> {
        let file = &self.files[file];
        let allocated = file.set_size(0).and_then(|()| file.preallocate(bytes));
        let reserved = allocated.map_err(|DiskError { path, source, .. }| {
            if source.raw_os_error() == Some(libc::ENOSPC) {
                return Error::StateFilesFull { path, needed: bytes };
            }
            Error::StateFolder { path, what: "cannot be given its size", source }
        })?;
        if !reserved {
            self.notes.push(format!(
                "{}: its file system cannot reserve the {bytes} bytes that the plan needs there; should others fill the \
                 disk, training ends",
                file.path().display()
            ));
        }
        Ok(())
    }

    /// Registers buffers with io_uring, instead of those before, where the system grants that: it makes transfers of them
    /// cheaper and changes nothing else.
    pub(super) fn register(&self, buffers: &[HostSpan]) {
        if let Some(rings) = &self.rings {
            rings.register(buffers);
        }
    }

    /// By what blocks are read and written while no transfer is under way: `io_uring with registered buffers`, `io_uring`
    /// or `threads`.
    #[must_use]
    pub fn means(&self) -> &'static str {
        match &self.rings {
            Some(rings) if rings.are_registered() => "io_uring with registered buffers",
            Some(_) => "io_uring",
            None => "threads",
        }
    }

    /// Transfers all pieces, in any order. When it returns, none is under way.
    ///
    /// # Errors
    /// Those of the first piece that failed; the others may have been transferred or not.
    pub(super) fn transfer(
        &self,
        direction: Direction,
        pieces: &[Piece],
        each: &EachPiece<'_>,
    ) -> std::result::Result<(), Failed> {
        match self.rings.as_ref().and_then(Rings::take) {
            Some(ring) => ring.transfer(&self.files, direction, pieces, each),
            None => by_threads(&self.files, direction, pieces, each),
        }
    }
}

fn unnamed(disk: &dyn Disk, path: &Path) -> Result<Box<dyn DiskFile>> {
    let failed =
        |DiskError { path, source, .. }: DiskError| Error::StateFolder { path, what: "cannot be made", source };
    let file = disk.create(path, 0o600).map_err(failed)?;
    disk.remove(path).map_err(failed)?;
    Ok(file)
}

fn by_threads(
    files: &[Box<dyn DiskFile>],
    direction: Direction,
    pieces: &[Piece],
    each: &EachPiece<'_>,
) -> std::result::Result<(), Failed> {
    let (next, stop, failure) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
    let work = || {
        while !stop.load(Ordering::Acquire) {
            let index = next.fetch_add(1, Ordering::AcqRel);
            let Some(piece) = pieces.get(index) else { return };
            let file = files[piece.file].as_ref();
            let done = match direction {
                Direction::Read => read(file, index, piece).and_then(|()| each(index).map_err(Failed::Piece)),
                Direction::Write => each(index).map_err(Failed::Piece).and_then(|()| write(file, index, piece)),
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

fn read(file: &dyn DiskFile, index: usize, piece: &Piece) -> std::result::Result<(), Failed> {
    let mut out = piece.span.elements_mut::<u8>(0, piece.span.len() as u64);
    file.read_exact_at(piece.offset, &mut out).map_err(|error| match error.source.kind() {
        io::ErrorKind::UnexpectedEof => Failed::Short(index, piece.span.len() - error.bytes as usize),
        _ => Failed::System(index, error.source),
    })
}

fn write(file: &dyn DiskFile, index: usize, piece: &Piece) -> std::result::Result<(), Failed> {
    let bytes = piece.span.elements::<u8>(0, piece.span.len() as u64);
    file.write_all_at(piece.offset, &bytes).map_err(|error| Failed::System(index, error.source))
}
