//! The same through io_uring: many blocks under way from one thread.
//!
//! A ring is used by one transfer at a time; those that are not in use wait for the next one. All are made at the start: in the
//! middle of a step the system might refuse one.
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use io_uring::{IoUring, Probe, opcode, types};

use super::files::EachPiece;
use super::{Direction, Failed, Piece};
use crate::disk::DiskFile;
use crate::host::HostSpan;
use crate::host::span::PAGE;

/// Blocks under way at most.
const DEPTH: u32 = 32;
/// Transfers at a time: of the lane that reads state, of the one that writes it, and of callers and saves, who take turns.
const TRANSFERS: usize = 3;

pub(super) struct Rings {
    idle: Mutex<Vec<IoUring>>,
}

impl Rings {
    /// Makes all that are ever used, and tries what they are used for on each file, of which nothing is kept.
    ///
    /// # Errors
    /// Those of the system, which may forbid io_uring or be too old for it (Linux 5.6 reads and writes).
    pub(super) fn new(files: &[Box<dyn DiskFile>]) -> io::Result<Self> {
        let made = (0..TRANSFERS).map(|_| IoUring::new(DEPTH)).collect::<io::Result<Vec<_>>>()?;
        let mut probe = Probe::new();
        made[0].submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel is older than 5.6"));
        }
        let rings = Self { idle: Mutex::new(made) };
        let span = HostSpan::map(PAGE).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        for (index, file) in files.iter().enumerate() {
            let pieces = [Piece { file: index, offset: 0, span: span.clone() }];
            for direction in [Direction::Write, Direction::Read] {
                let ring = rings.take().expect("each is given back before the next one is taken");
                ring.transfer(files, direction, &pieces, &|_| Ok(())).map_err(|failed| match failed {
                    Failed::System(_, error) => error,
                    _ => io::ErrorKind::UnexpectedEof.into(),
                })?;
            }
            file.set_size(0).map_err(|error| error.source)?;
        }
        Ok(rings)
    }

    /// One for a transfer; `None` while there are more transfers than rings.
    pub(super) fn take(&self) -> Option<Ring<'_>> {
        let uring = self.idle().pop()?;
        Some(Ring { rings: self, uring })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<IoUring>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ring that is nobody else's.
pub(super) struct Ring<'a> {
    rings: &'a Rings,
    uring: IoUring,
}

impl Ring<'_> {
    /// Transfers all pieces; see `BlockFiles::transfer`. All files have descriptors.
    pub(super) fn transfer(
        self,
        files: &[Box<dyn DiskFile>],
        direction: Direction,
        pieces: &[Piece],
        each: &EachPiece<'_>,
    ) -> Result<(), Failed> {
        let files = files.iter().map(|file| descriptor(file.as_ref())).collect();
        let (uring, moved) = (Some(self.uring), vec![0; pieces.len()]);
        Transfer { rings: self.rings, uring, files, direction, pieces, each, moved, under_way: 0 }.run()
    }
}

/// A file's descriptor; one that no file has where it has none, which the kernel refuses.
fn descriptor(file: &dyn DiskFile) -> RawFd {
    file.descriptor().map_or(-1, |descriptor| descriptor.as_raw_fd())
}

struct Transfer<'a> {
    rings: &'a Rings,
    /// Until this is dropped.
    uring: Option<IoUring>,
    /// Descriptors, which stay open as long as this lives.
    files: Vec<RawFd>,
    direction: Direction,
    pieces: &'a [Piece],
    each: &'a EachPiece<'a>,
    /// Bytes of each piece that are over.
    moved: Vec<usize>,
    /// Pieces that were queued and whose completion has not been seen.
    under_way: usize,
}

