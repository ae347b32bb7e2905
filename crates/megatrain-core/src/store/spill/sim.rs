//! State files in memory that fail when they are asked to.
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::{BlockFiles, Direction, EachPiece, Failed, Piece};

/// What goes wrong with a block, or when a file is given its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The system answers this error number.
    System(i32),
    /// The file ends in the middle of the block. A write fails as on a full disk.
    Short,
    /// One bit is another one than was written, and nothing says so.
    Flip,
}

/// The files. Cheap to clone; clones are the same files.
#[derive(Clone)]
pub struct SimStateFiles {
    paths: Arc<Vec<PathBuf>>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    files: Vec<Vec<u8>>,
    calls: u64,
    read: u64,
    written: u64,
    fault: Option<(u64, Fault)>,
}

impl SimStateFiles {
    /// So many empty files.
    #[must_use]
    pub fn new(files: usize) -> Self {
        let state = State { files: vec![Vec::new(); files], ..State::default() };
        let paths = (0..files).map(|file| PathBuf::from(format!("simulated-{file}"))).collect();
        Self { paths: Arc::new(paths), state: Arc::new(Mutex::new(state)) }
    }

    /// The same files, of which call `nth` (counted from 1: each block that is transferred, each file that is given its size)
    /// goes wrong.
    #[must_use]
    pub fn failing(self, nth: u64, fault: Fault) -> Self {
        self.lock().fault = Some((nth, fault));
        self
    }

    /// Calls so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Bytes read and written so far.
    #[must_use]
    pub fn moved(&self) -> (u64, u64) {
        let state = self.lock();
        (state.read, state.written)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn piece(&self, direction: Direction, index: usize, piece: &Piece) -> Result<(), Failed> {
        let mut state = self.lock();
        let fault = state.call();
        let start = usize::try_from(piece.offset).expect("a small file");
        let len = piece.span.len();
        let end = state.files[piece.file].len();
        let got = if fault == Some(Fault::Short) { len / 2 } else { end.saturating_sub(start).min(len) };
        if let Some(Fault::System(number)) = fault {
            return Err(Failed::System(index, io::Error::from_raw_os_error(number)));
        }
        if got < len {
            return Err(match direction {
                Direction::Read => Failed::Short(index, got),
                Direction::Write => Failed::System(index, io::Error::from_raw_os_error(libc::ENOSPC)),
            });
        }
        let flipped = u8::from(fault == Some(Fault::Flip)) << 3;
        let stored = &mut state.files[piece.file][start..start + len];
        match direction {
            Direction::Read => {
                let mut out = piece.span.elements_mut::<u8>(0, len as u64);
                out.copy_from_slice(stored);
                out[len / 3] ^= flipped;
                state.read += len as u64;
            }
            Direction::Write => {
                piece.span.copy_to(stored);
                stored[len / 3] ^= flipped;
                state.written += len as u64;
            }
        }
        Ok(())
    }
}

impl State {
    /// Counts a call; what goes wrong with it.
    fn call(&mut self) -> Option<Fault> {
        self.calls += 1;
        self.fault.filter(|&(nth, _)| nth == self.calls).map(|(_, fault)| fault)
    }
}

impl BlockFiles for SimStateFiles {
    fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    fn allocate(&self, file: usize, bytes: u64) -> io::Result<()> {
        let mut state = self.lock();
        match state.call() {
            Some(Fault::System(number)) => return Err(io::Error::from_raw_os_error(number)),
            Some(Fault::Short) => return Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            Some(Fault::Flip) | None => {}
        }
        state.files[file] = vec![0; usize::try_from(bytes).expect("a small file")];
        Ok(())
    }

    fn transfer(&self, direction: Direction, pieces: &[Piece], each: &EachPiece<'_>) -> Result<(), Failed> {
        for (index, piece) in pieces.iter().enumerate() {
            if direction == Direction::Write {
                each(index).map_err(Failed::Piece)?;
            }
            self.piece(direction, index, piece)?;
            if direction == Direction::Read {
                each(index).map_err(Failed::Piece)?;
            }
        }
        Ok(())
    }
}
