//! State whose home is a disk: residuals and moments in files of checksummed blocks.
//!
//! A unit's state is cut into parts, each of which is read, updated and written as a whole while a step runs. A part is one
//! extent: its residual (none under fp32), first moments, second moments, one after the other, each beginning on a page. Extents consist of blocks of at
//! most [`BLOCK_BYTES`], dealt to the files in turn, so that several drives work at once. Of each block a CRC32 is kept in
//! memory: the files are scratch, so that it need not outlive them, and a disk that returns other bytes than it was given is
//! noticed before they are used.
//!
//! Which operation may touch which part when is decided by the schedule; nothing is locked here.
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::host::span::PAGE;
use crate::layout::{Precision, Role, UnitLayout};
use crate::store::Plane;

mod files;
mod folder;
pub mod rates;
#[expect(unsafe_code, reason = "a ring is given addresses of memory that it fills")]
mod uring;

pub use self::files::{BlockFiles, StateFiles, StateIo};

/// The largest block, in bytes: long enough that a drive reaches its rate, short enough that few bytes are read in vain for a
/// single tensor.
pub const BLOCK_BYTES: usize = 1 << 20;

/// Which way blocks go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the files.
    Read,
    /// To the files.
    Write,
}

impl Direction {
    /// Its name in errors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "written",
        }
    }
}

/// A block on its way between memory and a file. Memory, offset and length are multiples of 4 KiB.
#[derive(Clone, Debug)]
struct Piece {
    /// Index of the file.
    file: usize,
    /// First byte in the file.
    offset: u64,
    /// Memory, as long as the block.
    span: HostSpan,
}

/// Why a transfer failed, and at which of its pieces.
#[derive(Debug)]
enum Failed {
    /// The system refused.
    System(usize, io::Error),
    /// The file ended early, after so many bytes of the piece.
    Short(usize, usize),
    /// What was called for a piece failed.
    Piece(Error),
}

struct Block {
    file: usize,
    offset: u64,
    len: usize,
    /// CRC32 of what it holds.
    sum: AtomicU32,
}

struct Part {
    elements: Range<u64>,
    blocks: Vec<Block>,
}

struct SpilledUnit {
    layout: UnitLayout,
    parts: Vec<Part>,
}

/// The state on disk of those units whose home that is.
pub struct Spill {
    files: BlockFiles,
    units: Vec<Option<SpilledUnit>>,
}

/// The planes of a part of so many elements, one after the other, each beginning on a page: residual, then moments.
fn planes(layout: &UnitLayout, elements: u64) -> [(Plane, Range<u64>); 3] {
    let mut end = 0u64;
    [Plane::Residual, Plane::ExpAvg, Plane::ExpAvgSq].map(|plane| {
        let start = end.next_multiple_of(PAGE as u64);
        end = start + plane_bytes(layout, plane, elements);
        (plane, start..end)
    })
}

/// Bytes of the first `elements` elements of a plane.
fn plane_bytes(layout: &UnitLayout, plane: Plane, elements: u64) -> u64 {
    match plane {
        Plane::Residual => elements * layout.residual_size(),
        _ => layout.state.moments.bytes(elements),
    }
}

/// Bytes on disk of the state of a part of so many elements.
#[must_use]
pub fn state_bytes(layout: &UnitLayout, elements: u64) -> u64 {
    let [.., (_, last)] = planes(layout, elements);
    last.end.next_multiple_of(PAGE as u64)
}

/// The place of a plane in a part.
fn plane_range(layout: &UnitLayout, elements: u64, plane: Plane) -> Range<u64> {
    let found = planes(layout, elements).into_iter().find(|(other, _)| *other == plane);
    found.unwrap_or_else(|| unreachable!("{} is not on disk", plane.name())).1
}

/// A part's state in memory.
pub struct PartPlanes {
    /// Low halves of the masters; `None` under fp32.
    pub residual: Option<HostSpan>,
    /// First moments.
    pub exp_avg: HostSpan,
    /// Second moments.
    pub exp_avg_sq: HostSpan,
}

