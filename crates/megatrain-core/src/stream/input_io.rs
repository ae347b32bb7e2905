//! Layer inputs on their way between the host's buffers and the disk on which they wait for backward.
use std::sync::Arc;

use super::state::Shared;
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::schedule::{Kind, Op};
use crate::store::spill::Direction;
use crate::store::spill::inputs::InputFiles;

impl Shared {
    /// The buffer through which an operation's input passes: the bytes that are copied, in whole pages.
    pub(super) fn input_buffer(&self, op: &Op) -> Option<HostSpan> {
        let bytes = self.placement.staged[op.unit as usize].disk_bytes(op.micro_batch);
        let buffer = &self.memory.input_buffers[op.input_buffer? as usize];
        Some(buffer.slice(0, usize::try_from(bytes).expect("a mapped length")))
    }

    fn input_files(&self) -> Result<Arc<InputFiles>> {
        self.memory.input_files().ok_or(Error::Closed)
    }

    /// Writes an input from its buffer to its place on disk.
    pub(super) fn write_input(&self, op: &Op) -> Result<()> {
        self.transfer_input(Direction::Write, op)
    }

    /// Reads it from there.
    pub(super) fn read_input(&self, op: &Op) -> Result<()> {
        self.transfer_input(Direction::Read, op)
    }

    fn transfer_input(&self, direction: Direction, op: &Op) -> Result<()> {
        let buffer = self.input_buffer(op).expect("an input on disk passes through a buffer");
        if self.options.poison && direction == Direction::Read {
            buffer.fill(0xff);
        }
        let place = self.placement.staged[op.unit as usize].place(op.micro_batch);
        self.input_files()?.transfer(direction, op.unit as usize, place, op.micro_batch, &buffer)
    }
}

/// Whether a pass may be given up when this fails, with everything as it was before: what is on disk of an input belongs to its
/// pass alone.
pub(super) const fn concerns_its_pass_alone(kind: Kind) -> bool {
    matches!(kind, Kind::WriteInput | Kind::ReadInput)
}
