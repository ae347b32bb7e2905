//! The same through io_uring: many blocks under way from one thread.
//!
//! A ring is used by one transfer at a time; those that are not in use wait for the next one. All are made at the start: in the
//! middle of a step the system might refuse one.
//!
//! The buffers that state passes through are registered with the rings where the system grants it: their pages are then pinned
//! once, not looked up and pinned again for each block. What is not registered is transferred as well.
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
/// The largest buffer that the kernel registers; of larger ones, so many bytes at a time.
const REGISTERED_BYTES: usize = 1 << 30;

pub(super) struct Rings {
    idle: Mutex<Idle>,
    /// Whether all files take registered buffers.
    take_registered: bool,
}

/// Rings that no transfer uses.
struct Idle {
    rings: Vec<Uring>,
    /// Number of the set of buffers that was to be registered last.
    set: u64,
}

/// A ring and the buffers that are registered with it.
struct Uring {
    // Before the memory, which the kernel reaches until then.
    ring: IoUring,
    /// By their index. They stay mapped as long as the kernel knows their pages: at the same addresses, other memory would not be
    /// what it transfers.
    buffers: Vec<HostSpan>,
    set: u64,
}

impl Uring {
    /// Registers buffers instead of those before.
    ///
    /// # Errors
    /// Those of the system, of which one means that locked memory is limited (`RLIMIT_MEMLOCK`). None is registered then.
    fn register(&mut self, buffers: &[HostSpan], set: u64) -> io::Result<()> {
        if !self.buffers.is_empty() {
            self.ring.submitter().unregister_buffers()?;
            self.buffers.clear();
        }
        self.set = set;
        if buffers.is_empty() {
            return Ok(());
        }
        for buffer in buffers {
            // Kernels before 5.12 would let a child of a fork have the pinned pages, and give others to us.
            buffer.advise(libc::MADV_DONTFORK)?;
        }
        let vectors: Vec<libc::iovec> = buffers
            .iter()
            .map(|buffer| libc::iovec { iov_base: buffer.address().cast(), iov_len: buffer.len() })
            .collect();
        // SAFETY: the memory is mapped, and stays so until it is unregistered above or the ring is gone.
        unsafe { self.ring.submitter().register_buffers(&vectors) }?;
        self.buffers = buffers.to_vec();
        Ok(())
    }

    /// The index of the registered buffer that holds all of these bytes.
    fn index(&self, span: &HostSpan) -> Option<u16> {
        let index = self.buffers.iter().position(|buffer| buffer.contains(span))?;
        u16::try_from(index).ok()
    }
}

