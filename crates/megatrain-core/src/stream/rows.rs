//! Which elements of a unit an update is about: a part of it, and of the embedding only some rows.
use std::ops::Range;

use crate::error::{Error, Result};
use crate::layout::{Moments, Role, TENSOR_ALIGN, UnitLayout};
use crate::optimizer::ElementRange;

/// The rows of an embedding table that a step looks up, in all its micro-batches. The others get no gradient from the
/// embedding's backward, so that they can be updated before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The table: index of a trainable tensor of the embed unit; the one that the head uses too, where it uses one.
    pub tensor: usize,
    /// The rows, ascending.
    pub rows: Vec<u64>,
}

impl Rows {
    /// # Errors
    /// [`Error`] when `embed` has no such table or the rows are not distinct, ascending and inside it.
    pub(super) fn check(&self, embed: &UnitLayout) -> Result<()> {
        let table =
            embed.tensors.get(self.tensor).filter(|t| t.spec.role == Role::Trainable && t.spec.shape.len() == 2);
        let Some(table) = table else {
            return Err(Error::NotATable { tensor: self.tensor, unit: embed.name.clone() });
        };
        let (name, rows) = (&table.spec.name, table.spec.shape[0]);
        if let Some(pair) = self.rows.windows(2).find(|pair| pair[0] >= pair[1]) {
            let (first, second) = (pair[0], pair[1]);
            return Err(Error::RowOrder { table: name.clone(), first, second });
        }
        match self.rows.last() {
            Some(&last) if last >= rows => Err(Error::UnknownRow { table: name.clone(), row: last, rows }),
            _ => Ok(()),
        }
    }
}

