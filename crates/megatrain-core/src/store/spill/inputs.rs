//! Layer inputs that wait on disk for backward, in files of checksummed blocks like those of state: scratch, which holds nothing
//! between two steps.
//!
//! Of each unit whose inputs go there, every micro-batch of a group has a place, which the same micro-batch of the next group
//! overwrites. Which operation may touch which place when is decided by the schedule; nothing is locked here.
use crate::error::Result;
use crate::host::HostSpan;

use super::{BLOCK_BYTES, Block, BlockFiles, Dealer, Direction, transfer};

/// The files, and where in them each unit's inputs are.
pub(crate) struct InputFiles {
    files: BlockFiles,
    /// By unit, the blocks of each place; no places where its inputs do not go to disk.
    places: Vec<Vec<Vec<Block>>>,
    names: Vec<String>,
    bytes: u64,
}

impl InputFiles {
    /// Gives the files their sizes. `places`: by unit, how many places it has and the bytes of each, in whole pages; `names`:
    /// the units' names.
    ///
    /// # Errors
    /// [`crate::Error::StateFilesFull`] and [`crate::Error::StateFolder`].
    pub(crate) fn new(mut files: BlockFiles, places: &[(u32, u64)], names: Vec<String>) -> Result<Self> {
        let mut dealer = Dealer::new(files.count());
        // Nothing is read from a place before it has been written.
        let mut of_unit =
            |&(count, bytes): &(u32, u64)| (0..count).map(|_| dealer.extent(bytes, |_| 0)).collect::<Result<Vec<_>>>();
        let places = places.iter().map(&mut of_unit).collect::<Result<Vec<_>>>()?;
        dealer.allocate(&mut files)?;
        let bytes = places.iter().flatten().flatten().map(|block| block.len as u64).sum();
        Ok(Self { files, places, names, bytes })
    }

    /// Bytes of all files.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What could not be used, each in a sentence.
    pub(crate) fn notes(&self) -> &[String] {
        self.files.notes()
    }

    /// Names the buffers that inputs will pass through, instead of those before.
    pub(crate) fn register(&self, buffers: &[HostSpan]) {
        self.files.register(buffers);
    }

    /// Reads a micro-batch's input from its place into `buffer`, all of it, or writes it there.
    ///
    /// # Errors
    /// [`crate::Error::StateFile`], [`crate::Error::StateFileShort`], [`crate::Error::StateDamaged`].
    pub(crate) fn transfer(
        &self,
        direction: Direction,
        unit: usize,
        place: u32,
        micro_batch: u32,
        buffer: &HostSpan,
    ) -> Result<()> {
        let blocks = &self.places[unit][place as usize];
        let blocks: Vec<&Block> = blocks.iter().take(buffer.len().div_ceil(BLOCK_BYTES)).collect();
        let whose = |_: Option<usize>| format!("input of unit {} (micro-batch {micro_batch})", self.names[unit]);
        transfer(&self.files, direction, &blocks, buffer, &whose)
    }
}