impl Spill {
    /// Gives the files their sizes. `parts`: by unit, the elements of each part; none where its home is elsewhere. Parts begin
    /// at multiples of 2,048 elements. All state is zero.
    ///
    /// # Errors
    /// [`Error::StateFilesFull`] and [`Error::StateFolder`].
    pub fn new(mut files: BlockFiles, layouts: &[UnitLayout], parts: &[Vec<Range<u64>>]) -> Result<Self> {
        let mut ends = vec![0u64; files.count()];
        let mut next = 0;
        let mut block = |len: usize| {
            let file = next % ends.len();
            next += 1;
            let offset = ends[file];
            ends[file] += len as u64;
            Block { file, offset, len, sum: AtomicU32::new(zeros(len)) }
        };
        let mut part = |elements: &Range<u64>, layout: &UnitLayout| {
            let bytes = usize::try_from(state_bytes(layout, elements.end - elements.start))
                .map_err(|_| Error::AddressSpace { bytes: u64::MAX })?;
            debug_assert!(bytes.is_multiple_of(PAGE), "a part has whole pages of every plane");
            let starts = (0..bytes).step_by(BLOCK_BYTES);
            let blocks = starts.map(|start| block(BLOCK_BYTES.min(bytes - start))).collect();
            Ok(Part { elements: elements.clone(), blocks })
        };
        let unit = |(layout, parts): (&UnitLayout, &Vec<Range<u64>>)| {
            let parts = parts.iter().map(|elements| part(elements, layout)).collect::<Result<Vec<_>>>()?;
            Ok((!parts.is_empty()).then(|| SpilledUnit { layout: layout.clone(), parts }))
        };
        let units = layouts.iter().zip(parts).map(unit).collect::<Result<_>>()?;
        for (file, &bytes) in ends.iter().enumerate() {
            files.allocate(file, bytes)?;
        }
        Ok(Self { files, units })
    }

