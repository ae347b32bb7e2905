//! Home of every unit's weights, residuals and moments on the host.
//!
//! One arena holds the images, unit after unit in forward order, and is registered with the device; another holds what
//! only the host optimizer reads, after the state of units that are updated on the device, which is registered
//! too. Units whose state the plan puts on the device have no planes here, only their update
//! counts.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::Pool;
use crate::host::span::{HostSpan, PAGE};
use crate::layout::{Dtype, Precision, UnitLayout};

pub mod arena;
pub(crate) mod file;
mod planes;
pub mod spill;

pub(crate) use planes::slice;
pub use planes::{Plane, UnitPlanes};
pub(crate) use planes::{check_stored, elements_in};

use arena::{Arena, ArenaOptions, Pinning};

/// The largest registration unless a unit is larger, in bytes.
pub const REGISTRATION_BYTES: u64 = 1 << 30;

/// Host bytes by plane; the sums that the plan lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreBytes {
    /// Images: what is sent to the device.
    pub image: u64,
    /// Low halves of the masters.
    pub residual: u64,
    /// First moments.
    pub exp_avg: u64,
    /// Second moments.
    pub exp_avg_sq: u64,
}

impl StoreBytes {
    /// What a unit's planes take: 12 bytes a parameter with fp32 moments, padding and frozen tensors aside.
    #[must_use]
    pub fn of(layout: &UnitLayout) -> Self {
        let page = PAGE as u64;
        Self {
            image: layout.image_bytes.next_multiple_of(page),
            residual: layout.residual_bytes().next_multiple_of(page),
            exp_avg: layout.moment_bytes().next_multiple_of(page),
            exp_avg_sq: layout.moment_bytes().next_multiple_of(page),
        }
    }

    /// The same where only the image is held unless `whole`.
    fn held(layout: &UnitLayout, whole: bool) -> Self {
        let all = Self::of(layout);
        if whole { all } else { Self { image: all.image, ..Self::default() } }
    }

    /// All planes together.
    #[must_use]
    pub const fn total(&self) -> u64 {
        let state = self.residual.saturating_add(self.exp_avg).saturating_add(self.exp_avg_sq);
        self.image.saturating_add(state)
    }
}

impl std::iter::Sum for StoreBytes {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |sum, part| Self {
            image: sum.image.saturating_add(part.image),
            residual: sum.residual.saturating_add(part.residual),
            exp_avg: sum.exp_avg.saturating_add(part.exp_avg),
            exp_avg_sq: sum.exp_avg_sq.saturating_add(part.exp_avg_sq),
        })
    }
}

/// How a [`Store`] is made.
#[derive(Clone, Copy, Default)]
pub struct StoreOptions<'a> {
    /// Ask for huge pages.
    pub huge_pages: bool,
    /// The threads that touch the pages first.
    pub pool: Option<&'a Pool>,
    /// The device to register the images with; pageable without one.
    pub device: Option<&'a dyn Device>,
    /// The largest registration; [`REGISTRATION_BYTES`] when 0.
    pub registration_bytes: u64,
    /// Units whose residual and moments are registered too, since the device copies them; none of the others.
    pub registered_state: &'a [usize],
    /// Units of which at most the image is here: the home of all else is a disk.
    pub spilled: &'a [usize],
}

struct Unit {
    layout: UnitLayout,
    image: Option<HostSpan>,
    planes: Option<UnitPlanes>,
    /// Updates of each tensor so far.
    counts: Vec<AtomicU64>,
    /// Whether the home of what is not here is a disk, not the device.
    spilled: bool,
}

/// The host state of a model. Weights and moments start at zero.
pub struct Store {
    units: Vec<Unit>,
    images: Arena,
    state: Mutex<Arena>,
    registration_bytes: u64,
    pinning: Pinning,
}

