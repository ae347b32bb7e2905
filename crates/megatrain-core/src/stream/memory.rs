//! Everything that an engine allocates, once, before the first step.
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::Options;
use super::kept::Kept;
use crate::device::{Device, DeviceMemory, Stream};
use crate::disk::Disk;
use crate::error::{Error, Item, Result, Tier};
use crate::host::Pool;
use crate::host::span::{HostSpan, PAGE};
use crate::plan::{DeviceRange, Placement, Region};
use crate::store::arena::{Arena, ArenaOptions};
use crate::store::spill::inputs::InputFiles;
use crate::store::spill::{BlockFiles, Spill};
use crate::store::{REGISTRATION_BYTES, Store, StoreOptions};

/// Device regions and host spans, as a placement asks for them.
pub(crate) struct Memory {
    /// Weights, residuals and moments on the host.
    pub(crate) store: Arc<Store>,
    /// State on disk.
    spill: RwLock<Option<Arc<Spill>>>,
    /// Buffers through which it passes.
    pub(crate) disk_buffers: Vec<HostSpan>,
    /// Buffers through which weights on disk are sent to the device.
    pub(crate) weight_buffers: Vec<HostSpan>,
    /// Layer inputs that wait on disk.
    inputs: RwLock<Option<Arc<InputFiles>>>,
    /// Buffers through which they pass.
    pub(crate) input_buffers: Vec<HostSpan>,
    /// Slabs of gradients.
    pub(crate) slabs: Vec<HostSpan>,
    /// Staged activations of each unit, those of a group's micro-batches one after the other.
    pub(crate) areas: Vec<HostSpan>,
    /// fp32 gradients accumulated over passes, by unit.
    pub(crate) accumulated: Vec<HostSpan>,
    /// Norm sums, by unit.
    pub(crate) sums: Vec<HostSpan>,
    /// The window through which state on the device is read and written.
    pub(crate) window: HostSpan,
    /// Held while the window is in use: checkpoints read and write planes from several threads.
    pub(crate) window_use: Mutex<()>,
    /// One lock per unit: callers may read and write planes from several threads, one writer or many readers at a time.
    pub(crate) callers: Vec<RwLock<()>>,
    /// Requests that could not be honoured, one sentence per request.
    pub(crate) warnings: Vec<String>,
    regions: Vec<DeviceMemory>,
    transfers: Arena,
    accumulation: Arena,
    passage: Arena,
}

fn fits(bytes: u64) -> usize {
    usize::try_from(bytes).expect("what has been mapped fits the address space")
}

