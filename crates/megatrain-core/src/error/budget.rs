//! What a budget is made of, and the sum that a refusal shows.
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// Where bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Tier {
    /// GPU memory (HBM), or the simulated device's share of host memory.
    Device,
    /// Host memory.
    Host,
}

impl Tier {
    /// Its name on every surface.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

/// Bytes as people read them; GiB is 1024 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl std::fmt::Display for Size {
    #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let text = match units.into_iter().find(|&(_, scale)| self.0 >= scale) {
            Some((unit, scale)) => format!("{:.2} {unit}", self.0 as f64 / scale as f64),
            None => format!("{} B", self.0),
        };
        f.pad(&text)
    }
}

/// One line of a memory budget: what it is for, where it lives, and how many bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// What the bytes are for, as the plan table shows it.
    pub what: String,
    /// Where they live.
    pub tier: Tier,
    /// How many bytes.
    pub bytes: u64,
    /// Whether the device must be able to copy from or to them without a bounce (pinned host memory).
    pub pinned: bool,
}

/// The sum of a tier line by line, largest first.
pub(super) fn sum_that_does_not_fit(tier: Tier, needed: u64, available: u64, items: &[Item]) -> String {
    let tier_name = tier.name();
    let mut text = format!(
        "this does not fit: {} of {tier_name} memory are needed and {} allowed ({} too little)",
        Size(needed),
        Size(available),
        Size(needed.saturating_sub(available)),
    );
    write_lines(&mut text, items.iter().filter(|item| item.tier == tier));
    text
}

/// The same where device and host share one memory: the lines of both.
pub(super) fn sum_of_shared_memory(needed: u64, available: u64, items: &[Item]) -> String {
    let mut text = format!(
        "this does not fit: {} of host memory are needed, which the device shares, and {} allowed ({} too little)",
        Size(needed),
        Size(available),
        Size(needed.saturating_sub(available)),
    );
    write_lines(&mut text, items.iter());
    text
}

fn write_lines<'a>(text: &mut String, items: impl Iterator<Item = &'a Item>) {
    let mut lines: Vec<&Item> = items.filter(|item| item.bytes > 0).collect();
    lines.sort_by_key(|item| std::cmp::Reverse(item.bytes));
    for item in lines {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n  {:>12}  {:<6}  {}", Size(item.bytes), item.tier.name(), item.what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn sizes_are_read_in_units_of_1024() {
        let shown = [0, 1023, 1024, 3 << 19, 64 << 30, 5 << 40].map(|bytes| Size(bytes).to_string());
        assert_eq!(shown, ["0 B", "1023 B", "1.00 KiB", "1.50 MiB", "64.00 GiB", "5.00 TiB"]);
    }

    #[test]
    fn what_does_not_fit_is_said_as_a_sum_in_readable_units() {
        let item = |what: &str, tier, bytes| Item { what: what.to_owned(), tier, bytes, pinned: false };
        let items = vec![
            item("exp_avg", Tier::Host, 1 << 30),
            item("weights", Tier::Host, 3 << 30),
            item("slots", Tier::Device, 7 << 30),
        ];
        let error = Error::DoesNotFit { tier: Tier::Host, needed: 4 << 30, available: 512 << 20, items };
        assert_eq!(
            error.to_string(),
            "this does not fit: 4.00 GiB of host memory are needed and 512.00 MiB allowed (3.50 GiB too little)\n      \
             3.00 GiB  host    weights\n      1.00 GiB  host    exp_avg"
        );
    }
}