impl Store {
    /// Maps, touches and registers the planes of every unit for which `on_host` is true, of which the host has any.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system refuses memory, [`Error::Worker`] when a thread fails, [`Error`]
    /// when the lists differ in length. That memory cannot be pinned is no error: see [`Store::warnings`].
    pub fn new(layouts: &[UnitLayout], on_host: &[bool], options: StoreOptions<'_>) -> Result<Self> {
        if layouts.len() != on_host.len() {
            let (what, plan, request) = ("the number of units", on_host.len().to_string(), layouts.len().to_string());
            return Err(Error::PlanMismatch { what, plan, request });
        }
        let whole = |unit: &usize| !options.spilled.contains(unit);
        let held = || (0..layouts.len()).filter(|&unit| on_host[unit]);
        let bytes: StoreBytes = held().map(|unit| StoreBytes::held(&layouts[unit], whole(&unit))).sum();
        let arena = ArenaOptions { huge_pages: options.huge_pages, pool: options.pool };
        let mut images = Arena::new(bytes.image, arena)?;
        let mut state = Arena::new(bytes.total() - bytes.image, arena)?;
        let counts = |layout: &UnitLayout| layout.tensors.iter().map(|_| AtomicU64::new(0)).collect();
        let bare = |(unit, layout): (usize, &UnitLayout)| {
            let (counts, spilled) = (counts(layout), !whole(&unit));
            Unit { layout: layout.clone(), image: None, planes: None, counts, spilled }
        };
        let mut units: Vec<Unit> = layouts.iter().enumerate().map(bare).collect();
        let copied = |unit: &usize| options.registered_state.contains(unit);
        for unit in held() {
            units[unit].image = Some(images.carve(layouts[unit].image_bytes, PAGE)?);
        }
        // Next to each other, so that few registrations hold all that is copied.
        let held_whole = || held().filter(whole);
        for unit in held_whole().filter(copied).chain(held_whole().filter(|unit| !copied(unit))) {
            let layout = &layouts[unit];
            units[unit].planes = Some(UnitPlanes {
                image: units[unit].image.clone().expect("every unit that is held has an image"),
                residual: match layout.precision {
                    Precision::Bf16 => Some(state.carve(layout.residual_bytes(), PAGE)?),
                    Precision::Fp32 => None,
                },
                exp_avg: state.carve(layout.moment_bytes(), PAGE)?,
                exp_avg_sq: state.carve(layout.moment_bytes(), PAGE)?,
            });
        }
        let registration_bytes =
            if options.registration_bytes == 0 { REGISTRATION_BYTES } else { options.registration_bytes };
        let mut store =
            Self { units, images, state: Mutex::new(state), registration_bytes, pinning: Pinning::default() };
        if let Some(device) = options.device {
            let images: Vec<_> = store.units.iter().filter_map(|u| u.image.clone()).collect();
            store.pinning = store.images.register(device, &images, registration_bytes);
            let of_state = store.register_state(device, options.registered_state);
            store.pinning.absorb(of_state);
        }
        Ok(store)
    }

    /// Registers residual and moments of those of `units` that are on the host, as far as they are not registered yet. What
    /// was refused before is asked for again.
    pub fn register_state(&self, device: &dyn Device, units: &[usize]) -> Pinning {
        let mut state = self.state();
        let mut pieces: Vec<HostSpan> = units
            .iter()
            .filter_map(|&unit| self.units[unit].planes.as_ref())
            .flat_map(|planes| planes.residual.iter().chain([&planes.exp_avg, &planes.exp_avg_sq]))
            .filter(|piece| !state.is_registered(piece))
            .cloned()
            .collect();
        pieces.sort_by_key(|piece| piece.address().addr());
        state.register(device, &pieces, self.registration_bytes)
    }

    /// It guards no value that a panic could leave half-changed.
    fn state(&self) -> MutexGuard<'_, Arena> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many units there are, wherever their state is.
    #[must_use]
    pub fn num_units(&self) -> usize {
        self.units.len()
    }

    /// A unit's layout.
    ///
    /// # Panics
    /// When there is no such unit.
    #[must_use]
    pub fn layout(&self, unit: usize) -> &UnitLayout {
        &self.units[unit].layout
    }

    /// A unit's image; `None` when the device or a disk holds it.
    ///
    /// # Panics
    /// When there is no such unit.
    #[must_use]
    pub fn image(&self, unit: usize) -> Option<&HostSpan> {
        self.units[unit].image.as_ref()
    }

    /// A unit's planes; `None` when the device holds them, or all but the image are on disk.
    ///
    /// # Panics
    /// When there is no such unit.
    #[must_use]
    pub fn planes(&self, unit: usize) -> Option<&UnitPlanes> {
        self.units[unit].planes.as_ref()
    }

