//! AdamW over the host planes: whole units at once, divided over a fixed pool of threads.
use std::ops::Range;

use crate::adamw::AdamwScalars;
use crate::adamw::kernels::compact::{CompactMoments, CompactWeights, adamw_compact};
use crate::adamw::kernels::{self, Isa, Values, Weights};
use crate::error::{Error, Result};
use crate::host::{HostSpan, Pool};
use crate::layout::{Dtype, Master, Moments, Precision, Role, StateFormat, TENSOR_ALIGN, UnitLayout};
use crate::store::UnitPlanes;

pub mod rates;

/// One tensor's update. Every span covers exactly `numel` elements; nobody else touches them meanwhile.
#[derive(Clone, Debug)]
pub struct TensorUpdate {
    /// bf16 upper plane, or fp32 weights when `residual` is `None`.
    pub weights: HostSpan,
    /// What the master has beside it.
    pub residual: Option<HostSpan>,
    /// First moments.
    pub exp_avg: HostSpan,
    /// Second moments.
    pub exp_avg_sq: HostSpan,
    /// How residual and moments are stored.
    pub state: StateFormat,
    /// The place of the first element in its parameter, a multiple of [`TENSOR_ALIGN`] where moments are 8-bit ones.
    pub first: u64,
    /// Gradient in `grad_dtype`.
    pub grad: HostSpan,
    /// [`Dtype::Bf16`] or [`Dtype::F32`].
    pub grad_dtype: Dtype,
    /// Elements.
    pub numel: u64,
    /// Coefficients.
    pub scalars: AdamwScalars,
}

impl TensorUpdate {
    /// # Errors
    /// [`Error`] when a span's length or the gradient's dtype is not what the update says.
    fn check(&self) -> Result<()> {
        let grad_bytes = transfer_bytes(self.grad_dtype)?;
        let weight_bytes = if self.residual.is_some() { 2 } else { 4 };
        let elements = |size: u64| self.numel.saturating_mul(size);
        let moment_bytes = self.state.moments.bytes(self.numel);
        let spans = [
            ("weights", Some(&self.weights), elements(weight_bytes)),
            ("residual", self.residual.as_ref(), elements(self.state.residual_size(Precision::Bf16))),
            ("exp_avg", Some(&self.exp_avg), moment_bytes),
            ("exp_avg_sq", Some(&self.exp_avg_sq), moment_bytes),
            ("gradient", Some(&self.grad), elements(grad_bytes)),
        ];
        for (of, span, expected) in spans {
            if let Some(span) = span
                && expected != span.len() as u64
            {
                let (what, got) = (format!("an update of {} elements", self.numel), span.len() as u64);
                return Err(Error::WrongLength { what, of, expected, got });
            }
        }
        Ok(())
    }

    /// Updates `[start, start + len)` of the tensor on this thread.
    ///
    /// # Errors
    /// [`Error`] as for [`Adamw::update`], or when the range leaves the tensor.
    pub fn apply(&self, isa: Isa, start: u64, len: u64) -> Result<()> {
        self.check()?;
        check_range(start, len, self.numel)?;
        self.apply_checked(isa, std::slice::from_ref(&(start..start + len)));
        Ok(())
    }

