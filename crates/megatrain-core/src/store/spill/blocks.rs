//! Blocks of files: dealt to several files in turn, and transferred with their checksums.
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use super::files::BlockFiles;
use super::{BLOCK_BYTES, Direction};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::host::span::PAGE;

/// A block on its way between memory and a file. Memory, offset and length are multiples of 4 KiB.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Index of the file.
    pub(super) file: usize,
    /// First byte in the file.
    pub(super) offset: u64,
    /// Memory, as long as the block.
    pub(super) span: HostSpan,
}

/// Why a transfer failed, and at which of its pieces.
#[derive(Debug)]
pub(super) enum Failed {
    /// The system refused.
    System(usize, io::Error),
    /// The file ended early, after so many bytes of the piece.
    Short(usize, usize),
    /// What was called for a piece failed.
    Piece(Error),
}

/// A block of a file.
pub(super) struct Block {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) len: usize,
    /// CRC32 of what it holds.
    pub(super) sum: AtomicU32,
}

/// Transfers the blocks between their files and the beginning of `buffer`, one after the other there, and keeps or compares
/// their checksums. Of the last block, only as much as `buffer` holds. `whose` names what they hold, for errors: all, or what
/// one of them holds that is damaged.
pub(super) fn transfer(
    files: &BlockFiles,
    direction: Direction,
    blocks: &[&Block],
    buffer: &HostSpan,
    whose: &(dyn Fn(Option<usize>) -> String + Sync),
) -> Result<()> {
    let mut at = 0;
    let pieces: Vec<Piece> = blocks
        .iter()
        .map(|block| {
            let len = block.len.min(buffer.len() - at);
            at += len;
            Piece { file: block.file, offset: block.offset, span: buffer.slice(at - len, len) }
        })
        .collect();
    let each = |index: usize| {
        let span = &pieces[index].span;
        let sum = crc32fast::hash(&span.elements::<u8>(0, span.len() as u64));
        if direction == Direction::Write {
            blocks[index].sum.store(sum, Ordering::Release);
            return Ok(());
        }
        let expected = blocks[index].sum.load(Ordering::Acquire);
        if sum == expected {
            return Ok(());
        }
        let (whose, path) = (whose(Some(index)), files.path(pieces[index].file));
        let (offset, bytes) = (pieces[index].offset, span.len());
        Err(Error::StateDamaged { whose, path, offset, bytes, expected, got: sum })
    };
    files.transfer(direction, &pieces, &each).map_err(|failed| match failed {
        Failed::Piece(error) => error,
        Failed::System(index, source) => {
            let Piece { file, offset, ref span } = pieces[index];
            let (path, bytes) = (files.path(file), span.len());
            Error::StateFile { whose: whose(None), what: direction.name(), path, offset, bytes, source }
        }
        Failed::Short(index, got) => {
            let Piece { file, offset, ref span } = pieces[index];
            let (path, expected) = (files.path(file), span.len());
            Error::StateFileShort { whose: whose(None), path, offset, expected, got }
        }
    })
}

/// Deals blocks of at most [`BLOCK_BYTES`] to so many files in turn.
pub(super) struct Dealer {
    /// Bytes of each file so far.
    ends: Vec<u64>,
    next: usize,
}

impl Dealer {
    pub(super) fn new(files: usize) -> Self {
        Self { ends: vec![0; files], next: 0 }
    }

    /// The blocks of an extent of whole pages; `sum` is the checksum that a block of so many bytes begins with.
    pub(super) fn extent(&mut self, bytes: u64, sum: impl Fn(usize) -> u32) -> Result<Vec<Block>> {
        let bytes = usize::try_from(bytes).map_err(|_| Error::AddressSpace { bytes: u64::MAX })?;
        debug_assert!(bytes.is_multiple_of(PAGE), "an extent has whole pages");
        let starts = (0..bytes).step_by(BLOCK_BYTES);
        Ok(starts.map(|start| self.block(BLOCK_BYTES.min(bytes - start), &sum)).collect())
    }

    fn block(&mut self, len: usize, sum: impl Fn(usize) -> u32) -> Block {
        let file = self.next % self.ends.len();
        self.next += 1;
        let offset = self.ends[file];
        self.ends[file] += len as u64;
        Block { file, offset, len, sum: AtomicU32::new(sum(len)) }
    }

    /// Gives the files their sizes.
    pub(super) fn allocate(&self, files: &mut BlockFiles) -> Result<()> {
        self.ends.iter().enumerate().try_for_each(|(file, &bytes)| files.allocate(file, bytes))
    }
}