    /// Bytes of host memory in the arenas, by plane.
    #[must_use]
    pub fn bytes(&self) -> StoreBytes {
        let held = self.units.iter().filter(|u| u.image.is_some());
        held.map(|u| StoreBytes::held(&u.layout, u.planes.is_some())).sum()
    }

    /// Bytes of the two mappings; equal to the sum of [`Store::bytes`].
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.images.bytes() + self.state().bytes()
    }

    /// How much could be registered.
    #[must_use]
    pub fn pinning(&self) -> &Pinning {
        &self.pinning
    }

    /// Requests about pages that could not be honoured, one sentence per request. Pinning is reported by [`Store::pinning`], so
    /// that a caller with more memory to pin can warn once for all of it.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = self.images.notes().iter().chain(self.state().notes()).cloned().collect();
        warnings.dedup();
        warnings
    }

    /// [`UnitPlanes::write`] into a plane that the host holds.
    ///
    /// # Errors
    /// As there, [`Error::UnknownUnit`], and [`Error::StateOnDevice`], [`Error::StateOnDisk`] or [`Error::WeightsOnDisk`] where
    /// the plane is elsewhere.
    pub fn write(
        &self,
        unit: usize,
        tensor: usize,
        plane: Plane,
        start: u64,
        dtype: Dtype,
        source: &[u8],
    ) -> Result<()> {
        let (layout, planes) = self.held(unit, plane)?;
        planes.write(layout, tensor, plane, start, dtype, source)
    }

    /// [`UnitPlanes::read`] from a plane that the host holds.
    ///
    /// # Errors
    /// As there, [`Error::UnknownUnit`], and [`Error::StateOnDevice`], [`Error::StateOnDisk`] or [`Error::WeightsOnDisk`] where
    /// the plane is elsewhere.
    pub fn read(&self, unit: usize, tensor: usize, plane: Plane, start: u64, out: &mut [u8]) -> Result<()> {
        let (layout, planes) = self.held(unit, plane)?;
        planes.read(layout, tensor, plane, start, out)
    }

    /// How often a tensor has been updated: AdamW's `step`.
    ///
    /// # Errors
    /// [`Error`] when there is no such tensor.
    pub fn step_count(&self, unit: usize, tensor: usize) -> Result<u64> {
        Ok(self.count(unit, tensor)?.load(Ordering::Acquire))
    }

    /// Sets how often a tensor has been updated.
    ///
    /// # Errors
    /// [`Error`] when there is no such tensor.
    pub fn set_step_count(&self, unit: usize, tensor: usize, count: u64) -> Result<()> {
        self.count(unit, tensor)?.store(count, Ordering::Release);
        Ok(())
    }

    fn count(&self, unit: usize, tensor: usize) -> Result<&AtomicU64> {
        let unit = self.unit(unit)?;
        unit.counts.get(tensor).ok_or_else(|| {
            let (unit, tensors) = (unit.layout.name.clone(), unit.counts.len());
            Error::UnknownTensor { unit, index: tensor, tensors }
        })
    }

    fn unit(&self, unit: usize) -> Result<&Unit> {
        self.units.get(unit).ok_or(Error::UnknownUnit { index: unit, units: self.units.len() })
    }

    fn held(&self, unit: usize, plane: Plane) -> Result<(&UnitLayout, UnitPlanes)> {
        let unit = self.unit(unit)?;
        let name = || unit.layout.name.clone();
        match (&unit.planes, &unit.image) {
            (Some(planes), _) => Ok((&unit.layout, planes.clone())),
            (None, _) if unit.spilled && plane != Plane::Weights => Err(Error::StateOnDisk { unit: name() }),
            (None, Some(image)) => {
                let (exp_avg, exp_avg_sq) = (image.slice(0, 0), image.slice(0, 0));
                Ok((&unit.layout, UnitPlanes { image: image.clone(), residual: None, exp_avg, exp_avg_sq }))
            }
            (None, None) if unit.spilled => Err(Error::WeightsOnDisk { unit: name() }),
            (None, None) => Err(Error::StateOnDevice { unit: name() }),
        }
    }
}