impl Drop for Uring {
    /// The kernel takes a ring apart in its own time, and would keep the pages until then.
    fn drop(&mut self) {
        let _ = self.register(&[], self.set);
    }
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
        let rings = made.into_iter().map(|ring| Uring { ring, buffers: Vec::new(), set: 0 }).collect();
        let mut rings = Self { idle: Mutex::new(Idle { rings, set: 0 }), take_registered: true };
        let span = HostSpan::map(PAGE).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        rings.try_out(files, &span)?;
        // Not every file system that takes the one takes the other.
        rings.register(std::slice::from_ref(&span));
        rings.take_registered = rings.are_registered() && rings.try_out(files, &span).is_ok();
        rings.register(&[]);
        Ok(rings)
    }

    /// Writes and reads the beginning of each file, of which nothing is kept.
    fn try_out(&self, files: &[Box<dyn DiskFile>], span: &HostSpan) -> io::Result<()> {
        for (index, file) in files.iter().enumerate() {
            let pieces = [Piece { file: index, offset: 0, span: span.clone() }];
            for direction in [Direction::Write, Direction::Read] {
                let ring = self.take().expect("each is given back before the next one is taken");
                ring.transfer(files, direction, &pieces, &|_| Ok(())).map_err(|failed| match failed {
                    Failed::System(_, error) => error,
                    _ => io::ErrorKind::UnexpectedEof.into(),
                })?;
            }
            file.set_size(0).map_err(|error| error.source)?;
        }
        Ok(())
    }

    /// Registers buffers with all rings, instead of those before, as far as the system grants it. A ring that is in use just
    /// now has none afterwards.
    pub(super) fn register(&self, buffers: &[HostSpan]) {
        let buffers: Vec<HostSpan> = buffers.iter().filter(|_| self.take_registered).flat_map(portions).collect();
        let mut idle = self.idle();
        idle.set += 1;
        let set = idle.set;
        // One that cannot be rid of the buffers it has would keep their memory.
        idle.rings.retain_mut(|ring| ring.register(&buffers, set).is_ok() || ring.buffers.is_empty());
    }

    /// Whether every ring that no transfer uses has registered buffers.
    pub(super) fn are_registered(&self) -> bool {
        let idle = self.idle();
        !idle.rings.is_empty() && idle.rings.iter().all(|ring| !ring.buffers.is_empty())
    }

    /// One for a transfer; `None` while there are more transfers than rings.
    pub(super) fn take(&self) -> Option<Ring<'_>> {
        let uring = self.idle().rings.pop()?;
        Some(Ring { rings: self, uring })
    }

    /// Takes one back, without what another set of buffers has replaced meanwhile.
    fn give_back(&self, mut uring: Uring) {
        let mut idle = self.idle();
        let set = idle.set;
        if uring.set == set || uring.register(&[], set).is_ok() {
            idle.rings.push(uring);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer in portions that the kernel registers. A block that is in two of them is transferred as if neither were.
fn portions(buffer: &HostSpan) -> impl Iterator<Item = HostSpan> + '_ {
    let starts = (0..buffer.len()).step_by(REGISTERED_BYTES);
    starts.map(|start| buffer.slice(start, REGISTERED_BYTES.min(buffer.len() - start)))
}

/// A ring that is nobody else's.
pub(super) struct Ring<'a> {
    rings: &'a Rings,
    uring: Uring,
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
    uring: Option<Uring>,
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
            self.uring.take().into_iter().for_each(|uring| self.rings.give_back(uring));
        } else {
            std::mem::forget(self.uring.take());
            self.pieces.iter().for_each(|piece| std::mem::forget(piece.span.clone()));
        }
    }
}

