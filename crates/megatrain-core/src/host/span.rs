//! Host memory: mappings that the core owns, and ranges of them.
use std::io::Error as SystemError;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};

/// What the system hands out.
pub const PAGE: usize = 4096;

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; who may touch which bytes when is the schedule's business, checked there.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Fresh zeroed memory of `len` bytes, `len` a multiple of pages, starting at a multiple of `align`.
    fn new(len: usize, align: usize, flags: i32) -> Result<Self> {
        let reserved = len.checked_add(align - PAGE).filter(|&n| n <= isize::MAX as usize);
        let Some(reserved) = reserved else {
            return Err(Error::HostMemory {
                call: "mmap",
                bytes: len,
                source: SystemError::from_raw_os_error(libc::ENOMEM),
            });
        };
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::HostMemory { call: "mmap", bytes: len, source: SystemError::last_os_error() });
        }
        let base = base.cast::<u8>();
        // What was reserved to reach the alignment is given back on either side.
        let head = base.addr().next_multiple_of(align) - base.addr();
        let start = base.wrapping_add(head);
        for (address, extra) in [(base, head), (start.wrapping_add(len), reserved - head - len)] {
            if extra > 0 {
                // SAFETY: the range is a part of the mapping just made that nothing refers to.
                unsafe { libc::munmap(address.cast(), extra) };
            }
        }
        Ok(Self { base: NonNull::new(start).expect("mmap never returns null without MAP_FIXED"), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping, and nothing else unmaps them; no span refers to it any more.
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
    /// Maps fresh zeroed memory of exactly `len` bytes (rounded up to pages). Not touched: see [`Arena`] for the memory
    /// that a step works in.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system refuses.
    pub fn map(len: usize) -> Result<Self> {
        Self::map_with(len, PAGE, 0)
    }

    /// Like [`HostSpan::map`], without a promise of the system that memory is there for every page: for spans larger than
    /// memory of which a part is used.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system refuses.
    pub fn reserve(len: usize) -> Result<Self> {
        Self::map_with(len, PAGE, libc::MAP_NORESERVE)
    }

    pub(crate) fn map_with(len: usize, align: usize, flags: i32) -> Result<Self> {
        let bytes = len.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        Ok(Self { mapping: Arc::new(Mapping::new(bytes, align, flags)?), offset: 0, len })
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

    /// Whether both are ranges of one mapping.
    pub(crate) fn shares_mapping(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mapping, &other.mapping)
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

    /// Gives the kernel advice on the span's pages; the span starts on a page and ends on one or with its mapping.
    pub(crate) fn advise(&self, advice: i32) -> std::result::Result<(), SystemError> {
        // SAFETY: the range is mapped for as long as the span lives. None of the advice that this module gives
        // (huge pages, populate, fork) changes what the pages hold.
        match unsafe { libc::madvise(self.address().cast(), self.len, advice) } {
            0 => Ok(()),
            _ => Err(SystemError::last_os_error()),
        }
    }

    /// Has every page backed by memory now.
    pub(crate) fn populate(&self) -> Result<()> {
        match self.advise(libc::MADV_POPULATE_WRITE) {
            Ok(()) => Ok(()),
            // Kernels before 5.14 do not know the advice.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {
                self.touch_each_page();
                Ok(())
            }
            Err(source) => Err(Error::HostMemory { call: "madvise(MADV_POPULATE_WRITE)", bytes: self.len, source }),
        }
    }

    /// The same by hand, for memory that is fresh, hence zero.
    fn touch_each_page(&self) {
        let mut bytes = self.elements::<u8>(0, self.len as u64);
        for page in bytes.chunks_mut(PAGE) {
            // The write must happen although it changes nothing.
            *std::hint::black_box(&mut page[0]) = 0;
        }
    }

    /// Spreads the span's pages, none of them touched yet, evenly over the NUMA nodes: the copy engines and all the
    /// optimizer's threads read all of it.
    pub(crate) fn interleave(&self, nodes: &[usize]) -> std::result::Result<(), SystemError> {
        const MPOL_INTERLEAVE: libc::c_int = 3;
        const WORD: usize = libc::c_ulong::BITS as usize;
        let mut mask = vec![0 as libc::c_ulong; nodes.iter().max().map_or(1, |most| most / WORD + 1)];
        for node in nodes {
            mask[node / WORD] |= 1 << (node % WORD);
        }
        // SAFETY: mbind changes only where pages of the range, which is ours, will come from; the mask is live and has
        // the number of bits given (the kernel reads one less).
        let answer = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.address(),
                self.len,
                MPOL_INTERLEAVE,
                mask.as_ptr(),
                mask.len() * WORD + 1,
                0,
            )
        };
        if answer == 0 { Ok(()) } else { Err(SystemError::last_os_error()) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_touched_on_kernels_that_cannot_populate() {
        let span = HostSpan::map(10 * PAGE + 1).unwrap();
        let resident = |span: &HostSpan| {
            let mut pages = vec![0u8; span.len().div_ceil(PAGE)];
            // SAFETY: the range is mapped, and the vector has a byte for each of its pages.
            let answer = unsafe { libc::mincore(span.address().cast(), span.len(), pages.as_mut_ptr()) };
            assert_eq!(answer, 0);
            pages.iter().filter(|&&page| page & 1 == 1).count()
        };
        assert_eq!(resident(&span), 0);
        span.touch_each_page();
        assert_eq!(resident(&span), 11);
        assert!(span.elements::<u8>(0, span.len() as u64).iter().all(|&b| b == 0));
    }

    #[test]
    fn spreading_over_nodes_leaves_the_memory_usable() {
        let span = HostSpan::map(4 * PAGE).unwrap();
        // Refused where the container forbids it; either way the memory must work.
        let _ = span.interleave(&[0]);
        span.populate().unwrap();
        span.fill(7);
    }
}
