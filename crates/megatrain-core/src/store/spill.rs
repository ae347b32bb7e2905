//! State whose home is a disk: residuals and moments, and of some units weights too, in files of checksummed blocks. (Layer
//! inputs that wait there for backward are in files of their own: `inputs`.)
//!
//! A unit's state is cut into parts, each of which is read, updated and written as a whole while a step runs. The state of a
//! part is one extent: its residual (none under fp32), first moments, second moments, one after the other, each beginning on a
//! page. The weights of a part are an extent of their own, and so is what a unit has frozen: together they are its image,
//! which is read without the rest each time that it is sent to the device. Extents consist of blocks of at
//! most [`BLOCK_BYTES`], dealt to the files in turn, so that several drives work at once. Of each block a CRC32 is kept in
//! memory: the files are scratch, so that it need not outlive them, and a disk that returns other bytes than it was given is
//! noticed before they are used.
//!
//! Which operation may touch which part when is decided by the schedule; nothing is locked here.
use std::ops::Range;

use crate::error::Result;
use crate::host::HostSpan;
use crate::host::span::PAGE;
use crate::layout::{Precision, Role, TensorLayout, UnitLayout};
use crate::store::Plane;

mod blocks;
mod files;
mod folder;
pub(crate) mod inputs;
pub mod rates;
#[expect(unsafe_code, reason = "a ring is given addresses of memory that it fills")]
mod uring;

use self::blocks::{Block, Dealer, Failed, Piece, transfer};
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

struct Part {
    elements: Range<u64>,
    /// Residual and moments.
    state: Vec<Block>,
    /// Weights; none where they are on the host.
    weights: Vec<Block>,
}

struct SpilledUnit {
    layout: UnitLayout,
    parts: Vec<Part>,
    /// What of its image is frozen; none where its weights are on the host.
    frozen: Vec<Block>,
    /// Whether its weights are here too.
    weights: bool,
}

/// What lies in blocks one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// Residual and moments of a part.
    State(usize),
    /// Weights of a part.
    Weights(usize),
    /// What of the image is frozen.
    Frozen,
}

impl SpilledUnit {
    fn blocks(&self, extent: Extent) -> &[Block] {
        match extent {
            Extent::State(part) => &self.parts[part].state,
            Extent::Weights(part) => &self.parts[part].weights,
            Extent::Frozen => &self.frozen,
        }
    }

    /// The extents that make up the image, each with its bytes of that.
    fn image(&self) -> impl Iterator<Item = (Extent, Range<u64>)> + '_ {
        let size = self.layout.precision.dtype().size();
        let weights = self.parts.iter().enumerate();
        let weights =
            weights.map(move |(i, part)| (Extent::Weights(i), part.elements.start * size..part.elements.end * size));
        weights.chain([(Extent::Frozen, self.layout.elements * size..self.layout.image_bytes)])
    }

    /// The extents that hold a plane: each with its bytes of that, and where in the extent they begin.
    fn extents(&self, plane: Plane) -> Vec<(Extent, Range<u64>, u64)> {
        if plane == Plane::Weights {
            return self.image().map(|(extent, bytes)| (extent, bytes, 0)).collect();
        }
        let of_part = |(index, Part { elements, .. }): (usize, &Part)| {
            let bytes = |element| plane_bytes(&self.layout, plane, element);
            let first = plane_range(&self.layout, elements.end - elements.start, plane).start;
            (Extent::State(index), bytes(elements.start)..bytes(elements.end), first)
        };
        self.parts.iter().enumerate().map(of_part).collect()
    }
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

/// Bytes on disk of the state of a part of so many elements, without their weights.
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

/// Bytes of the weights of so many elements.
#[must_use]
pub const fn weights_bytes(layout: &UnitLayout, elements: u64) -> u64 {
    elements * layout.precision.dtype().size()
}

/// A part's state in memory.
pub struct PartPlanes {
    /// Its weights; `None` where they are on the host.
    pub weights: Option<HostSpan>,
    /// Low halves of the masters; `None` under fp32.
    pub residual: Option<HostSpan>,
    /// First moments.
    pub exp_avg: HostSpan,
    /// Second moments.
    pub exp_avg_sq: HostSpan,
}