    /// Updates the given ranges, ascending, on this thread. It claims all from the first one to the last: a claim for
    /// each would take longer than the update of a short one.
    fn apply_checked(&self, isa: Isa, ranges: &[Range<u64>]) {
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return };
        let (start, len) = (first.start, last.end - first.start);
        if self.state != StateFormat::default() {
            return self.apply_compact(isa, start, len, ranges);
        }
        self.with_planes(start, len, |mut weights, exp_avg, exp_avg_sq, grad| {
            for range in ranges {
                let part = within(range, start);
                let (exp_avg, exp_avg_sq) = (&mut exp_avg[part.clone()], &mut exp_avg_sq[part.clone()]);
                let (weights, grad) = (weights.part(part.clone()), grad.part(part));
                kernels::adamw(isa, weights, exp_avg, exp_avg_sq, grad, &self.scalars);
            }
        });
    }

    fn apply_compact(&self, isa: Isa, start: u64, len: u64, ranges: &[Range<u64>]) {
        let (bytes, end) = (self.state.moments.bytes(start), self.state.moments.bytes(start + len));
        let (first, second) = (&self.exp_avg, &self.exp_avg_sq);
        match self.state.moments {
            Moments::Fp32 => {
                let (mut m, mut v) = (first.elements_mut(start, len), second.elements_mut(start, len));
                self.with_moments(isa, start, len, CompactMoments::Fp32(&mut m, &mut v), ranges);
            }
            Moments::Bf16 => {
                let (mut m, mut v) = (first.elements_mut(start, len), second.elements_mut(start, len));
                self.with_moments(isa, start, len, CompactMoments::Bf16(&mut m, &mut v), ranges);
            }
            Moments::Bits8 => {
                let odd = ranges.iter().map(|r| r.start).find(|&start| {
                    !(self.first + start).is_multiple_of(TENSOR_ALIGN) || !start.is_multiple_of(TENSOR_ALIGN)
                });
                assert!(odd.is_none(), "8-bit moments are updated in whole groups, not from element {odd:?}");
                let (mut m, mut v) = (first.elements_mut(bytes, end - bytes), second.elements_mut(bytes, end - bytes));
                self.with_moments(isa, start, len, CompactMoments::Bits8(&mut m, &mut v), ranges);
            }
        }
    }

    fn with_moments(&self, isa: Isa, start: u64, len: u64, moments: CompactMoments<'_>, ranges: &[Range<u64>]) {
        match (&self.residual, self.state.master) {
            (Some(residual), Master::Bits32) => {
                let mut hi = self.weights.elements_mut(start, len);
                let mut lo = residual.elements_mut(start, len);
                self.with_weights(isa, start, CompactWeights::Split32(&mut hi, &mut lo), moments, ranges);
            }
            (Some(residual), Master::Bits24) => {
                let mut hi = self.weights.elements_mut(start, len);
                let mut lo = residual.elements_mut(start, len);
                self.with_weights(isa, start, CompactWeights::Split24(&mut hi, &mut lo), moments, ranges);
            }
            (None, _) => {
                let mut weights = self.weights.elements_mut(start, len);
                self.with_weights(isa, start, CompactWeights::Full(&mut weights), moments, ranges);
            }
        }
    }

    fn with_weights(
        &self,
        isa: Isa,
        start: u64,
        mut weights: CompactWeights<'_>,
        mut moments: CompactMoments<'_>,
        ranges: &[Range<u64>],
    ) {
        let len = weights.len() as u64;
        let (grad_bf16, grad_f32);
        let grad = if self.grad_dtype == Dtype::Bf16 {
            grad_bf16 = self.grad.elements::<u16>(start, len);
            Values::Bf16(&grad_bf16)
        } else {
            grad_f32 = self.grad.elements::<f32>(start, len);
            Values::F32(&grad_f32)
        };
        for range in ranges {
            let part = within(range, start);
            let (weights, moments) = (weights.part(part.clone()), moments.part(part.clone()));
            adamw_compact(isa, weights, moments, grad.part(part), &self.scalars, self.first + range.start);
        }
    }

    fn with_planes(&self, start: u64, len: u64, work: impl FnOnce(Weights<'_>, &mut [f32], &mut [f32], Values<'_>)) {
        let mut exp_avg = self.exp_avg.elements_mut::<f32>(start, len);
        let mut exp_avg_sq = self.exp_avg_sq.elements_mut::<f32>(start, len);
        let (grad_bf16, grad_f32);
        let grad = if self.grad_dtype == Dtype::Bf16 {
            grad_bf16 = self.grad.elements::<u16>(start, len);
            Values::Bf16(&grad_bf16)
        } else {
            grad_f32 = self.grad.elements::<f32>(start, len);
            Values::F32(&grad_f32)
        };
        if let Some(residual) = &self.residual {
            let mut hi = self.weights.elements_mut::<u16>(start, len);
            let mut lo = residual.elements_mut::<u16>(start, len);
            work(Weights::Split { hi: &mut hi, lo: &mut lo }, &mut exp_avg, &mut exp_avg_sq, grad);
        } else {
            let mut weights = self.weights.elements_mut::<f32>(start, len);
            work(Weights::Full(&mut weights), &mut exp_avg, &mut exp_avg_sq, grad);
        }
    }
}

