//! Host memory: mappings that the core owns, and ranges of them.
use std::io::Error as SystemError;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// What the system hands out.
pub const PAGE: usize = 4096;

static MAPPED: AtomicU64 = AtomicU64::new(0);

/// How often this process has mapped host memory for spans, those of the simulated device included. A step maps none.
#[must_use]
pub fn mappings_made() -> u64 {
    MAPPED.load(Ordering::Relaxed)
}

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Byte ranges that are viewed as slices now, and whether to write.
    views: Mutex<Vec<(Range<usize>, bool)>>,
}

// SAFETY: a mapping is plain memory that belongs to no thread; it is unmapped by whoever drops it last.
unsafe impl Send for Mapping {}
// SAFETY: as above; its bytes are reached through views only, which are counted under a lock.
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
        MAPPED.fetch_add(1, Ordering::Relaxed);
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
        Ok(Self {
            base: NonNull::new(start).expect("mmap never returns null without MAP_FIXED"),
            len,
            views: Mutex::default(),
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping, and nothing else unmaps them; no span refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A claim to view bytes of a mapping, for as long as it lives.
struct View<'a> {
    mapping: &'a Mapping,
    bytes: Range<usize>,
    writes: bool,
}

impl<'a> View<'a> {
    fn new(mapping: &'a Mapping, bytes: Range<usize>, writes: bool) -> Self {
        let mut views = lock(&mapping.views);
        let conflict = views.iter().find(|(other, other_writes)| {
            (writes || *other_writes) && bytes.start < other.end && other.start < bytes.end
        });
        if let Some((other, other_writes)) = conflict.cloned() {
            drop(views);
            let word = |writes| if writes { "written" } else { "read" };
            panic!("bytes {bytes:?} cannot be {} while {other:?} are {}", word(writes), word(other_writes));
        }
        views.push((bytes.clone(), writes));
        drop(views);
        Self { mapping, bytes, writes }
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        let mut views = lock(&self.mapping.views);
        // Equal claims are interchangeable.
        if let Some(index) = views.iter().position(|(bytes, writes)| (bytes, *writes) == (&self.bytes, self.writes)) {
            views.swap_remove(index);
        }
    }
}

/// The list is whole whenever the lock is free.
fn lock(views: &Mutex<Vec<(Range<usize>, bool)>>) -> MutexGuard<'_, Vec<(Range<usize>, bool)>> {
    views.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range of host memory, kept alive by whoever holds it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct HostSpan {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl HostSpan {
    /// Maps fresh zeroed memory of exactly `len` bytes (rounded up to pages). Not touched: see [`Arena`](crate::store::arena::Arena) for the memory
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

    /// How many spans refer to the mapping.
    #[cfg(test)]
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.mapping)
    }

    /// Whether all of `other` is in this one.
    pub(crate) fn contains(&self, other: &Self) -> bool {
        let (end, other_end) = (self.offset + self.len, other.offset + other.len);
        self.shares_mapping(other) && self.offset <= other.offset && other_end <= end
    }

    /// Elements `[start, start + len)` of the span, read as `T`.
    ///
    /// A span is a handle, like a file descriptor: clones reach the same bytes from any thread. So the views of a mapping
    /// are counted as a `RefCell` counts its borrows, byte range by byte range: many may read, or one may write. The
    /// schedule orders all work of the engine, so that there a conflict is a bug, and panics instead of racing.
    /// What devices do to the bytes is the business of whoever queues a copy: see [`crate::device::Device`].
    ///
    /// # Panics
    /// When the range leaves the span, its address is not aligned for `T`, or any of it is viewed by an [`ElementsMut`].
    #[must_use]
    pub fn elements<T: Plain>(&self, start: u64, len: u64) -> Elements<'_, T> {
        let (address, len, bytes) = self.checked::<T>(start, len);
        Elements { address, len, _view: View::new(&self.mapping, bytes, false) }
    }

    /// The same to write.
    ///
    /// # Panics
    /// When the range leaves the span, its address is not aligned for `T`, or any of it is viewed already.
    #[must_use]
    pub fn elements_mut<T: Plain>(&self, start: u64, len: u64) -> ElementsMut<'_, T> {
        let (address, len, bytes) = self.checked::<T>(start, len);
        ElementsMut { address, len, _view: View::new(&self.mapping, bytes, true) }
    }

    /// Address and length of a range of elements, and its bytes of the mapping.
    fn checked<T: Plain>(&self, start: u64, len: u64) -> (*mut T, usize, Range<usize>) {
        let range = start.checked_add(len).and_then(|end| end.checked_mul(size_of::<T>() as u64));
        assert!(
            range.is_some_and(|end| end <= self.len as u64),
            "elements {start}+{len} of {} bytes leave a span of {} bytes",
            size_of::<T>(),
            self.len
        );
        let (start, len) = (usize::try_from(start), usize::try_from(len));
        let (start, len) = (start.expect("within the span"), len.expect("within the span"));
        let byte = start * size_of::<T>();
        let address = self.address().wrapping_add(byte).cast::<T>();
        assert!(address.is_aligned(), "{address:p} is not aligned to {} bytes", align_of::<T>());
        (address, len, self.offset + byte..self.offset + byte + len * size_of::<T>())
    }

    /// Copies the whole span out.
    ///
    /// # Panics
    /// When `out` is not as long as the span, or any of it is viewed by someone who forbids it.
    pub fn copy_to(&self, out: &mut [u8]) {
        out.copy_from_slice(&self.elements(0, self.len as u64));
    }

    /// Overwrites the whole span.
    ///
    /// # Panics
    /// When `source` is not as long as the span, or any of it is viewed by someone who forbids it.
    pub fn copy_from(&self, source: &[u8]) {
        self.elements_mut(0, self.len as u64).copy_from_slice(source);
    }

    /// Sets every byte.
    ///
    /// # Panics
    /// When any of it is viewed by someone.
    pub fn fill(&self, byte: u8) {
        self.elements_mut(0, self.len as u64).fill(byte);
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
        let mut bytes = self.elements_mut::<u8>(0, self.len as u64);
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

/// Part of a span as a slice, to read: see [`HostSpan::elements`].
pub struct Elements<'a, T> {
    address: *const T,
    len: usize,
    _view: View<'a>,
}