impl Spill {
    /// Gives the files their sizes. `parts`: by unit, the elements of each part; none where its home is elsewhere. Parts begin
    /// at multiples of 2,048 elements. `weights`: whose weights are here too. All state is zero.
    ///
    /// # Errors
    /// [`Error::StateFilesFull`](crate::error::Error::StateFilesFull) and [`Error::StateFolder`](crate::error::Error::StateFolder).
    pub fn new(
        mut files: BlockFiles,
        layouts: &[UnitLayout],
        parts: &[Vec<Range<u64>>],
        weights: &[bool],
    ) -> Result<Self> {
        let mut dealer = Dealer::new(files.count());
        let mut extent = |bytes| dealer.extent(bytes, zeros);
        let mut units = Vec::new();
        for ((layout, elements), &weights) in layouts.iter().zip(parts).zip(weights) {
            let mut parts = Vec::new();
            for elements in elements {
                let count = elements.end - elements.start;
                let of_weights = if weights { weights_bytes(layout, count) } else { 0 };
                let (state, weights) = (extent(state_bytes(layout, count))?, extent(of_weights)?);
                parts.push(Part { elements: elements.clone(), state, weights });
            }
            let frozen = if weights { layout.image_bytes - weights_bytes(layout, layout.elements) } else { 0 };
            let frozen = extent(frozen)?;
            let unit = SpilledUnit { layout: layout.clone(), parts, frozen, weights };
            units.push((!unit.parts.is_empty()).then_some(unit));
        }
        dealer.allocate(&mut files)?;
        Ok(Self { files, units })
    }