impl UnitPlanes {
    /// The AdamW update of one trainable tensor by its part of the unit's gradient plane `grad`.
    ///
    /// # Panics
    /// When the spans are not those of the layout, or `tensor` is no trainable tensor of it.
    #[must_use]
    pub fn update(
        &self,
        layout: &UnitLayout,
        tensor: usize,
        grad: &HostSpan,
        grad_dtype: Dtype,
        scalars: AdamwScalars,
    ) -> TensorUpdate {
        let tensor = &layout.tensors[tensor];
        assert_eq!(tensor.spec.role, Role::Trainable, "{} is frozen", tensor.spec.name);
        let (first, numel) = (tensor.element, tensor.spec.numel());
        let part = |span: &HostSpan, size: u64| crate::store::slice(span, first * size, numel * size);
        let stored = layout.state.moments;
        let moments = |span: &HostSpan| crate::store::slice(span, stored.bytes(first), stored.bytes(numel));
        TensorUpdate {
            weights: part(&self.image, layout.precision.dtype().size()),
            residual: self.residual.as_ref().map(|span| part(span, layout.residual_size())),
            exp_avg: moments(&self.exp_avg),
            exp_avg_sq: moments(&self.exp_avg_sq),
            state: layout.state,
            first: 0,
            grad: part(grad, grad_dtype.size()),
            grad_dtype,
            numel,
            scalars,
        }
    }
}

/// One tensor's addition into an fp32 store. Every span covers exactly `numel` elements.
#[derive(Clone, Debug)]
pub struct TensorSum {
    /// fp32 store, added to.
    pub store: HostSpan,
    /// What is added, in `dtype`.
    pub values: HostSpan,
    /// [`Dtype::Bf16`] or [`Dtype::F32`].
    pub dtype: Dtype,
    /// Elements.
    pub numel: u64,
}

/// The host optimizer: which bodies run, and how work is divided.
#[derive(Clone, Copy, Debug)]
pub struct Adamw {
    isa: Isa,
}

impl Adamw {
    /// With the given bodies; see [`Isa::select`].
    #[must_use]
    pub const fn new(isa: Isa) -> Self {
        Self { isa }
    }

    /// The bodies in use.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Updates all of `updates` (of one unit, say) in one pass over the pool. The result does not depend on the number
    /// of threads.
    ///
    /// # Errors
    /// [`Error`] when a span's length or a gradient's dtype is not what its update says (nothing has changed
    /// then), [`Error::Worker`] when a thread failed (some elements may have changed).
    pub fn update(&self, pool: &Pool, updates: &[TensorUpdate]) -> Result<()> {
        updates.iter().try_for_each(TensorUpdate::check)?;
        let numels: Vec<u64> = updates.iter().map(|u| u.numel).collect();
        divide(pool, &numels, |s| {
            updates[s.tensor].apply_checked(self.isa, std::slice::from_ref(&(s.start..s.start + s.len)))
        })
    }

    /// Updates only these ranges of `updates`, whose `tensor` is an index into them. They ascend: tensor by tensor, and
    /// within one from its first element on.
    ///
    /// # Errors
    /// As for [`Adamw::update`], when a range leaves its tensor, and when they do not ascend.
    pub fn update_ranges(&self, pool: &Pool, updates: &[TensorUpdate], ranges: &[ElementRange]) -> Result<()> {
        updates.iter().try_for_each(TensorUpdate::check)?;
        ranges.iter().try_for_each(|s| check_range(s.start, s.len, updates[s.tensor].numel))?;
        let follows = |pair: &[ElementRange]| {
            pair[0].tensor < pair[1].tensor
                || pair[0].tensor == pair[1].tensor && pair[0].start + pair[0].len <= pair[1].start
        };
        if let Some(pair) = ranges.windows(2).find(|pair| !follows(pair)) {
            return Err(Error::RangeOrder { tensor: pair[1].tensor, first: pair[0].start, second: pair[1].start });
        }
        let lens: Vec<u64> = ranges.iter().map(|s| s.len).collect();
        let runs = element_ranges(&lens, pool.threads());
        pool.run(runs.len(), &|i| {
            for run in runs[i].chunk_by(|a, b| ranges[a.tensor].tensor == ranges[b.tensor].tensor) {
                let range =
                    |s: &ElementRange| ranges[s.tensor].start + s.start..ranges[s.tensor].start + s.start + s.len;
                let parts: Vec<Range<u64>> = run.iter().map(range).collect();
                updates[ranges[run[0].tensor].tensor].apply_checked(self.isa, &parts);
            }
        })
    }