impl Memory {
    /// Allocates everything but what is `kept`. When anything fails, all of it is freed.
    pub(crate) fn new(
        placement: &Placement,
        device: &dyn Device,
        pool: &Pool,
        disk: &Arc<dyn Disk>,
        options: &Options,
        kept: Option<&Kept>,
    ) -> Result<Self> {
        let huge_pages = options.huge_pages;
        // Room on disk is asked for first: a disk that is full should not cost the time that memory takes.
        let spill = match (kept, placement.disk_buffers.len()) {
            (Some(kept), _) => kept.spill.clone(),
            (None, 0) => None,
            (None, _) => {
                let files = BlockFiles::open(disk, &options.disk.clone().unwrap_or_default(), "state")?;
                let (layouts, parts) = (&placement.layouts, &placement.disk_parts);
                Some(Arc::new(Spill::new(files, layouts, parts, &placement.weights_on_disk)?))
            }
        };
        let inputs = if placement.input_buffers.is_empty() {
            None
        } else {
            let files = BlockFiles::open(disk, &options.disk.clone().unwrap_or_default(), "inputs")?;
            let names = placement.layouts.iter().map(|layout| layout.name.clone()).collect();
            let places: Vec<(u32, u64)> =
                placement.staged.iter().map(|staged| (staged.disk_places(), staged.largest_on_disk())).collect();
            Some(Arc::new(InputFiles::new(files, &places, names)?))
        };
        let spilled: Vec<usize> =
            (0..placement.layouts.len()).filter(|&unit| !placement.disk_parts[unit].is_empty()).collect();
        let region = |&region: &Region| {
            let held = kept.and_then(|kept| kept.region(region));
            held.map_or_else(|| allocate(device, placement.region_bytes(region)), Ok)
        };
        let regions = Region::ALL.iter().map(region).collect::<Result<_>>()?;
        let on_host: Vec<bool> = placement.host_state.iter().map(Option::is_some).collect();
        let registered: Vec<usize> =
            (0..on_host.len()).filter(|&unit| !placement.device_update_parts[unit].is_empty()).collect();
        let options = StoreOptions {
            huge_pages,
            pool: Some(pool),
            device: Some(device),
            registration_bytes: REGISTRATION_BYTES,
            registered_state: &registered,
            spilled: &spilled,
        };
        let store = match kept {
            None => Arc::new(Store::new(&placement.layouts, &on_host, options)?),
            Some(kept) => Arc::clone(&kept.store),
        };
        let mut pinning =
            if kept.is_some() { store.register_state(device, &registered) } else { store.pinning().clone() };

        let arena = ArenaOptions { huge_pages, pool: Some(pool) };
        let area_bytes = |unit: usize| placement.staged[unit].on_host();
        let units = 0..placement.layouts.len();
        let bytes: u64 = placement.slabs.iter().sum::<u64>()
            + placement.weight_buffers.iter().sum::<u64>()
            + placement.input_buffers.iter().sum::<u64>()
            + units.clone().map(area_bytes).sum::<u64>()
            + placement.norm_bytes()
            + placement.window;
        let mut transfers = Arena::new(bytes, arena)?;
        let slabs = placement.slabs.iter().map(|&b| transfers.carve(b, PAGE)).collect::<Result<Vec<_>>>()?;
        let areas = units.clone().map(|u| transfers.carve(area_bytes(u), PAGE)).collect::<Result<Vec<_>>>()?;
        let weight_buffers =
            placement.weight_buffers.iter().map(|&b| transfers.carve(b, PAGE)).collect::<Result<Vec<_>>>()?;
        let input_buffers =
            placement.input_buffers.iter().map(|&b| transfers.carve(b, PAGE)).collect::<Result<Vec<_>>>()?;
        let window = transfers.carve(placement.window, PAGE)?;
        let all_sums = transfers.carve(placement.norm_bytes(), PAGE)?;
        let mut pieces: Vec<HostSpan> =
            [&slabs, &areas, &weight_buffers, &input_buffers].into_iter().flatten().cloned().collect();
        pieces.extend([window.clone(), all_sums.clone()]);
        pinning.absorb(transfers.register(device, &pieces, REGISTRATION_BYTES));

        let mut offset = 0;
        let sums = placement.norm.iter().map(|norm| {
            let len = norm.as_ref().map_or(0, |n| fits(n.sums.len));
            offset += len;
            all_sums.slice(offset - len, len)
        });
        let sums = sums.collect();
        let mut accumulation = Arena::new(placement.store.iter().sum(), arena)?;
        let accumulated = placement.store.iter().map(|&b| accumulation.carve(b, PAGE)).collect::<Result<Vec<_>>>()?;

        let mut passage = Arena::new(placement.disk_buffers.iter().sum(), arena)?;
        let disk_buffers =
            placement.disk_buffers.iter().map(|&b| passage.carve(b, PAGE)).collect::<Result<Vec<_>>>()?;

        if let Some(spill) = &spill {
            // After what the device copies: where little memory may be locked, that gains more by it.
            let buffers = disk_buffers.iter().chain(&weight_buffers).chain([&window]);
            spill.register(&buffers.cloned().collect::<Vec<_>>());
        }

        if let Some(inputs) = &inputs {
            inputs.register(&input_buffers);
        }

        let mut warnings = store.warnings();
        warnings.extend(passage.notes().iter().cloned());
        warnings.extend(transfers.notes().iter().chain(accumulation.notes()).cloned());
        warnings.sort();
        warnings.dedup();
        warnings.extend(pinning.warning());
        warnings.extend(spill.iter().flat_map(|spill| spill.notes()).cloned());
        let of_inputs = inputs.iter().flat_map(|inputs| inputs.notes());
        let of_inputs: Vec<String> = of_inputs.filter(|note| !warnings.contains(note)).cloned().collect();
        warnings.extend(of_inputs);
        let memory = Self {
            store,
            spill: RwLock::new(spill),
            disk_buffers,
            weight_buffers,
            inputs: RwLock::new(inputs),
            input_buffers,
            slabs,
            areas,
            accumulated,
            sums,
            window,
            window_use: Mutex::default(),
            callers: on_host.iter().map(|_| RwLock::default()).collect(),
            warnings,
            regions,
            transfers,
            accumulation,
            passage,
        };
        memory.write_norm_tables(placement, device)?;
        Ok(memory)
    }