    /// Bytes of all files: of state, and of weights.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        let sum = |blocks: &[Block]| blocks.iter().map(|block| block.len as u64).sum::<u64>();
        let (mut state, mut weights) = (0, 0);
        for unit in self.units.iter().flatten() {
            state += unit.parts.iter().map(|part| sum(&part.state)).sum::<u64>();
            weights += sum(&unit.frozen) + unit.parts.iter().map(|part| sum(&part.weights)).sum::<u64>();
        }
        (state, weights)
    }

    /// What could not be used, each in a sentence.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        self.files.notes()
    }

    /// Names the buffers that state will pass through, instead of those before: transfers of these can be cheaper. They stay
    /// mapped until others are named.
    pub fn register(&self, buffers: &[HostSpan]) {
        self.files.register(buffers);
    }

    fn unit(&self, unit: usize) -> &SpilledUnit {
        self.units[unit].as_ref().expect("only state whose home is a disk is looked for there")
    }

    /// Where in `buffer` each plane of a part is.
    #[must_use]
    pub fn planes(&self, unit: usize, part: usize, buffer: &HostSpan) -> PartPlanes {
        let SpilledUnit { layout, parts, weights, .. } = self.unit(unit);
        let len = parts[part].elements.end - parts[part].elements.start;
        let at = |plane| {
            let range = plane_range(layout, len, plane);
            crate::store::slice(buffer, range.start, range.end - range.start)
        };
        // After the state, as they are transferred.
        let upper = || crate::store::slice(buffer, state_bytes(layout, len), weights_bytes(layout, len));
        PartPlanes {
            weights: weights.then(upper),
            residual: (layout.precision == Precision::Bf16).then(|| at(Plane::Residual)),
            exp_avg: at(Plane::ExpAvg),
            exp_avg_sq: at(Plane::ExpAvgSq),
        }
    }

    /// Reads a part, with its weights where they are here, into the beginning of `buffer`, or writes it from there.
    ///
    /// # Errors
    /// [`Error::StateFile`](crate::error::Error::StateFile), [`Error::StateFileShort`](crate::error::Error::StateFileShort), [`Error::StateDamaged`](crate::error::Error::StateDamaged).
    pub fn transfer(&self, direction: Direction, unit: usize, part: usize, buffer: &HostSpan) -> Result<()> {
        let extents = [Extent::State(part), Extent::Weights(part)];
        self.transfer_extents(direction, unit, extents.into_iter(), buffer)
    }

    /// Reads a unit's image into the beginning of `buffer`.
    ///
    /// # Errors
    /// As for [`Spill::transfer`].
    pub fn read_image(&self, unit: usize, buffer: &HostSpan) -> Result<()> {
        let extents = self.unit(unit).image().map(|(extent, _)| extent);
        self.transfer_extents(Direction::Read, unit, extents, buffer)
    }

    /// Whole extents, one after the other.
    fn transfer_extents(
        &self,
        direction: Direction,
        unit: usize,
        extents: impl Iterator<Item = Extent>,
        buffer: &HostSpan,
    ) -> Result<()> {
        let held = |extent| (0..self.unit(unit).blocks(extent).len()).map(move |block| (extent, block));
        self.transfer_blocks(direction, unit, &extents.flat_map(held).collect::<Vec<_>>(), buffer)
    }

    /// Blocks of extents, one after the other.
    fn transfer_blocks(
        &self,
        direction: Direction,
        unit: usize,
        named: &[(Extent, usize)],
        buffer: &HostSpan,
    ) -> Result<()> {
        let blocks: Vec<&Block> = named.iter().map(|&(extent, index)| &self.unit(unit).blocks(extent)[index]).collect();
        let held: usize = blocks.iter().map(|block| block.len).sum();
        assert!(held <= buffer.len(), "a buffer holds what it was made for");
        let whose = |damaged: Option<usize>| {
            let state = format!("state of unit {}", self.unit(unit).layout.name);
            let tensors = damaged.map(|index| self.tensors(unit, named[index].0, named[index].1));
            tensors.map_or(state.clone(), |tensors| format!("{state} ({tensors})"))
        };
        transfer(&self.files, direction, &blocks, buffer, &whose)
    }

    /// The tensors of which a block holds anything, as a message names them.
    fn tensors(&self, unit: usize, extent: Extent, block: usize) -> String {
        let of = self.unit(unit);
        let layout = &of.layout;
        let start = (block * BLOCK_BYTES) as u64;
        let end = start + of.blocks(extent)[block].len as u64;
        let mut named: Vec<String> = Vec::new();
        for plane in [Plane::Weights, Plane::Residual, Plane::ExpAvg, Plane::ExpAvgSq] {
            let Some((_, bytes, first)) = of.extents(plane).into_iter().find(|found| found.0 == extent) else {
                continue;
            };
            // Where a tensor's bytes of the plane are in the extent.
            let place = |t: &TensorLayout| {
                let numel = t.spec.numel();
                let (from, to) = match (plane, t.spec.role) {
                    (Plane::Weights, Role::Trainable) => (t.byte, t.byte + weights_bytes(layout, numel)),
                    (Plane::Weights, Role::Frozen) => (t.byte, t.byte + numel * t.spec.dtype.size()),
                    (_, Role::Frozen) => (0, 0),
                    _ => (plane_bytes(layout, plane, t.element), plane_bytes(layout, plane, t.element + numel)),
                };
                let inside = |byte: u64| first + byte.clamp(bytes.start, bytes.end) - bytes.start;
                inside(from)..inside(to)
            };
            let held = |t: &&TensorLayout| {
                let place = place(t);
                !place.is_empty() && place.start < end && start < place.end
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
        self.ranges(unit, plane, start, out.len(), bounce, |blocks, inside, bytes| {
            self.transfer_blocks(Direction::Read, unit, blocks, bounce)?;
            bounce.slice(inside.start, inside.len()).copy_to(&mut out[bytes]);
            Ok(())
        })
    }

    /// Overwrites bytes of a unit's plane from byte `start` on.
    ///
    /// # Errors
    /// As for [`Spill::transfer`]. Blocks before the one that failed have been written.
    pub fn write(&self, unit: usize, plane: Plane, start: u64, source: &[u8], bounce: &HostSpan) -> Result<()> {
        self.ranges(unit, plane, start, source.len(), bounce, |blocks, inside, bytes| {
            let held: usize = blocks.iter().map(|&(extent, block)| self.unit(unit).blocks(extent)[block].len).sum();
            if inside.len() < held {
                // What else is in these blocks stays as it is.
                self.transfer_blocks(Direction::Read, unit, blocks, bounce)?;
            }
            bounce.slice(inside.start, inside.len()).copy_from(&source[bytes]);
            self.transfer_blocks(Direction::Write, unit, blocks, bounce)
        })
    }

    /// Divides bytes of a plane from byte `start` on into ranges of blocks that `bounce` holds: `work` is given
    /// the blocks, which of their bytes are meant, and which of the caller's these are.
    fn ranges(
        &self,
        unit: usize,
        plane: Plane,
        start: u64,
        bytes: usize,
        bounce: &HostSpan,
        mut work: impl FnMut(&[(Extent, usize)], Range<usize>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let most = bounce.len() / BLOCK_BYTES;
        assert!(most > 0, "a bounce buffer holds a block");
        let inside_of = |bytes: u64| usize::try_from(bytes).expect("inside a part, whose bytes fit the address space");
        let mut done = 0;
        for (extent, of_plane, first) in self.unit(unit).extents(plane) {
            while done < bytes && of_plane.contains(&(start + done as u64)) {
                let from = start + done as u64;
                let at = inside_of(first + from - of_plane.start);
                let left = inside_of(of_plane.end - from).min(bytes - done);
                let block = at / BLOCK_BYTES;
                let end = (at + left).div_ceil(BLOCK_BYTES).min(block + most);
                let count = left.min(end * BLOCK_BYTES - at);
                let inside = at - block * BLOCK_BYTES;
                let blocks: Vec<_> = (block..end).map(|block| (extent, block)).collect();
                work(&blocks, inside..inside + count, done..done + count)?;
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