    /// The memory traffic of [`Adamw::update`] without its arithmetic, to measure that against. Ruins the planes.
    ///
    /// # Errors
    /// As for [`Adamw::update`].
    pub fn touch(&self, pool: &Pool, updates: &[TensorUpdate]) -> Result<()> {
        updates.iter().try_for_each(TensorUpdate::check)?;
        let numels: Vec<u64> = updates.iter().map(|u| u.numel).collect();
        divide(pool, &numels, |s| {
            updates[s.tensor].with_planes(s.start, s.len, |weights, exp_avg, exp_avg_sq, grad| {
                kernels::touch(self.isa, weights, exp_avg, exp_avg_sq, grad);
            });
        })
    }

    /// Adds gradients into fp32 stores, in one pass over the pool.
    ///
    /// # Errors
    /// As for [`Adamw::update`].
    pub fn accumulate(&self, pool: &Pool, sums: &[TensorSum]) -> Result<()> {
        for sum in sums {
            let lengths = [("fp32 store", &sum.store, 4), ("gradient", &sum.values, transfer_bytes(sum.dtype)?)];
            for (of, span, element_bytes) in lengths {
                let got = span.len() as u64;
                if sum.numel.checked_mul(element_bytes) != Some(got) {
                    let what = format!("adding {} elements of {}", sum.numel, sum.dtype.name());
                    return Err(Error::WrongLength {
                        what,
                        of,
                        expected: sum.numel.saturating_mul(element_bytes),
                        got,
                    });
                }
            }
        }
        let numels: Vec<u64> = sums.iter().map(|s| s.numel).collect();
        divide(pool, &numels, |s| {
            let sum = &sums[s.tensor];
            let mut store = sum.store.elements_mut::<f32>(s.start, s.len);
            if sum.dtype == Dtype::Bf16 {
                kernels::accumulate(self.isa, &mut store, Values::Bf16(&sum.values.elements(s.start, s.len)));
            } else {
                kernels::accumulate(self.isa, &mut store, Values::F32(&sum.values.elements(s.start, s.len)));
            }
        })
    }
}

/// A range of elements, counted from `start`.
fn within(range: &Range<u64>, start: u64) -> Range<usize> {
    let index = |element: u64| usize::try_from(element - start).expect("within memory");
    index(range.start)..index(range.end)
}

fn transfer_bytes(dtype: Dtype) -> Result<u64> {
    match dtype {
        Dtype::Bf16 | Dtype::F32 => Ok(dtype.size()),
        other => Err(Error::WrongDtype { what: "a gradient".to_owned(), expected: "bf16 or f32", got: other.name() }),
    }
}

fn check_range(start: u64, len: u64, numel: u64) -> Result<()> {
    if start.checked_add(len).is_none_or(|end| end > numel) {
        return Err(Error::OutOfBounds { tensor: "an update".to_owned(), start, len, numel });
    }
    Ok(())
}

/// A contiguous part of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementRange {
    /// Index of the tensor.
    pub tensor: usize,
    /// First element.
    pub start: u64,
    /// Elements.
    pub len: u64,
}

