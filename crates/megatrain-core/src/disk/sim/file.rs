//! An open file of the simulated disk.
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use super::{Edit, FaultKind, SimDisk, State, error};
use crate::disk::{DiskFile, DiskResult};
use crate::error::DiskError;

pub(super) struct SimFile {
    disk: SimDisk,
    path: PathBuf,
    node: usize,
}

impl Drop for SimFile {
    fn drop(&mut self) {
        self.disk.lock().file(self.node).handles -= 1;
    }
}

impl SimFile {
    /// One more handle of a file.
    pub(super) fn new(disk: &SimDisk, state: &mut State, path: &Path, node: usize) -> Self {
        state.file(node).handles += 1;
        Self { disk: disk.clone(), path: path.to_owned(), node }
    }

    /// Runs one call that may be left out.
    fn run(&self, call: &'static str, act: impl FnOnce(&mut State) -> DiskResult<()>) -> DiskResult<()> {
        let mut state = self.disk.lock();
        if state.enter(call, &self.path)? == Some(FaultKind::LeftOut) { Ok(()) } else { act(&mut state) }
    }

    fn resize(&self, call: &'static str, state: &mut State, bytes: u64) -> DiskResult<()> {
        state.grow(call, &self.path, self.node, bytes)?;
        let size = usize::try_from(bytes).map_err(|_| error(call, &self.path, libc::EFBIG))?;
        state.file(self.node).edit(Edit::SetSize(size));
        Ok(())
    }
}

impl DiskFile for SimFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn size(&self) -> DiskResult<u64> {
        Ok(self.disk.lock().file(self.node).live.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> DiskResult<usize> {
        let mut state = self.disk.lock();
        let fault = state.enter("read", &self.path).map_err(|e| e.at(offset, out.len()))?;
        let live = &state.file(self.node).live;
        let start = usize::try_from(offset).map_or(live.len(), |start| start.min(live.len()));
        let mut len = out.len().min(live.len() - start);
        if fault == Some(FaultKind::Short) {
            len = len.div_ceil(2);
        }
        out[..len].copy_from_slice(&live[start..start + len]);
        if fault == Some(FaultKind::FlipBit) && len > 0 {
            out[len / 2] ^= 16;
        }
        Ok(len)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> DiskResult<usize> {
        let mut state = self.disk.lock();
        let failed = |error: DiskError| error.at(offset, bytes.len());
        let mut bytes = bytes.to_vec();
        match state.enter("write", &self.path).map_err(failed)? {
            Some(FaultKind::LeftOut) => return Ok(bytes.len()),
            Some(FaultKind::Short) => bytes.truncate(bytes.len().div_ceil(2)),
            Some(FaultKind::FlipBit) if !bytes.is_empty() => {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 16;
            }
            _ => {}
        }
        let len = bytes.len();
        let start = usize::try_from(offset).ok().filter(|start| start.checked_add(len).is_some());
        let start = start.ok_or_else(|| failed(error("write", &self.path, libc::EFBIG)))?;
        state.grow("write", &self.path, self.node, (start + len) as u64).map_err(failed)?;
        state.file(self.node).edit(Edit::Write { offset: start, bytes });
        Ok(len)
    }

    fn set_size(&self, bytes: u64) -> DiskResult<()> {
        self.run("set size", |state| self.resize("set size", state, bytes))
    }

    fn preallocate(&self, bytes: u64) -> DiskResult<bool> {
        let mut state = self.disk.lock();
        let fault = state.enter("preallocate", &self.path)?;
        if fault != Some(FaultKind::LeftOut) && bytes > state.file(self.node).live.len() as u64 {
            self.resize("preallocate", &mut state, bytes)?;
        }
        Ok(fault != Some(FaultKind::Short))
    }

    fn sync(&self) -> DiskResult<()> {
        self.run("sync", |state| {
            let file = state.file(self.node);
            file.durable = file.live.clone();
            file.edits.clear();
            Ok(())
        })
    }

    fn forget_pages(&self) {}

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