impl<T: Plain> Deref for Elements<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `checked` has found that the range is inside the span, which the view's borrow keeps mapped, and that
        // its start is aligned; any bytes are a `T`. The view is registered as shared for as long as this lives, so that
        // no `ElementsMut` of these bytes exists, and whoever lets a device write them has promised that none does.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }
}

/// Part of a span as a slice, to read or write: see [`HostSpan::elements_mut`].
pub struct ElementsMut<'a, T> {
    address: *mut T,
    len: usize,
    _view: View<'a>,
}

impl<T: Plain> Deref for ElementsMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as for `Elements`; the view is registered as the only one of these bytes.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }
}

impl<T: Plain> DerefMut for ElementsMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; this is borrowed mutably, so that nobody else has a slice through it.
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

    #[test]
    fn bytes_are_viewed_by_many_readers_or_one_writer() {
        let span = HostSpan::map(4096).unwrap();
        let other = span.clone();
        let conflicts = |work: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err();
        let first = span.elements::<u32>(0, 16);
        assert!(!conflicts(&|| drop(other.elements::<u8>(0, 4096))), "readers share");
        assert!(conflicts(&|| drop(other.elements_mut::<u8>(63, 1))), "a writer of what is read");
        assert!(!conflicts(&|| other.slice(64, 64).fill(1)), "a writer beside it");
        drop(first);
        let mut writer = span.elements_mut::<u32>(16, 16);
        assert!(conflicts(&|| drop(other.elements::<u8>(0, 65))), "a reader of what is written");
        assert!(conflicts(&|| drop(other.slice(100, 100).elements_mut::<u8>(0, 1))), "two writers");
        assert!(!conflicts(&|| drop(other.elements_mut::<u8>(0, 64))), "a writer beside it");
        writer[0] = 7;
        drop(writer);
        assert!(!conflicts(&|| other.fill(2)), "nobody any more");
        assert!(lock(&span.mapping.views).is_empty());
    }
}
