//! Host memory: mappings that the core owns, carved into spans.
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
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

    /// Elements `[start, start + len)` of the span, read as `T`, to read or write for as long as the result lives.
    ///
    /// A span is a handle, like a file descriptor: clones and the device's copy engines reach the same bytes. Who may
    /// touch which bytes when is decided by the schedule and proved by its check, not by this borrow.
    ///
    /// # Panics
    /// When the range leaves the span, or its address is not aligned for `T`.
    #[must_use]
    pub fn elements<T: Plain>(&self, start: u64, len: u64) -> Elements<'_, T> {
        let range = start.checked_add(len).and_then(|end| end.checked_mul(size_of::<T>() as u64));
        assert!(
            range.is_some_and(|end| end <= self.len as u64),
            "elements {start}+{len} of {} bytes leave a span of {} bytes",
            size_of::<T>(),
            self.len
        );
        let byte = usize::try_from(start).expect("within the span") * size_of::<T>();
        let address = self.address().wrapping_add(byte).cast::<T>();
        assert!(address.is_aligned(), "{address:p} is not aligned to {} bytes", align_of::<T>());
        Elements { address, len: usize::try_from(len).expect("within the span"), span: PhantomData }
    }

    /// Copies the whole span out.
    ///
    /// # Panics
    /// When `out` is not as long as the span.
    pub fn copy_to(&self, out: &mut [u8]) {
        out.copy_from_slice(&self.elements(0, self.len as u64));
    }

    /// Overwrites the whole span.
    ///
    /// # Panics
    /// When `source` is not as long as the span.
    pub fn copy_from(&self, source: &[u8]) {
        self.elements(0, self.len as u64).copy_from_slice(source);
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) {
        self.elements(0, self.len as u64).fill(byte);
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

mod sealed {
    pub trait Sealed {}
}

/// Numbers of which any bytes are a value.
pub trait Plain: Copy + sealed::Sealed {}

macro_rules! plain {
    ($($number:ty)*) => {
        $(impl sealed::Sealed for $number {}
        impl Plain for $number {})*
    };
}

plain!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

/// Part of a span as a slice: see [`HostSpan::elements`].
pub struct Elements<'a, T> {
    address: *mut T,
    len: usize,
    span: PhantomData<&'a HostSpan>,
}

impl<T: Plain> Deref for Elements<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `elements` has checked that the range lies inside the span, which the borrow keeps mapped, and that
        // its start is aligned; any bytes are a `T`. That nobody writes it meanwhile is the schedule's guarantee.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }
}

impl<T: Plain> DerefMut for Elements<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; that nobody else reads or writes it meanwhile is the schedule's guarantee.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}
