//! Host memory: mappings that the core owns, carved into spans.
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; who may touch which bytes when is the schedule's business, checked there.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mmap call, and nothing else unmaps them.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A range of host memory, kept alive by whoever holds it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct HostSpan {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl HostSpan {
    /// Maps fresh zeroed memory of exactly `len` bytes (rounded up to pages).
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system refuses.
    pub fn map(len: usize) -> Result<Self> {
        let bytes = len.max(1).next_multiple_of(4096);
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::HostMemory { call: "mmap", bytes, source: std::io::Error::last_os_error() });
        }
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns null without MAP_FIXED");
        Ok(Self { mapping: Arc::new(Mapping { base, len: bytes }), offset: 0, len })
    }

    /// Bytes in the span.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the span is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.mapping.base.as_ptr().wrapping_add(self.offset)
    }

    /// The sub-range `[offset, offset + len)`.
    ///
    /// # Panics
    /// When the range leaves the span.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset}+{len} leaves a span of {}",
            self.len
        );
        Self { mapping: Arc::clone(&self.mapping), offset: self.offset + offset, len }
    }
}
