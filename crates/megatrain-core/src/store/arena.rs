//! Host memory: mappings that the core owns, carved into spans.
//!
//! The core maps its own pages instead of using a device's pinned allocator, which rounds sizes up and may hand out
//! write-combined memory that the optimizer could not read at speed. A mapping is made, spread over NUMA nodes, given
//! huge pages, touched by all threads at once, and only then registered: registering untouched memory would fault it in
//! on one thread under a lock of the driver.
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::device::{Device, Pin};
use crate::error::{Error, Result, Size};
use crate::host::pool::Pool;
use crate::host::span::{HostSpan, PAGE};

/// A huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Where the kernel lists NUMA nodes that have memory.
const NODES_WITH_MEMORY: &str = "/sys/devices/system/node/has_memory";
/// Where the kernel says whether it gives out huge pages.
const HUGE_PAGES_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

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
                notes.push(format!("memory could not be spread over {count} NUMA nodes ({e}); the system places it"));
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

    /// Requests that could not be honoured, one sentence per request.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The next `bytes` bytes that start at a multiple of `align` (a power of two, a page at most).
    ///
    /// # Errors
    /// [`Error`] when the arena does not hold that much any more.
    pub fn carve(&mut self, bytes: u64, align: usize) -> Result<HostSpan> {
        assert!(align.is_power_of_two() && align <= PAGE, "an alignment of {align} is more than a page");
        let start = self.carved.next_multiple_of(align);
        let left = self.memory.len().saturating_sub(start);
        match usize::try_from(bytes) {
            Ok(len) if len <= left => {
                self.carved = start + len;
                Ok(self.memory.slice(start, len))
            }
            _ => Err(Error::ArenaFull { bytes: self.bytes(), left: left as u64, asked: bytes }),
        }
    }

    /// Registers `pieces` (disjoint spans of this arena in ascending order, each starting on a page) with a device, in
    /// registrations of at most `max_bytes` that no piece straddles and that hold nothing between pieces; a larger piece gets
    /// one of its own. What is refused stays pageable: copies of it are slower, and all others are not.
    ///
    /// # Panics
    /// When a piece does not start on a page, is outside the arena or out of order.
    pub fn register(&mut self, device: &dyn Device, pieces: &[HostSpan], max_bytes: u64) -> Pinning {
        let base = self.memory.address().addr();
        let ranges: Vec<Range<u64>> = pieces
            .iter()
            .filter(|piece| !piece.is_empty())
            .map(|piece| {
                assert!(piece.shares_mapping(&self.memory), "a piece of another arena");
                let start = (piece.address().addr() - base) as u64;
                start..start + piece.len() as u64
            })
            .collect();
        let mut pinning = Pinning { asked: ranges.iter().map(|r| r.end - r.start).sum(), obtained: 0, refusal: None };
        let chunks = chunks(&ranges, max_bytes);
        let (mut first_refusal, mut refused) = (None, 0);
        for (index, chunk) in chunks.iter().enumerate() {
            let offset = usize::try_from(chunk.start).expect("within the arena");
            let span = self.memory.slice(offset, usize::try_from(chunk.end - chunk.start).expect("within the arena"));
            match device.pin(&span) {
                Ok(pin) => {
                    // A child of a fork must not get copies of pages that the device writes. Kernels that refuse the
                    // advice lose nothing but that.
                    let _ = span.advise(libc::MADV_DONTFORK);
                    self.pins.push((pin, span));
                    let inside = ranges.iter().filter(|piece| chunk.start <= piece.start && piece.end <= chunk.end);
                    pinning.obtained += inside.map(|piece| piece.end - piece.start).sum::<u64>();
                }
                Err(e) => {
                    refused += 1;
                    first_refusal.get_or_insert_with(|| {
                        let (number, of, size) = (index + 1, chunks.len(), Size(span.len() as u64));
                        format!("chunk {number} of {of}, {size}: {e}")
                    });
                }
            }
        }
        pinning.refusal = first_refusal.map(|first| match refused {
            1 => first,
            _ => format!("{first}; {refused} chunks were refused in all"),
        });
        pinning
    }

    /// Whether all of a span is inside a registration.
    #[must_use]
    pub fn is_registered(&self, piece: &HostSpan) -> bool {
        self.pins.iter().any(|(_, span)| span.contains(piece))
    }

    /// How many registrations are in force.
    #[must_use]
    pub fn num_pins(&self) -> usize {
        self.pins.len()
    }
}

/// Joins pieces of which one begins on the page after another's end into ranges of at most `max_bytes`, none of which begins
/// or ends inside a piece. What is between other pieces is somebody else's, who may have registered it already.
fn chunks(pieces: &[Range<u64>], max_bytes: u64) -> Vec<Range<u64>> {
    let mut chunks: Vec<Range<u64>> = Vec::new();
    for piece in pieces {
        assert!(piece.start.is_multiple_of(PAGE as u64), "a piece at {} does not start on a page", piece.start);
        match chunks.last_mut() {
            Some(last)
                if last.end.next_multiple_of(PAGE as u64) == piece.start && piece.end - last.start <= max_bytes =>
            {
                last.end = piece.end;
            }
            last => {
                assert!(last.is_none_or(|l| l.end <= piece.start), "pieces overlap at {}", piece.start);
                chunks.push(piece.clone());
            }
        }
    }
    chunks
}

/// Result of registering memory with a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes registered.
    pub obtained: u64,
    /// The first refusal: which chunk, how large, and the device's message; and how many there were.
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
    fn pieces_that_adjoin_are_joined_up_to_the_bound_and_no_others() {
        let page = PAGE as u64;
        let pieces = [0..page - 8, page..3 * page, 4 * page..5 * page, 5 * page..9 * page];
        assert_eq!(chunks(&pieces, 3 * page), [0..3 * page, 4 * page..5 * page, 5 * page..9 * page]);
        assert_eq!(chunks(&pieces, u64::MAX), [0..3 * page, 4 * page..9 * page]);
        assert_eq!(chunks(&pieces, 1), pieces);
        assert_eq!(chunks(&[], 1), [0u64..0; 0]);
    }

    #[test]
    fn an_arena_asked_for_huge_pages_starts_on_one_and_is_as_long_as_asked() {
        let arena = Arena::new(5 << 20, ArenaOptions { huge_pages: true, pool: None }).unwrap();
        assert!(arena.span().address().addr().is_multiple_of(HUGE_PAGE));
        assert_eq!(arena.bytes(), 5 << 20);
    }
}
