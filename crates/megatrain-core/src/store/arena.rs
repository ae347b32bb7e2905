//! Host memory: mappings that the core owns, carved into spans.
//!
//! The core maps its own pages instead of using a device's pinned allocator, which rounds sizes up and may hand out
//! write-combined memory that the optimizer could not read at speed. A mapping is made, spread over NUMA nodes, given
//! huge pages, touched by all threads at once, and only then registered: registering untouched memory would fault it in
//! on one thread under a lock of the driver.
use std::io::Error as SystemError;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{Device, Pin};
use crate::error::{Error, Result};
use crate::optimizer::pool::Pool;

/// What the system hands out.
pub const PAGE: usize = 4096;
/// A huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Where the kernel lists NUMA nodes that have memory.
const NODES_WITH_MEMORY: &str = "/sys/devices/system/node/has_memory";
/// Where the kernel says whether it gives out huge pages.
const HUGE_PAGES_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

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

    fn map_with(len: usize, align: usize, flags: i32) -> Result<Self> {
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
    fn advise(&self, advice: i32) -> std::result::Result<(), SystemError> {
        // SAFETY: the range is mapped for as long as the span lives. None of the advice that this module gives
        // (huge pages, populate, fork) changes what the pages hold.
        match unsafe { libc::madvise(self.address().cast(), self.len, advice) } {
            0 => Ok(()),
            _ => Err(SystemError::last_os_error()),
        }
    }

    /// Has every page backed by memory now.
    fn populate(&self) -> Result<()> {
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
    fn interleave(&self, nodes: &[usize]) -> std::result::Result<(), SystemError> {
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

/// How an [`Arena`] is made.
#[derive(Clone, Copy, Default)]
pub struct ArenaOptions<'a> {
    /// Ask for huge pages. They make registration and address translation cheaper; where memory is fragmented, first
    /// touch can become slow.
    pub huge_pages: bool,
    /// The threads that touch the pages first; this thread alone where there is none.
    pub pool: Option<&'a Pool>,
}

/// One mapping, resident from the start, carved into spans from front to back, registered with a device if asked.
pub struct Arena {
    // Before the memory: registrations must end before the pages go.
    pins: Vec<(Pin, HostSpan)>,
    memory: HostSpan,
    carved: usize,
    notes: Vec<String>,
}

impl Arena {
    /// Maps and touches exactly `bytes` bytes (rounded up to pages).
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system refuses, [`Error::Worker`] when a thread fails.
    pub fn new(bytes: u64, options: ArenaOptions<'_>) -> Result<Self> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let huge = options.huge_pages && len >= HUGE_PAGE;
        let memory = HostSpan::map_with(len, if huge { HUGE_PAGE } else { PAGE }, 0)?;
        let mut notes = Vec::new();
        if len > 0 {
            let nodes = listed(&std::fs::read_to_string(NODES_WITH_MEMORY).unwrap_or_default());
            if nodes.len() > 1
                && let Err(e) = memory.interleave(&nodes)
            {
                let count = nodes.len();
                notes.push(format!("memory could not be spread over {count} NUMA nodes ({e}); it lies where it falls"));
            }
            if huge && let Some(reason) = ask_for_huge_pages(&memory) {
                notes.push(format!("no huge pages ({reason}); ordinary pages are used"));
            }
            touch(&memory, options.pool)?;
        }
        Ok(Self { pins: Vec::new(), memory, carved: 0, notes })
    }

    /// Bytes of the mapping, as asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// The whole of it.
    #[must_use]
    pub fn span(&self) -> &HostSpan {
        &self.memory
    }

    /// What could not be had as asked, a sentence each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The next `bytes` bytes that start at a multiple of `align` (a power of two, a page at most).
    ///
    /// # Errors
    /// [`Error::Invalid`] when the arena does not hold that much any more.
    pub fn carve(&mut self, bytes: u64, align: usize) -> Result<HostSpan> {
        assert!(align.is_power_of_two() && align <= PAGE, "an alignment of {align} is more than a page");
        let start = self.carved.next_multiple_of(align);
        let left = self.memory.len().saturating_sub(start);
        match usize::try_from(bytes) {
            Ok(len) if len <= left => {
                self.carved = start + len;
                Ok(self.memory.slice(start, len))
            }
            _ => Err(Error::Invalid(format!("an arena of {} bytes has {left} left, not {bytes}", self.bytes()))),
        }
    }

    /// Registers `pieces` (disjoint spans of this arena in ascending order, each starting on a page) with a device, in
    /// registrations of at most `max_bytes` that no piece straddles; a larger piece gets one of its own. All or none:
    /// when one is refused, those made before are undone, and the memory stays pageable.
    ///
    /// # Panics
    /// When a piece does not start on a page, lies outside the arena or out of order.
    pub fn register(&mut self, device: &dyn Device, pieces: &[HostSpan], max_bytes: u64) -> Pinning {
        let base = self.memory.address().addr();
        let ranges: Vec<Range<u64>> = pieces
            .iter()
            .filter(|piece| !piece.is_empty())
            .map(|piece| {
                assert!(Arc::ptr_eq(&piece.mapping, &self.memory.mapping), "a piece of another arena");
                let start = (piece.address().addr() - base) as u64;
                start..start + piece.len() as u64
            })
            .collect();
        let mut pinning = Pinning { asked: ranges.iter().map(|r| r.end - r.start).sum(), obtained: 0, refusal: None };
        let already = self.pins.len();
        for chunk in chunks(&ranges, max_bytes) {
            let offset = usize::try_from(chunk.start).expect("within the arena");
            let span = self.memory.slice(offset, usize::try_from(chunk.end - chunk.start).expect("within the arena"));
            match device.pin(&span) {
                Ok(pin) => {
                    // A child of a fork must not get copies of pages that the device writes. Kernels that refuse the
                    // advice lose nothing but that.
                    let _ = span.advise(libc::MADV_DONTFORK);
                    self.pins.push((pin, span));
                }
                Err(e) => {
                    pinning.refusal = Some(e.to_string());
                    for (pin, span) in self.pins.drain(already..).rev() {
                        drop(pin);
                        let _ = span.advise(libc::MADV_DOFORK);
                    }
                    return pinning;
                }
            }
        }
        pinning.obtained = pinning.asked;
        pinning
    }

    /// How many registrations are in force.
    #[must_use]
    pub fn num_pins(&self) -> usize {
        self.pins.len()
    }
}

/// Groups neighbouring pieces into ranges of at most `max_bytes`, none of which begins or ends inside a piece.
fn chunks(pieces: &[Range<u64>], max_bytes: u64) -> Vec<Range<u64>> {
    let mut chunks: Vec<Range<u64>> = Vec::new();
    for piece in pieces {
        assert!(piece.start.is_multiple_of(PAGE as u64), "a piece at {} does not start on a page", piece.start);
        match chunks.last_mut() {
            Some(last) if piece.end - last.start <= max_bytes => last.end = piece.end,
            last => {
                assert!(last.is_none_or(|l| l.end <= piece.start), "pieces overlap at {}", piece.start);
                chunks.push(piece.clone());
            }
        }
    }
    chunks
}

/// What came of asking a device to register memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes registered.
    pub obtained: u64,
    /// The first refusal, in the device's words.
    pub refusal: Option<String>,
}

impl Pinning {
    /// Takes another arena's into the same account, so that a run warns once.
    pub fn absorb(&mut self, other: Self) {
        self.asked += other.asked;
        self.obtained += other.obtained;
        self.refusal = self.refusal.take().or(other.refusal);
    }

    /// The one warning, when not everything asked for was obtained.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        self.refusal.as_ref().map(|refusal| {
            format!(
                "only {} of {} bytes of host memory could be pinned ({refusal}); the rest stays pageable, copies of it \
                 are slower. Raise the locked-memory limit (ulimit -l) or ask for less",
                self.obtained, self.asked
            )
        })
    }
}