impl Transfer<'_> {
    fn uring(&mut self) -> &mut Uring {
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
            match self.uring().ring.submit_and_wait(1) {
                Ok(_) => {}
                // What was queued stays queued, and is submitted with the next call.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(error) => return Err(Failed::System(0, error)),
            }
            let over: Vec<(usize, i32)> =
                self.uring().ring.completion().map(|entry| (entry.user_data() as usize, entry.result())).collect();
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
        let buffer = self.uring.as_ref().and_then(|uring| uring.index(span));
        let done = self.moved[index];
        let file = types::Fd(self.files[*file]);
        let address = span.address().wrapping_add(done);
        let len = u32::try_from(span.len() - done).expect("a block is far smaller");
        let offset = offset + done as u64;
        let entry = match (self.direction, buffer) {
            (Direction::Read, None) => opcode::Read::new(file, address, len).offset(offset).build(),
            (Direction::Write, None) => opcode::Write::new(file, address, len).offset(offset).build(),
            (Direction::Read, Some(buffer)) => {
                opcode::ReadFixed::new(file, address, len, buffer).offset(offset).build()
            }
            (Direction::Write, Some(buffer)) => {
                opcode::WriteFixed::new(file, address, len, buffer).offset(offset).build()
            }
        };
        // SAFETY: the span keeps its memory mapped, and the files stay open, until this piece's completion has been seen: `run`
        // returns when nothing is under way, and where it fails or unwinds before, `drop` keeps ring and memory for good
        // (the kernel holds on to the files of what it was given). Who may touch the bytes meanwhile is the schedule's
        // business, as for a device's copies: whoever asked for the transfer waits for it.
        unsafe { self.uring().ring.submission().push(&entry.user_data(index as u64)) }
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
        assert_eq!(rings.idle().rings.len(), TRANSFERS);
    }

    /// Pieces of one block each, from the beginning of a file.
    fn pieces_of(span: &HostSpan, file: usize) -> Vec<Piece> {
        let block =
            |i: usize| Piece { file, offset: (i * BLOCK_BYTES) as u64, span: span.slice(i * BLOCK_BYTES, BLOCK_BYTES) };
        (0..span.len() / BLOCK_BYTES).map(block).collect()
    }

    fn fill(span: &HostSpan, seed: u64) {
        let mut state = seed;
        span.elements_mut::<u64>(0, (span.len() / 8) as u64).fill_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state
        });
    }

    /// Registers buffers; false where the system does not grant it.
    fn registered(rings: &Rings, buffers: &[HostSpan]) -> bool {
        rings.register(buffers);
        if !rings.are_registered() {
            eprintln!("skipped: {} buffers may not be registered", buffers.len());
        }
        rings.are_registered()
    }

    fn is_mapped(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [from, to] = [from, to].map(|end| usize::from_str_radix(end, 16).unwrap());
            (from..to).contains(&address)
        })
    }

    #[test]
    fn registered_buffers_hold_the_same_bytes_as_others_wherever_blocks_are_in_them() {
        let files = [file("same")];
        let Some(rings) = rings(&files) else { return };
        let (from, to) = (HostSpan::map(12 * BLOCK_BYTES).unwrap(), HostSpan::map(12 * BLOCK_BYTES).unwrap());
        let bytes = |span: &HostSpan| span.elements::<u8>(0, span.len() as u64).to_vec();
        // None; all; the first and the second half of each, so that a block is in neither; and some that begin inside a block.
        let halves = |span: &HostSpan| {
            let cut = 5 * BLOCK_BYTES + BLOCK_BYTES / 2;
            vec![span.slice(0, cut), span.slice(cut, span.len() - cut)]
        };
        let some =
            |span: &HostSpan| vec![span.slice(PAGE, 3 * BLOCK_BYTES), span.slice(9 * BLOCK_BYTES, 2 * BLOCK_BYTES)];
        let sets = [
            Vec::new(),
            vec![from.clone(), to.clone()],
            [halves(&to), halves(&from)].concat(),
            [some(&from), some(&to)].concat(),
        ];
        for (seed, buffers) in sets.iter().enumerate() {
            if !registered(&rings, buffers) && !buffers.is_empty() {
                return;
            }
            fill(&from, seed as u64);
            to.fill(0);
            // Twice, in the other order the second time: the rings that were used first have none or others by then.
            for again in [false, true] {
                let (one, other) = if again { (&to, &from) } else { (&from, &to) };
                let expected = bytes(one);
                rings.take().unwrap().transfer(&files, Direction::Write, &pieces_of(one, 0), &|_| Ok(())).unwrap();
                other.fill(0);
                rings.take().unwrap().transfer(&files, Direction::Read, &pieces_of(other, 0), &|_| Ok(())).unwrap();
                assert!(bytes(other) == expected, "set {seed}");
            }
        }
    }

    #[test]
    fn buffers_are_kept_until_others_are_named_also_by_a_ring_that_is_in_use_meanwhile() {
        let files = [file("kept")];
        let Some(rings) = rings(&files) else { return };
        let [first, second] = [1, 2].map(|_| HostSpan::map(4 * BLOCK_BYTES).unwrap());
        let handles = || [first.handles(), second.handles()];
        assert_eq!(handles(), [1, 1]);
        if !registered(&rings, std::slice::from_ref(&first)) {
            return;
        }
        assert_eq!(
            handles(),
            [1 + TRANSFERS, 1],
            "its addresses are not anybody else's while the kernel knows its pages"
        );
        let in_use = rings.take().unwrap();
        rings.register(std::slice::from_ref(&second));
        assert_eq!(handles(), [2, TRANSFERS], "one ring is in use");
        let mut pieces = pieces_of(&first, 0);
        in_use.transfer(&files, Direction::Write, &pieces, &|_| Ok(())).unwrap();
        pieces.clear();
        assert_eq!(handles(), [1, TRANSFERS], "it has given the first one back, and is without the second");
        assert!(rings.idle().rings.len() == TRANSFERS && !rings.are_registered());
        rings.register(std::slice::from_ref(&second));
        assert_eq!(handles(), [1, 1 + TRANSFERS]);
        rings.register(&[]);
        assert_eq!(handles(), [1, 1]);
        rings.register(std::slice::from_ref(&second));
        drop(rings);
        assert_eq!(handles(), [1, 1]);
    }

    #[test]
    fn what_the_system_refuses_to_register_is_transferred_as_before() {
        let files = [file("refused")];
        let Some(rings) = rings(&files) else { return };
        let span = HostSpan::map(4 * BLOCK_BYTES).unwrap();
        // More than a kernel takes.
        let many = vec![span.slice(0, PAGE); 1 << 15];
        for buffers in [&many[..], std::slice::from_ref(&span), &many] {
            assert!(!registered(&rings, buffers) || buffers.len() == 1, "no kernel grants that");
            assert_eq!(rings.idle().rings.len(), TRANSFERS);
            fill(&span, 3);
            let expected = span.elements::<u8>(0, span.len() as u64).to_vec();
            rings.take().unwrap().transfer(&files, Direction::Write, &pieces_of(&span, 0), &|_| Ok(())).unwrap();
            span.fill(0);
            rings.take().unwrap().transfer(&files, Direction::Read, &pieces_of(&span, 0), &|_| Ok(())).unwrap();
            assert!(*span.elements::<u8>(0, span.len() as u64) == *expected);
        }
    }

    #[test]
    fn buffers_larger_than_the_kernel_takes_are_registered_in_portions() {
        let span = HostSpan::reserve(2 * REGISTERED_BYTES + 3 * PAGE).unwrap();
        let lengths: Vec<usize> = portions(&span).map(|portion| portion.len()).collect();
        assert_eq!(lengths, [REGISTERED_BYTES, REGISTERED_BYTES, 3 * PAGE]);
        assert!(
            portions(&span).zip(0..).all(|(p, i)| p.address() == span.address().wrapping_add(i * REGISTERED_BYTES))
        );
        assert_eq!(portions(&span.slice(0, 0)).count(), 0);
    }

    #[test]
    fn a_file_that_ends_before_or_is_full_fails_with_its_piece_and_the_ring_goes_on() {
        [false, true].into_iter().for_each(ends_before_or_is_full);
    }

    fn ends_before_or_is_full(with_registered: bool) {
        let files = [file("cut"), RealDisk.open(Path::new("/dev/full")).unwrap()];
        let Some(rings) = rings(&files[..1]) else { return };
        let span = HostSpan::map(4 * BLOCK_BYTES).unwrap();
        if with_registered && !registered(&rings, std::slice::from_ref(&span)) {
            return;
        }
        let by = |direction, file: usize, each: &EachPiece<'_>| {
            rings.take().unwrap().transfer(&files, direction, &pieces_of(&span, file), each)
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
        assert_eq!(rings.idle().rings.len(), TRANSFERS, "no ring was lost");
    }

    #[test]
    fn memory_stays_mapped_when_pieces_are_under_way_as_a_callback_panics() {
        let files = [file("panics")];
        let Some(rings) = rings(&files) else { return };
        for (direction, with_registered) in [(Direction::Write, false), (Direction::Read, true)] {
            let span = HostSpan::map(8 * BLOCK_BYTES).unwrap();
            if with_registered && !registered(&rings, std::slice::from_ref(&span)) {
                return;
            }
            let pieces = pieces_of(&span, 0);
            let by = |each: &EachPiece<'_>| rings.take().unwrap().transfer(&files, direction, &pieces, each);
            by(&|_| Ok(())).unwrap();
            let idle = rings.idle().rings.len();
            // When it is written, pieces before the third are queued; when it is read, all are.
            let panics = |index: usize| if index == 3 { panic!("a callback") } else { Ok(()) };
            catch_unwind(AssertUnwindSafe(|| by(&panics))).unwrap_err();
            assert_eq!(rings.idle().rings.len(), idle - 1, "{direction:?}: the ring is not used again");
            let address = span.address() as usize;
            drop((pieces, span));
            rings.register(&[]);
            assert!(is_mapped(address), "{direction:?}");
        }
    }
}
