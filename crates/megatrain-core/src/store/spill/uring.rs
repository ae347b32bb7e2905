//! The same through io_uring: many blocks under way from one thread.
//!
//! A ring is used by one transfer at a time; those that are not in use wait for the next one.
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};

use io_uring::{IoUring, Probe, opcode, types};

use super::files::EachPiece;
use super::{Direction, Failed, Piece};
use crate::disk::DiskFile;
use crate::host::HostSpan;
use crate::host::span::PAGE;

/// Blocks under way at most.
const DEPTH: u32 = 32;

pub(super) struct Rings {
    idle: Mutex<Vec<IoUring>>,
}

impl Rings {
    /// Tries what is going to be used, on `file`, of which nothing is kept.
    ///
    /// # Errors
    /// Those of the system, which may forbid io_uring or be too old for it (Linux 5.6 reads and writes).
    pub(super) fn new(file: &dyn DiskFile) -> io::Result<Self> {
        let ring = IoUring::new(DEPTH)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel is older than 5.6"));
        }
        let rings = Self { idle: Mutex::new(vec![ring]) };
        let span = HostSpan::map(PAGE).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let pieces = [Piece { file: 0, offset: 0, span }];
        let descriptors = [descriptor(file)];
        for direction in [Direction::Write, Direction::Read] {
            rings.run(&descriptors, direction, &pieces, &|_| Ok(())).map_err(|failed| match failed {
                Failed::System(_, error) => error,
                _ => io::ErrorKind::UnexpectedEof.into(),
            })?;
        }
        file.set_size(0).map_err(|error| error.source)?;
        Ok(rings)
    }

    /// Transfers all pieces; see `BlockFiles::transfer`. All files have descriptors.
    pub(super) fn transfer(
        &self,
        files: &[Box<dyn DiskFile>],
        direction: Direction,
        pieces: &[Piece],
        each: &EachPiece<'_>,
    ) -> Result<(), Failed> {
        let descriptors: Vec<RawFd> = files.iter().map(|file| descriptor(file.as_ref())).collect();
        self.run(&descriptors, direction, pieces, each)
    }

    fn run(&self, files: &[RawFd], direction: Direction, pieces: &[Piece], each: &EachPiece<'_>) -> Result<(), Failed> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let ring = kept.map_or_else(|| IoUring::new(DEPTH), Ok).map_err(|error| Failed::System(0, error))?;
        let mut transfer = Transfer { ring, files, direction, pieces, each, moved: vec![0; pieces.len()] };
        match transfer.run() {
            Ok(done) => {
                idle().push(transfer.ring);
                done
            }
            Err(error) => {
                // The kernel may still move bytes, and nothing says when it is done with them: they stay where they are.
                std::mem::forget(transfer.ring);
                pieces.iter().for_each(|piece| std::mem::forget(piece.span.clone()));
                Err(Failed::System(0, error))
            }
        }
    }
}

/// A file's descriptor; one that no file has where it has none, which the kernel refuses.
fn descriptor(file: &dyn DiskFile) -> RawFd {
    file.descriptor().map_or(-1, |descriptor| descriptor.as_raw_fd())
}

struct Transfer<'a> {
    ring: IoUring,
    /// Descriptors, which stay open as long as this lives.
    files: &'a [RawFd],
    direction: Direction,
    pieces: &'a [Piece],
    each: &'a EachPiece<'a>,
    /// Bytes of each piece that are over.
    moved: Vec<usize>,
}

impl Transfer<'_> {
    /// # Errors
    /// The outer one when the ring itself fails, so that pieces may still be under way.
    fn run(&mut self) -> io::Result<Result<(), Failed>> {
        let (mut next, mut under_way, mut failure) = (0, 0, None);
        loop {
            while failure.is_none() && next < self.pieces.len() && under_way < DEPTH as usize {
                let ready = if self.direction == Direction::Write { (self.each)(next) } else { Ok(()) };
                match ready {
                    Ok(()) => {
                        self.push(next);
                        under_way += 1;
                    }
                    Err(error) => failure = Some(Failed::Piece(error)),
                }
                next += 1;
            }
            if under_way == 0 {
                return Ok(failure.map_or(Ok(()), Err));
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                // What was queued stays queued, and is submitted with the next call.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(error) => return Err(error),
            }
            let over: Vec<(usize, i32)> =
                self.ring.completion().map(|entry| (entry.user_data() as usize, entry.result())).collect();
            for (index, result) in over {
                match self.completed(index, result) {
                    Ok(true) => self.push(index),
                    Ok(false) => under_way -= 1,
                    Err(error) => {
                        under_way -= 1;
                        failure.get_or_insert(error);
                    }
                }
            }
        }
    }

    /// What a completion means: whether the rest of the piece has to be asked for again.
    fn completed(&mut self, index: usize, result: i32) -> Result<bool, Failed> {
        let whole = self.pieces[index].span.len();
        match usize::try_from(result) {
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => Ok(true),
            Err(_) => Err(Failed::System(index, io::Error::from_raw_os_error(-result))),
            Ok(0) if self.direction == Direction::Write => Err(Failed::System(index, io::ErrorKind::WriteZero.into())),
            Ok(0) => Err(Failed::Short(index, self.moved[index])),
            Ok(moved) => {
                self.moved[index] += moved;
                if self.moved[index] < whole {
                    return Ok(true);
                }
                if self.direction == Direction::Read {
                    (self.each)(index).map_err(Failed::Piece)?;
                }
                Ok(false)
            }
        }
    }

    /// Queues what is left of a piece.
    fn push(&mut self, index: usize) {
        let Piece { file, offset, span } = &self.pieces[index];
        let done = self.moved[index];
        let file = types::Fd(self.files[*file]);
        let address = span.address().wrapping_add(done);
        let len = u32::try_from(span.len() - done).expect("a block is far smaller");
        let offset = offset + done as u64;
        let entry = match self.direction {
            Direction::Read => opcode::Read::new(file, address, len).offset(offset).build(),
            Direction::Write => opcode::Write::new(file, address, len).offset(offset).build(),
        };
        // SAFETY: the span keeps its memory mapped, and the files stay open, until `run` has seen this piece's completion:
        // it returns only when nothing is under way. Who may touch the bytes meanwhile is the schedule's business, as for
        // a device's copies: whoever asked for the transfer waits for it.
        unsafe { self.ring.submission().push(&entry.user_data(index as u64)) }
            .expect("no more are under way than there are places");
    }
}