/// Why there will be none, if so.
fn ask_for_huge_pages(memory: &HostSpan) -> Option<String> {
    if let Err(e) = memory.advise(libc::MADV_HUGEPAGE) {
        return Some(format!("the kernel refused the advice: {e}"));
    }
    let enabled = std::fs::read_to_string(HUGE_PAGES_ENABLED).unwrap_or_default();
    enabled.contains("[never]").then(|| format!("{HUGE_PAGES_ENABLED} says never"))
}

/// Backs all of `memory` with pages: each thread a contiguous part, cut between huge pages.
fn touch(memory: &HostSpan, pool: Option<&Pool>) -> Result<()> {
    let Some(pool) = pool else { return memory.populate() };
    let units = memory.len().div_ceil(HUGE_PAGE);
    let parts = pool.threads().min(units);
    let failure = Mutex::new(Ok(()));
    pool.run(parts, &|part| {
        let start = units * part / parts * HUGE_PAGE;
        let end = (units * (part + 1) / parts * HUGE_PAGE).min(memory.len());
        if let Err(e) = memory.slice(start, end - start).populate() {
            *failure.lock().unwrap_or_else(PoisonError::into_inner) = Err(e);
        }
    })?;
    failure.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The numbers of a kernel list such as `0-2,5`.
fn listed(text: &str) -> Vec<usize> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            numbers.extend(first..=last);
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists_are_read() {
        assert_eq!(listed("0\n"), [0]);
        assert_eq!(listed("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(listed(""), [0usize; 0]);
    }

    #[test]
    fn pieces_are_gathered_up_to_the_bound_and_across_gaps_only_where_they_fit() {
        let page = PAGE as u64;
        let pieces = [0..page, page..3 * page, 4 * page..5 * page, 5 * page..9 * page];
        assert_eq!(chunks(&pieces, 3 * page), [0..3 * page, 4 * page..5 * page, 5 * page..9 * page]);
        assert_eq!(chunks(&pieces, u64::MAX), [Range { start: 0, end: 9 * page }]);
        assert_eq!(chunks(&pieces, 1), pieces);
        assert_eq!(chunks(&[], 1), [0u64..0; 0]);
    }

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
    fn an_arena_asked_for_huge_pages_starts_on_one_and_is_as_long_as_asked() {
        let arena = Arena::new(5 << 20, ArenaOptions { huge_pages: true, pool: None }).unwrap();
        assert!(arena.span().address().addr().is_multiple_of(HUGE_PAGE));
        assert_eq!(arena.bytes(), 5 << 20);
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