/// Divides tensors of the given lengths, laid end to end, into `parts` runs of nearly equal length, cut at multiples of
/// [`TENSOR_ALIGN`] elements so that no two threads write one cache line. The same lengths give the same cuts.
///
/// # Panics
/// When `parts` is 0.
#[must_use]
pub fn element_ranges(numels: &[u64], parts: usize) -> Vec<Vec<ElementRange>> {
    assert!(parts > 0, "work cannot be divided into no parts");
    let blocks: u64 = numels.iter().map(|n| n.div_ceil(TENSOR_ALIGN)).sum();
    let parts_wide = parts as u64;
    // The first `blocks % parts` runs are one block longer; a product with `blocks` could overflow.
    let (each, longer) = (blocks / parts_wide, blocks % parts_wide);
    let (mut tensor, mut block) = (0, 0);
    (0..parts_wide)
        .map(|part| {
            let mut wanted = each + u64::from(part < longer);
            let mut run = Vec::new();
            while wanted > 0 {
                let left = numels[tensor].div_ceil(TENSOR_ALIGN) - block;
                let taken = left.min(wanted);
                if taken > 0 {
                    let start = block * TENSOR_ALIGN;
                    let len = (taken * TENSOR_ALIGN).min(numels[tensor] - start);
                    run.push(ElementRange { tensor, start, len });
                }
                wanted -= taken;
                block += taken;
                if taken == left {
                    (tensor, block) = (tensor + 1, 0);
                }
            }
            run
        })
        .collect()
}

fn divide(pool: &Pool, numels: &[u64], work: impl Fn(ElementRange) + Sync) -> Result<()> {
    let runs = element_ranges(numels, pool.threads());
    pool.run(runs.len(), &|i| runs[i].iter().copied().for_each(&work))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::host::Affinity;

    #[test]
    fn cuts_beyond_two_to_the_31_are_where_they_should_be() {
        for numel in [(1u64 << 31) - 1, 1 << 31, (1 << 31) + 16, (1 << 40) + 5] {
            for parts in [1, 3, 14] {
                let runs = element_ranges(&[numel], parts);
                let mut next = 0;
                for run in &runs {
                    for range in run {
                        assert_eq!(range.start, next);
                        next += range.len;
                    }
                }
                assert_eq!(next, numel);
            }
        }
    }

    proptest! {
        #[test]
        fn every_element_belongs_to_exactly_one_range(
            numels in prop::collection::vec(0u64..5000, 0..12),
            parts in 1usize..9,
        ) {
            let runs = element_ranges(&numels, parts);
            prop_assert_eq!(runs.len(), parts);
            let mut next = vec![0u64; numels.len()];
            for range in runs.iter().flatten() {
                prop_assert!(range.len > 0 && range.start.is_multiple_of(TENSOR_ALIGN));
                prop_assert_eq!(range.start, next[range.tensor]);
                next[range.tensor] += range.len;
            }
            prop_assert_eq!(next, numels);
            let blocks = |run: &Vec<ElementRange>| run.iter().map(|s| s.len.div_ceil(TENSOR_ALIGN)).sum::<u64>();
            let most = runs.iter().map(blocks).max().unwrap_or(0);
            let least = runs.iter().map(blocks).min().unwrap_or(0);
            prop_assert!(most - least <= 1);
        }
    }

    #[test]
    fn an_update_whose_spans_do_not_match_changes_nothing() {
        let pool = Pool::new(Some(1), &Affinity::Free).unwrap();
        let span = |bytes| HostSpan::map(bytes).unwrap();
        let scalars = AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, 1.0).unwrap();
        let update = TensorUpdate {
            weights: span(40),
            residual: None,
            exp_avg: span(40),
            exp_avg_sq: span(36),
            state: StateFormat::default(),
            first: 0,
            grad: span(20),
            grad_dtype: Dtype::Bf16,
            numel: 10,
            scalars,
        };
        let adamw = Adamw::new(Isa::best());
        let error = adamw.update(&pool, std::slice::from_ref(&update)).unwrap_err().to_string();
        assert!(error.contains("needs 40 bytes of exp_avg_sq, not 36"), "{error}");
        let update = TensorUpdate { exp_avg_sq: span(40), grad_dtype: Dtype::F16, ..update };
        let error = adamw.update(&pool, &[update]).unwrap_err().to_string();
        assert!(error.contains("f16"), "{error}");
    }
}
