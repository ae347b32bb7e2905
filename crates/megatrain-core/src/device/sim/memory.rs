//! Memory of the simulated device, and who may look at it.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::DeviceMemory;
use crate::host::HostSpan;

/// Bytes allocated now, and at most so far. Apart from the state, since queued work may hold the last claim to some
/// memory and give it up while the state is locked.
#[derive(Default)]
pub(super) struct Allocated {
    pub(super) now: AtomicU64,
    pub(super) peak: AtomicU64,
}

pub(super) struct Allocation {
    pub(super) span: HostSpan,
    pub(super) allocated: Arc<Allocated>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.allocated.now.fetch_sub(self.span.len() as u64, Ordering::AcqRel);
    }
}

/// The right to look at simulated device memory: only running work holds one, and work runs one piece at a time.
pub struct SimMemory {
    /// Names the device, as its allocations do: another device's work runs under another lock.
    pub(super) device: Arc<Allocated>,
}

impl SimMemory {
    /// The bytes of a range of device memory.
    ///
    /// # Panics
    /// When the memory is not a simulated device's.
    #[must_use]
    pub fn bytes<'a>(&'a self, memory: &'a DeviceMemory) -> &'a [u8] {
        let (address, len) = self.checked(memory);
        // SAFETY: `checked` proved that the range lies in a live allocation, which `memory` keeps alive for 'a. The
        // device's queued work is all that reaches it, runs one piece at a time, and holds the one token borrowed here.
        unsafe { std::slice::from_raw_parts(address, len) }
    }

    /// The bytes of a range of device memory, to write.
    ///
    /// # Panics
    /// When the memory is not a simulated device's.
    #[must_use]
    pub fn bytes_mut<'a>(&'a mut self, memory: &'a DeviceMemory) -> &'a mut [u8] {
        let (address, len) = self.checked(memory);
        // SAFETY: as in `bytes`; the token is borrowed mutably, so no other view exists while this one lives.
        unsafe { std::slice::from_raw_parts_mut(address, len) }
    }

    /// Copies one range of device memory to another; they may overlap.
    pub(super) fn copy(&mut self, src: &DeviceMemory, dst: &DeviceMemory) {
        let ((from, len), (to, _)) = (self.checked(src), self.checked(dst));
        // SAFETY: both ranges lie in live allocations that the caller holds, the token is borrowed mutably, and `copy`
        // allows them to overlap; that they are equally long was checked when the copy was queued.
        unsafe { std::ptr::copy(from, to, len) };
    }

    /// Address and length of a range, proved to be inside a live allocation of the token's device.
    fn checked(&self, memory: &DeviceMemory) -> (*mut u8, usize) {
        let allocation = memory.owner.downcast_ref::<Allocation>().expect("memory of the simulated device");
        assert!(Arc::ptr_eq(&allocation.allocated, &self.device), "memory of another simulated device");
        let base = allocation.span.address() as u64;
        let len = allocation.span.len() as u64;
        let inside =
            memory.address >= base && memory.address - base <= len && memory.len <= len - (memory.address - base);
        assert!(inside, "{memory:?} leaves its allocation");
        let offset = usize::try_from(memory.address - base).expect("an offset inside a mapping fits usize");
        (
            allocation.span.address().wrapping_add(offset),
            usize::try_from(memory.len).expect("a mapping's length fits usize"),
        )
    }
}