    /// Bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let units = self.units.iter().flatten();
        units.flat_map(|unit| &unit.parts).flat_map(|part| &part.blocks).map(|block| block.len as u64).sum()
    }

    /// What could not be used, each in a sentence.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        self.files.notes()
    }

    fn unit(&self, unit: usize) -> &SpilledUnit {
        self.units[unit].as_ref().expect("only state whose home is a disk is looked for there")
    }

    /// Where in `buffer` each plane of a part is.
    #[must_use]
    pub fn planes(&self, unit: usize, part: usize, buffer: &HostSpan) -> PartPlanes {
        let SpilledUnit { layout, parts } = self.unit(unit);
        let len = parts[part].elements.end - parts[part].elements.start;
        let at = |plane| {
            let range = plane_range(layout, len, plane);
            crate::store::slice(buffer, range.start, range.end - range.start)
        };
        PartPlanes {
            residual: (layout.precision == Precision::Bf16).then(|| at(Plane::Residual)),
            exp_avg: at(Plane::ExpAvg),
            exp_avg_sq: at(Plane::ExpAvgSq),
        }
    }

    /// Reads a part into the beginning of `buffer`, or writes it from there.
    ///
    /// # Errors
    /// [`Error::StateFile`], [`Error::StateFileShort`], [`Error::StateDamaged`].
    pub fn transfer(&self, direction: Direction, unit: usize, part: usize, buffer: &HostSpan) -> Result<()> {
        let blocks = &self.unit(unit).parts[part].blocks;
        self.transfer_blocks(direction, unit, part, 0..blocks.len(), buffer)
    }

    /// The same for some of a part's blocks.
    fn transfer_blocks(
        &self,
        direction: Direction,
        unit: usize,
        part: usize,
        blocks: Range<usize>,
        buffer: &HostSpan,
    ) -> Result<()> {
        let first = blocks.start;
        let blocks = &self.unit(unit).parts[part].blocks[blocks];
        let mut at = 0;
        let pieces: Vec<Piece> = blocks
            .iter()
            .map(|block| {
                at += block.len;
                Piece { file: block.file, offset: block.offset, span: buffer.slice(at - block.len, block.len) }
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
            let (tensors, path) = (self.tensors(unit, part, first + index), self.files.path(pieces[index].file));
            let (unit, offset, bytes) = (self.unit(unit).layout.name.clone(), pieces[index].offset, span.len());
            Err(Error::StateDamaged { unit, tensors, path, offset, bytes, expected, got: sum })
        };
        self.files.transfer(direction, &pieces, &each).map_err(|failed| {
            let name = || self.unit(unit).layout.name.clone();
            match failed {
                Failed::Piece(error) => error,
                Failed::System(index, source) => {
                    let Piece { file, offset, ref span } = pieces[index];
                    let (unit, path, bytes) = (name(), self.files.path(file), span.len());
                    Error::StateFile { unit, what: direction.name(), path, offset, bytes, source }
                }
                Failed::Short(index, got) => {
                    let Piece { file, offset, ref span } = pieces[index];
                    let (unit, path, expected) = (name(), self.files.path(file), span.len());
                    Error::StateFileShort { unit, path, offset, expected, got }
                }
            }
        })
    }

    /// The tensors of which a block holds anything, as a message names them.
    fn tensors(&self, unit: usize, part: usize, block: usize) -> String {
        let SpilledUnit { layout, parts } = self.unit(unit);
        let Part { elements, blocks } = &parts[part];
        let len = elements.end - elements.start;
        let start = (block * BLOCK_BYTES) as u64;
        let end = start + blocks[block].len as u64;
        let mut named: Vec<String> = Vec::new();
        for (plane, place) in planes(layout, len) {
            let bytes = |element: u64| plane_bytes(layout, plane, element - elements.start);
            let held = |t: &&crate::layout::TensorLayout| {
                let first = t.element.clamp(elements.start, elements.end);
                let past = (t.element + t.spec.numel()).clamp(elements.start, elements.end);
                let (from, to) = (place.start + bytes(first), place.start + bytes(past));
                t.spec.role == Role::Trainable && from < to && from < end && start < to
            };
            named.extend(layout.tensors.iter().filter(held).map(|t| format!("{} of {}", plane.name(), t.spec.name)));
        }
        match named.len() {
            0 => "padding".to_owned(),
            1 | 2 => named.join(" and "),
            more => format!("{}, {} and {} more", named[0], named[1], more - 2),
        }
    }

    /// Reads bytes of a unit's plane from byte `start` on, as many as `out` holds, through `bounce` (at least one block).
    ///
    /// # Errors
    /// As for [`Spill::transfer`].
    pub fn read(&self, unit: usize, plane: Plane, start: u64, out: &mut [u8], bounce: &HostSpan) -> Result<()> {
        self.ranges(unit, plane, start, out.len(), bounce, |part, blocks, inside, bytes| {
            self.transfer_blocks(Direction::Read, unit, part, blocks, bounce)?;
            bounce.slice(inside.start, inside.len()).copy_to(&mut out[bytes]);
            Ok(())
        })
    }

    /// Overwrites bytes of a unit's plane from byte `start` on.
    ///
    /// # Errors
    /// As for [`Spill::transfer`]. Blocks before the one that failed have been written.
    pub fn write(&self, unit: usize, plane: Plane, start: u64, source: &[u8], bounce: &HostSpan) -> Result<()> {
        self.ranges(unit, plane, start, source.len(), bounce, |part, blocks, inside, bytes| {
            let held: usize = self.unit(unit).parts[part].blocks[blocks.clone()].iter().map(|block| block.len).sum();
            if inside.len() < held {
                // What else is in these blocks stays as it is.
                self.transfer_blocks(Direction::Read, unit, part, blocks.clone(), bounce)?;
            }
            bounce.slice(inside.start, inside.len()).copy_from(&source[bytes]);
            self.transfer_blocks(Direction::Write, unit, part, blocks, bounce)
        })
    }

    /// Divides bytes of a plane from byte `start` on into ranges of blocks that `bounce` holds: `work` is given the part,
    /// the blocks, which of their bytes are meant, and which of the caller's these are.
    fn ranges(
        &self,
        unit: usize,
        plane: Plane,
        start: u64,
        bytes: usize,
        bounce: &HostSpan,
        mut work: impl FnMut(usize, Range<usize>, Range<usize>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let SpilledUnit { layout, parts } = self.unit(unit);
        let most = bounce.len() / BLOCK_BYTES;
        assert!(most > 0, "a bounce buffer holds a block");
        let inside_of = |bytes: u64| usize::try_from(bytes).expect("inside a part, whose bytes fit the address space");
        let mut done = 0;
        for (index, part) in parts.iter().enumerate() {
            let first = plane_range(layout, part.elements.end - part.elements.start, plane).start;
            let of_plane =
                plane_bytes(layout, plane, part.elements.start)..plane_bytes(layout, plane, part.elements.end);
            while done < bytes && of_plane.contains(&(start + done as u64)) {
                let from = start + done as u64;
                let at = inside_of(first + from - of_plane.start);
                let left = inside_of(of_plane.end - from).min(bytes - done);
                let block = at / BLOCK_BYTES;
                let end = (at + left).div_ceil(BLOCK_BYTES).min(block + most);
                let count = left.min(end * BLOCK_BYTES - at);
                let inside = at - block * BLOCK_BYTES;
                work(index, block..end, inside..inside + count, done..done + count)?;
                done += count;
            }
        }
        assert_eq!(done, bytes, "all of it is inside the unit");
        Ok(())
    }
}

/// CRC32 of zeros.
fn zeros(len: usize) -> u32 {
    static WHOLE: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let of = |len: usize| crc32fast::hash(&vec![0; len]);
    if len == BLOCK_BYTES { *WHOLE.get_or_init(|| of(BLOCK_BYTES)) } else { of(len) }
}