/// Whose gradients an update takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share<'a> {
    /// All of them.
    All,
    /// Those of the rows that are not looked up.
    Early(Option<&'a Rows>),
    /// All but those.
    Late(Option<&'a Rows>),
}

/// The ranges of `layout`'s trainable tensors inside `part` (elements of the plane) that belong to `share`.
pub(super) fn element_ranges(layout: &UnitLayout, part: &Range<u64>, share: Share<'_>) -> Vec<ElementRange> {
    let mut list = Vec::new();
    // 8-bit moments are updated in whole groups, with the rows that are looked up.
    let step = if layout.state.moments == Moments::Bits8 { TENSOR_ALIGN } else { 1 };
    for (tensor, placed) in layout.tensors.iter().enumerate().filter(|(_, t)| t.spec.role == Role::Trainable) {
        let end = placed.element + placed.spec.numel();
        let inside = part.start.clamp(placed.element, end) - placed.element
            ..part.end.clamp(placed.element, end) - placed.element;
        let mut push = |range: Range<u64>| {
            if !range.is_empty() {
                list.push(ElementRange { tensor, start: range.start, len: range.end - range.start });
            }
        };
        match share {
            Share::Early(Some(rows)) if rows.tensor == tensor => {
                let mut at = inside.start;
                runs(rows, placed.spec.shape[1], step, &inside, |run| {
                    push(at..run.start);
                    at = run.end;
                });
                push(at..inside.end);
            }
            Share::Late(Some(rows)) if rows.tensor == tensor => runs(rows, placed.spec.shape[1], step, &inside, push),
            Share::Early(_) => {}
            Share::All | Share::Late(_) => push(inside),
        }
    }
    list
}

/// Calls `each` with the runs of elements inside `inside` that neighbouring rows of the list make up, extended to multiples of
/// `step`.
fn runs(rows: &Rows, width: u64, step: u64, inside: &Range<u64>, mut each: impl FnMut(Range<u64>)) {
    let first = rows.rows.partition_point(|&row| ((row + 1) * width).next_multiple_of(step) <= inside.start);
    let mut run: Option<Range<u64>> = None;
    for &row in rows.rows[first..].iter().take_while(|&&row| row * width / step * step < inside.end) {
        let (start, end) = (row * width / step * step, ((row + 1) * width).next_multiple_of(step));
        let (start, end) = (start.max(inside.start), end.min(inside.end));
        match &mut run {
            Some(run) if run.end >= start => run.end = end,
            _ => {
                run.replace(start..end).into_iter().for_each(&mut each);
            }
        }
    }
    run.into_iter().for_each(each);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::{Dtype, Precision, StateFormat, TensorSpec};

    fn layout() -> UnitLayout {
        let spec = |name: &str, shape: &[u64], role| TensorSpec {
            name: name.to_owned(),
            shape: shape.to_vec(),
            dtype: Dtype::F32,
            role,
            group: 0,
            begin: 0,
        };
        let tensors = vec![
            spec("norm", &[5], Role::Trainable),
            spec("table", &[29, 7], Role::Trainable),
            spec("buffer", &[29, 7], Role::Frozen),
            spec("positions", &[3, 7], Role::Trainable),
        ];
        UnitLayout::new("embed", tensors, Precision::Bf16).unwrap()
    }

    proptest! {
        #[test]
        fn early_and_late_are_every_element_of_every_part_once(
            rows in prop::collection::btree_set(0u64..29, 0..29),
            cuts in prop::collection::btree_set(0u64..700, 0..5),
            given in any::<bool>(),
        ) {
            let layout = layout();
            let rows = Rows { tensor: 1, rows: rows.into_iter().collect() };
            rows.check(&layout).unwrap();
            let rows = given.then_some(&rows);
            let mut edges: Vec<u64> = cuts.into_iter().collect();
            edges.push(layout.elements);
            let mut seen = [vec![0; 5], vec![0; 29 * 7], vec![], vec![0; 3 * 7]];
            let mut start = 0;
            for end in edges {
                let mut found = 0;
                for share in [Share::Early(rows), Share::Late(rows)] {
                    for s in element_ranges(&layout, &(start..end), share) {
                        found += s.len;
                        for element in s.start..s.start + s.len {
                            seen[s.tensor][usize::try_from(element).unwrap()] += 1;
                            let touched = s.tensor != 1 || rows.is_none_or(|r| r.rows.contains(&(element / 7)));
                            prop_assert_eq!(touched, matches!(share, Share::Late(_)));
                        }
                    }
                }
                let all: u64 = element_ranges(&layout, &(start..end), Share::All).iter().map(|s| s.len).sum();
                prop_assert_eq!(found, all);
                start = end;
            }
            prop_assert!(seen.iter().flatten().all(|&times| times == 1));
        }
    }

    #[test]
    fn groups_of_eight_bit_moments_are_updated_as_a_whole() {
        let spec = TensorSpec::trainable("table", [40, 48]);
        let format = StateFormat { moments: Moments::Bits8, ..StateFormat::default() };
        let layout = UnitLayout::new("embed", vec![spec], Precision::Bf16).unwrap().with_state(format);
        let rows = Rows { tensor: 0, rows: vec![3, 4, 20, 39] };
        let ranges = |share, part: Range<u64>| -> Vec<(u64, u64)> {
            element_ranges(&layout, &part, share).iter().map(|s| (s.start, s.start + s.len)).collect()
        };
        // Rows 3 and 4 are elements 144 to 240, row 20 960 to 1008, row 39 1872 to 1920.
        assert_eq!(ranges(Share::Late(Some(&rows)), 0..1920), [(128, 256), (896, 1024), (1792, 1920)]);
        assert_eq!(ranges(Share::Early(Some(&rows)), 0..1920), [(0, 128), (256, 896), (1024, 1792)]);
        assert_eq!(ranges(Share::Late(Some(&rows)), 896..1024), [(896, 1024)]);
        assert_eq!(ranges(Share::Late(Some(&rows)), 1024..1152), []);
    }

    #[test]
    fn rows_that_cannot_be_are_refused_by_name() {
        let layout = layout();
        let refused =
            |tensor, rows: &[u64]| Rows { tensor, rows: rows.to_vec() }.check(&layout).unwrap_err().to_string();
        assert!(refused(2, &[1]).contains("not a trainable embedding table"));
        assert!(refused(0, &[1]).contains("not a trainable embedding table"));
        assert!(refused(9, &[1]).contains("not a trainable embedding table"));
        assert!(refused(1, &[3, 3]).contains("3 follows 3"));
        assert!(refused(1, &[4, 29]).contains("row 29 was looked up in table, which has 29 rows"));
    }
}
