//! How fast disks take state: measured with the transfers that a step makes.
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{BLOCK_BYTES, BlockFiles, Direction, Failed, Piece, StateFiles, StateIo};
use crate::disk::{Disk, RealDisk};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::store::arena::{Arena, ArenaOptions};

/// Blocks of one transfer: about those of a part of a large unit.
const BLOCKS: usize = 64;
const TRANSFER_BYTES: usize = BLOCKS * BLOCK_BYTES;
/// How long both directions are measured at least: drives take the first moments into memory of their own.
const LEAST: Duration = Duration::from_secs(2);

/// What disks can do as places for state.
#[derive(Clone, Copy, Debug)]
pub struct StateRates {
    /// Bytes read in a second, while others are written.
    pub read: f64,
    /// Bytes written in a second, over others that were there before, while those are read.
    pub written: f64,
    /// By what they were read and written: [`BlockFiles::means`].
    pub means: &'static str,
}

/// Reads and writes at once, in files of `bytes` bytes altogether in these folders.
///
/// # Errors
/// As for [`BlockFiles::open`], and [`Error::StateFilesFull`] and [`Error::StateFolder`].
pub fn measure(paths: Vec<PathBuf>, bytes: u64) -> Result<StateRates> {
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let mut files = BlockFiles::open(&disk, &StateFiles { paths, io: StateIo::Auto }, "state")?;
    let count = files.count();
    let blocks = usize::try_from(bytes).unwrap_or(usize::MAX) / BLOCK_BYTES;
    // As many transfers for reading as for writing, each of whole transfers.
    let half = (blocks / 2).next_multiple_of(BLOCKS).max(BLOCKS);
    for file in 0..count {
        let bytes = ((2 * half).div_ceil(count) * BLOCK_BYTES) as u64;
        files.allocate(file, bytes)?;
    }
    // In huge pages where the system has them, as an engine's.
    let memory = Arena::new(2 * TRANSFER_BYTES as u64, ArenaOptions { huge_pages: true, pool: None })?;
    let buffers = [0, 1].map(|index| memory.span().slice(index * TRANSFER_BYTES, TRANSFER_BYTES));
    for buffer in &buffers {
        // Some drives are faster with zeros.
        let mut state = 1u64;
        buffer.elements_mut::<u64>(0, (buffer.len() / 8) as u64).fill_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        });
    }
    files.register(&buffers);
    // What has never been written may be read without the drive, and takes longer to write than what a step writes over.
    run(&files, Direction::Write, 0..2 * half, &buffers[0], Duration::ZERO, &AtomicUsize::new(1))?;
    let waiting = AtomicUsize::new(2);
    let (read, written) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| run(&files, Direction::Read, 0..half, &buffers[0], LEAST, &waiting));
        let written = run(&files, Direction::Write, half..2 * half, &buffers[1], LEAST, &waiting);
        (reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), written)
    });
    Ok(StateRates { read: read?, written: written?, means: files.means() })
}

/// Bytes a second of transfers of these blocks, checksums included: of each once, and again until `least` is over, and then
/// until all that are counted by `waiting` are done with that, so that none has the drive to itself.
fn run(
    files: &BlockFiles,
    direction: Direction,
    blocks: std::ops::Range<usize>,
    buffer: &HostSpan,
    least: Duration,
    waiting: &AtomicUsize,
) -> Result<f64> {
    let (begun, transfers) = (Instant::now(), blocks.len() / BLOCKS);
    let mut done = 0;
    let mut enough = Enough { waiting, counted: true };
    for first in blocks.step_by(BLOCKS).cycle() {
        if done >= transfers && begun.elapsed() >= least && enough.for_all() {
            break;
        }
        transfer(files, direction, first, buffer)?;
        done += 1;
    }
    Ok((done * TRANSFER_BYTES) as f64 / begun.elapsed().as_secs_f64().max(1e-9))
}

/// One of several that run until all have done enough. One that fails has done enough.
struct Enough<'a> {
    waiting: &'a AtomicUsize,
    counted: bool,
}

impl Enough<'_> {
    /// Called when this one has: whether all have.
    fn for_all(&mut self) -> bool {
        if std::mem::take(&mut self.counted) {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        self.waiting.load(Ordering::Acquire) == 0
    }
}

impl Drop for Enough<'_> {
    fn drop(&mut self) {
        self.for_all();
    }
}

/// Transfers the blocks from number `first` on.
fn transfer(files: &BlockFiles, direction: Direction, first: usize, buffer: &HostSpan) -> Result<()> {
    let count = files.count();
    let pieces: Vec<Piece> = (0..BLOCKS)
        .map(|i| Piece {
            file: (first + i) % count,
            offset: ((first + i) / count * BLOCK_BYTES) as u64,
            span: buffer.slice(i * BLOCK_BYTES, BLOCK_BYTES),
        })
        .collect();
    let each = |index: usize| {
        std::hint::black_box(crc32fast::hash(&pieces[index].span.elements::<u8>(0, BLOCK_BYTES as u64)));
        Ok(())
    };
    files.transfer(direction, &pieces, &each).map_err(|failed| {
        let (index, source) = match failed {
            Failed::System(index, source) => (index, source),
            Failed::Short(index, _) => (index, std::io::ErrorKind::UnexpectedEof.into()),
            Failed::Piece(error) => return error,
        };
        let what = match direction {
            Direction::Read => "cannot be read",
            Direction::Write => "cannot be written",
        };
        Error::StateFolder { path: files.path(pieces[index].file), what, source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_run_until_the_last_has_done_enough_or_failed() {
        let waiting = AtomicUsize::new(3);
        let [mut first, mut second, failed] = [(); 3].map(|()| Enough { waiting: &waiting, counted: true });
        assert!(!first.for_all());
        assert!(!first.for_all(), "each is counted once");
        drop(failed);
        assert!(!first.for_all());
        assert!(second.for_all());
        assert!(first.for_all());
        drop(first);
        assert!(second.for_all());
    }
}