    /// State on disk, where the plan has any, until the engine is closed.
    pub(crate) fn spill(&self) -> Option<Arc<Spill>> {
        // It guards no value that a panic could leave half-changed.
        self.spill.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Layer inputs on disk, where the plan has any, until the engine is closed.
    pub(crate) fn input_files(&self) -> Option<Arc<InputFiles>> {
        // It guards no value that a panic could leave half-changed.
        self.inputs.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives the room on disk back as soon as nobody uses it, however long this lives. Whoever keeps the files does not keep the
    /// buffers of this.
    pub(crate) fn release_files(&self) {
        drop(self.inputs.write().unwrap_or_else(PoisonError::into_inner).take());
        let spill = self.spill.write().unwrap_or_else(PoisonError::into_inner).take();
        spill.iter().for_each(|spill| spill.register(&[]));
    }

    /// A device region, whole.
    pub(crate) fn region(&self, region: Region) -> &DeviceMemory {
        &self.regions[region as usize]
    }

    /// A range of a device region.
    pub(crate) fn at(&self, range: DeviceRange) -> DeviceMemory {
        self.region(range.region).slice(range.offset, range.len)
    }

    /// One micro-batch's part of a unit's staged activations.
    pub(crate) fn area(&self, unit: usize, micro_batch: u32, placement: &Placement) -> HostSpan {
        let staged = &placement.staged[unit];
        self.areas[unit].slice(fits(staged.offset(micro_batch)), fits(staged.bytes(micro_batch)))
    }

    /// The items as they were allocated: names as in the plan, bytes measured on what there is.
    pub(crate) fn items(&self, placement: &Placement) -> Vec<Item> {
        let mut items: Vec<Item> = Vec::new();
        let mut add = |what: &str, tier: Tier, bytes: u64, pinned: bool| {
            if bytes > 0 {
                match items.iter_mut().find(|i| i.what == what && i.tier == tier && i.pinned == pinned) {
                    Some(item) => item.bytes += bytes,
                    None => items.push(Item { what: what.to_owned(), tier, bytes, pinned }),
                }
            }
        };
        for (what, range) in placement.carved() {
            add(what, Tier::Device, self.at(*range).len, false);
        }
        let total = |spans: &[HostSpan]| spans.iter().map(|s| s.len() as u64).sum::<u64>();
        for (unit, parts) in placement.device_update_parts.iter().enumerate() {
            let Some(image) = self.store.image(unit) else { continue };
            add("weights", Tier::Host, image.len() as u64, true);
            let Some(planes) = self.store.planes(unit) else { continue };
            let copied = !parts.is_empty();
            add("weights: residual", Tier::Host, total(planes.residual.as_slice()), copied);
            add("exp_avg", Tier::Host, planes.exp_avg.len() as u64, copied);
            add("exp_avg_sq", Tier::Host, planes.exp_avg_sq.len() as u64, copied);
        }
        add("gradient slabs", Tier::Host, total(&self.slabs), true);
        add("activations", Tier::Host, total(&self.areas), true);
        add("gradient store", Tier::Host, total(&self.accumulated), false);
        add("weights: read from disk", Tier::Host, total(&self.weight_buffers), true);
        add("activations: to and from disk", Tier::Host, total(&self.input_buffers), true);
        let pieces = [&self.slabs, &self.areas, &self.weight_buffers, &self.input_buffers];
        let carved = pieces.into_iter().map(|spans| total(spans)).sum::<u64>() + self.window.len() as u64;
        add("gradient norm", Tier::Host, self.transfers.bytes() - carved, true);
        add("transfer window", Tier::Host, self.window.len() as u64, true);
        let (state, weights) = self.spill().map_or((0, 0), |spill| spill.bytes());
        add("optimizer state", Tier::Disk, state, false);
        add("weights", Tier::Disk, weights, false);
        add("activations", Tier::Disk, self.input_files().map_or(0, |inputs| inputs.bytes()), false);
        add("disk buffers", Tier::Host, total(&self.disk_buffers), false);
        items
    }

    /// Bytes of all host mappings.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.store.mapped_bytes() + self.transfers.bytes() + self.accumulation.bytes() + self.passage.bytes()
    }

    /// The tables of the gradient norm, sent once.
    fn write_norm_tables(&self, placement: &Placement, device: &dyn Device) -> Result<()> {
        for (layout, norm) in placement.layouts.iter().zip(&placement.norm) {
            let Some(norm) = norm else { continue };
            let table: Vec<u8> =
                layout.norm_blocks().iter().flat_map(|&(first, len)| [first, len]).flat_map(u64::to_ne_bytes).collect();
            let span = HostSpan::map(table.len())?;
            span.copy_from(&table);
            let memory = self.at(norm.table).slice(0, table.len() as u64);
            // SAFETY: the span is this function's own, which waits for the copy below.
            unsafe { device.copy_to_device(Stream::Upload, &span, &memory) }?;
            // The span is unmapped when it goes, so the copy must be over.
            device.synchronize(&device.record(Stream::Upload)?)?;
        }
        Ok(())
    }
}

impl Drop for Memory {
    /// For an engine that fails to start with files that are kept.
    fn drop(&mut self) {
        self.release_files();
    }
}

fn allocate(device: &dyn Device, bytes: u64) -> Result<DeviceMemory> {
    if bytes == 0 {
        return Ok(DeviceMemory { owner: Arc::new(()), address: 0, len: 0 });
    }
    device.allocate(bytes).map_err(|e| match e {
        Error::Device { call, code, detail } => {
            Error::Device { call, code, detail: format!("{detail} (asked for {bytes} bytes of the plan)") }
        }
        other => other,
    })
}
