//! Takes ranges of device regions one after the other and keeps the lines of the sum.
use super::sizes::aligned;
use super::{DeviceRange, Region};
use crate::error::{Error, Item, Result, Tier};
use crate::plan::Plan;

/// The exponent of the bytes that a tier can have: an exbibyte.
const MOST_BYTES_LOG2: u32 = 60;

pub(super) struct Carver {
    pub(super) sizes: [u64; Region::ALL.len()],
    pub(super) carved: Vec<(String, DeviceRange)>,
    pub(super) items: Vec<Item>,
}

impl Carver {
    /// Refuses what cannot be counted with: beyond this, sums and offsets would wrap.
    pub(super) fn check(&self) -> Result<()> {
        let totals = Plan::sum(&self.items);
        let lines = self.items.iter().map(|item| (item.what.as_str(), item.bytes));
        let sums = [
            ("all of the device's memory", totals.device),
            ("all of the host's memory", totals.host),
            ("all that is on disk", totals.disk),
        ];
        match lines.chain(sums).find(|&(_, bytes)| bytes >= 1 << MOST_BYTES_LOG2) {
            None => Ok(()),
            Some((what, bytes)) => Err(Error::TooLarge { what: what.to_owned(), bytes, log2: MOST_BYTES_LOG2 }),
        }
    }

    pub(super) fn device(&mut self, region: Region, what: &str, bytes: u64) -> DeviceRange {
        let len = aligned(bytes);
        let offset = self.sizes[region as usize];
        self.sizes[region as usize] = offset.saturating_add(len);
        self.item(what, Tier::Device, len, false);
        let range = DeviceRange { region, offset, len };
        self.carved.push((what.to_owned(), range));
        range
    }

    pub(super) fn item(&mut self, what: &str, tier: Tier, bytes: u64, pinned: bool) {
        if bytes == 0 {
            return;
        }
        match self.items.iter_mut().find(|i| i.what == what && i.tier == tier && i.pinned == pinned) {
            Some(item) => item.bytes = item.bytes.saturating_add(bytes),
            None => self.items.push(Item { what: what.to_owned(), tier, bytes, pinned }),
        }
    }
}