impl Drop for Transfer<'_> {
    /// Gives the ring back. Where the ring has failed or `each` has panicked while pieces are under way, the kernel may still
    /// move bytes, and nothing says when it is done with them: ring and memory then stay where they are for good.
    fn drop(&mut self) {
        if self.under_way == 0 {
            self.rings.idle().extend(self.uring.take());
        } else {
            std::mem::forget(self.uring.take());
            self.pieces.iter().for_each(|piece| std::mem::forget(piece.span.clone()));
        }
    }
}

impl Transfer<'_> {
    fn uring(&mut self) -> &mut IoUring {
        self.uring.as_mut().expect("there until this is dropped")
    }

    fn run(mut self) -> Result<(), Failed> {
        let (mut next, mut failure) = (0, None);
        loop {
            while failure.is_none() && next < self.pieces.len() && self.under_way < DEPTH as usize {
                let ready = if self.direction == Direction::Write { (self.each)(next) } else { Ok(()) };
                match ready {
                    Ok(()) => {
                        self.under_way += 1;
                        self.push(next);
                    }
                    Err(error) => failure = Some(Failed::Piece(error)),
                }
                next += 1;
            }
            if self.under_way == 0 {
                return failure.map_or(Ok(()), Err);
            }
            match self.uring().submit_and_wait(1) {
                Ok(_) => {}
                // What was queued stays queued, and is submitted with the next call.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(error) => return Err(Failed::System(0, error)),
            }
            let over: Vec<(usize, i32)> =
                self.uring().completion().map(|entry| (entry.user_data() as usize, entry.result())).collect();
            for (index, result) in over {
                match self.completed(index, result) {
                    Ok(true) => self.push(index),
                    Ok(false) => self.under_way -= 1,
                    Err(error) => {
                        self.under_way -= 1;
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
        // SAFETY: the span keeps its memory mapped, and the files stay open, until this piece's completion has been seen: `run`
        // returns when nothing is under way, and where it fails or unwinds before, `drop` keeps ring and memory for good
        // (the kernel holds on to the files of what it was given). Who may touch the bytes meanwhile is the schedule's
        // business, as for a device's copies: whoever asked for the transfer waits for it.
        unsafe { self.uring().submission().push(&entry.user_data(index as u64)) }
            .expect("no more are under way than there are places");
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::Path;

    use super::super::{BLOCK_BYTES, BlockFiles, StateIo};
    use super::*;
    use crate::disk::{Disk, RealDisk};

    fn file(name: &str) -> Box<dyn DiskFile> {
        let path = std::env::temp_dir().join(format!("megatrain-uring-{}-{name}", std::process::id()));
        let file = RealDisk.create(&path, 0o600).unwrap();
        RealDisk.remove(&path).unwrap();
        file
    }

    /// Rings for a file; `None` where the system forbids them.
    fn rings(files: &[Box<dyn DiskFile>]) -> Option<Rings> {
        Rings::new(files).inspect_err(|error| eprintln!("skipped: no io_uring: {error}")).ok()
    }

    #[test]
    fn every_file_is_tried_and_threads_are_used_where_one_refuses() {
        if rings(&[file("tried")]).is_none() {
            return;
        }
        let full = RealDisk.open(Path::new("/dev/full")).unwrap();
        let files = BlockFiles::new(vec![file("one"), full], StateIo::Auto);
        let [note] = files.notes() else { panic!("{:?}", files.notes()) };
        assert!(note.contains("io_uring cannot be used (No space left on device"), "{note}");
    }

    #[test]
    fn rings_are_made_once_and_used_again() {
        let files = [file("again")];
        let Some(rings) = rings(&files) else { return };
        let taken: Vec<_> = std::iter::from_fn(|| rings.take()).collect();
        assert_eq!(taken.len(), TRANSFERS);
        let pieces = [Piece { file: 0, offset: 0, span: HostSpan::map(BLOCK_BYTES).unwrap() }];
        for ring in taken {
            ring.transfer(&files, Direction::Write, &pieces, &|_| Ok(())).unwrap();
        }
        assert_eq!(rings.idle().len(), TRANSFERS);
    }

    #[test]
    fn a_file_that_ends_before_or_is_full_fails_with_its_piece_and_the_ring_goes_on() {
        let files = [file("cut"), RealDisk.open(Path::new("/dev/full")).unwrap()];
        let Some(rings) = rings(&files[..1]) else { return };
        let count = 4;
        let span = HostSpan::map(count * BLOCK_BYTES).unwrap();
        let pieces = |file: usize| -> Vec<Piece> {
            let span = |i| span.slice(i * BLOCK_BYTES, BLOCK_BYTES);
            (0..count).map(|i| Piece { file, offset: (i * BLOCK_BYTES) as u64, span: span(i) }).collect()
        };
        let by = |direction, file: usize, each: &EachPiece<'_>| {
            rings.take().unwrap().transfer(&files, direction, &pieces(file), each)
        };
        span.elements_mut::<u8>(0, span.len() as u64).fill(7);
        by(Direction::Write, 0, &|_| Ok(())).unwrap();

        // The third piece is cut in its middle, where a page of the file begins, and the fourth is gone.
        files[0].set_size((5 * BLOCK_BYTES / 2) as u64).unwrap();
        span.elements_mut::<u8>(0, span.len() as u64).fill(0);
        let whole = Mutex::new(Vec::new());
        let note = |index: usize| {
            whole.lock().unwrap().push(index);
            Ok(())
        };
        match by(Direction::Read, 0, &note) {
            Err(Failed::Short(2, read)) => assert_eq!(read, BLOCK_BYTES / 2),
            Err(Failed::Short(3, read)) => assert_eq!(read, 0),
            other => panic!("{:?}", other.map_err(|_| "another failure")),
        }
        let mut whole = whole.into_inner().unwrap();
        whole.sort_unstable();
        assert_eq!(whole, [0, 1], "a piece of which bytes are missing is never handed on");
        assert!(span.elements::<u8>(0, 2 * BLOCK_BYTES as u64).iter().all(|&byte| byte == 7));

        let Err(Failed::System(_, error)) = by(Direction::Write, 1, &|_| Ok(())) else { panic!("/dev/full is full") };
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));

        by(Direction::Write, 0, &|_| Ok(())).unwrap();
        by(Direction::Read, 0, &|_| Ok(())).unwrap();
        assert_eq!(rings.idle().len(), TRANSFERS, "no ring was lost");
    }

    #[test]
    fn memory_stays_mapped_when_pieces_are_under_way_as_a_callback_panics() {
        let files = [file("panics")];
        let Some(rings) = rings(&files) else { return };
        for direction in [Direction::Write, Direction::Read] {
            let count = 8;
            let span = HostSpan::map(count * BLOCK_BYTES).unwrap();
            let piece = |i: usize| Piece {
                file: 0,
                offset: (i * BLOCK_BYTES) as u64,
                span: span.slice(i * BLOCK_BYTES, BLOCK_BYTES),
            };
            let pieces: Vec<Piece> = (0..count).map(piece).collect();
            let by = |each: &EachPiece<'_>| rings.take().unwrap().transfer(&files, direction, &pieces, each);
            by(&|_| Ok(())).unwrap();
            let idle = rings.idle().len();
            // When it is written, pieces before the third are queued; when it is read, all are.
            let panics = |index: usize| if index == 3 { panic!("a callback") } else { Ok(()) };
            catch_unwind(AssertUnwindSafe(|| by(&panics))).unwrap_err();
            assert_eq!(rings.idle().len(), idle - 1, "{direction:?}: the ring is not used again");
            let address = span.address() as usize;
            drop((pieces, span));
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let mapped = maps.lines().any(|line| {
                let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
                let [from, to] = [from, to].map(|end| usize::from_str_radix(end, 16).unwrap());
                (from..to).contains(&address)
            });
            assert!(mapped, "{direction:?}");
        }
    }
}
