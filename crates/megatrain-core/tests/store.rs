//! The store: values in and out, registration with a device, and what happens when a device refuses.
#![expect(unsafe_code, reason = "implements a device, whose copies are unsafe to queue")]
use std::sync::{Arc, Mutex};

use megatrain_core::adamw::AdamwScalars;
use megatrain_core::adamw::Isa;
use megatrain_core::device::{Device, DeviceAdamw, DeviceFacts, DeviceMemory, Event, Pin, Stream};
use megatrain_core::error::{Error, Result};
use megatrain_core::host::HostSpan;
use megatrain_core::host::{Affinity, Pool};
use megatrain_core::layout::{Dtype, Precision, Role, TensorSpec, UnitLayout};
use megatrain_core::optimizer::Adamw;
use megatrain_core::store::arena::{Arena, ArenaOptions, Pinning};
use megatrain_core::store::{Plane, Store, StoreOptions, UnitPlanes};

/// A device that can only register memory, and keeps a log of it.
#[derive(Default)]
struct Registrar {
    limit: Option<u64>,
    log: Arc<Mutex<Vec<String>>>,
    pinned: Arc<Mutex<Vec<(usize, usize)>>>,
}

struct Registered {
    start: usize,
    log: Arc<Mutex<Vec<String>>>,
    pinned: Arc<Mutex<Vec<(usize, usize)>>>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mapped = region_flags(self.start).is_some();
        self.log.lock().unwrap().push(format!("unpin while mapped: {mapped}"));
        self.pinned.lock().unwrap().retain(|&(start, _)| start != self.start);
    }
}

/// The kernel's flags of the mapping that holds an address.
fn region_flags(address: usize) -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in text.lines() {
        let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
        if let Some((start, end)) = range
            && let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
        {
            inside = (start..end).contains(&address);
        } else if inside && line.starts_with("VmFlags") {
            return Some(line.to_owned());
        }
    }
    None
}

impl Registrar {
    fn limited(limit: u64) -> Self {
        Self { limit: Some(limit), ..Self::default() }
    }

    fn sizes(&self) -> Vec<usize> {
        self.pinned.lock().unwrap().iter().map(|&(_, len)| len).collect()
    }
}

impl Device for Registrar {
    fn pin(&self, span: &HostSpan) -> Result<Pin> {
        let start = span.address() as usize;
        let mut pinned = self.pinned.lock().unwrap();
        assert!(pinned.iter().all(|&(other, len)| start + span.len() <= other || other + len <= start));
        let sum: usize = pinned.iter().map(|&(_, len)| len).sum();
        if self.limit.is_some_and(|limit| (sum + span.len()) as u64 > limit) {
            return Err(Error::Device { call: "pin", code: 2, detail: "out of memory".into() });
        }
        pinned.push((start, span.len()));
        let (log, pinned) = (Arc::clone(&self.log), Arc::clone(&self.pinned));
        Ok(Pin(Box::new(Registered { start, log, pinned })))
    }
    fn facts(&self) -> Result<DeviceFacts> {
        unreachable!()
    }
    fn allocate(&self, _: u64) -> Result<DeviceMemory> {
        unreachable!()
    }
    fn set_compute_stream(&self, _: u64) -> Result<()> {
        unreachable!()
    }
    unsafe fn copy_to_device(&self, _: Stream, _: &HostSpan, _: &DeviceMemory) -> Result<()> {
        unreachable!()
    }
    unsafe fn copy_to_host(&self, _: Stream, _: &DeviceMemory, _: &HostSpan) -> Result<()> {
        unreachable!()
    }
    fn copy_on_device(&self, _: Stream, _: &DeviceMemory, _: &DeviceMemory) -> Result<()> {
        unreachable!()
    }
    fn fill(&self, _: Stream, _: &DeviceMemory, _: u8) -> Result<()> {
        unreachable!()
    }
    fn sum_squares(
        &self,
        _: Stream,
        _: &DeviceMemory,
        _: Dtype,
        _: &DeviceMemory,
        _: u64,
        _: &DeviceMemory,
    ) -> Result<()> {
        unreachable!()
    }
    fn adamw(&self, _: Stream, _: &DeviceAdamw<'_>) -> Result<()> {
        unreachable!()
    }
    fn record(&self, _: Stream) -> Result<Event> {
        unreachable!()
    }
    fn wait(&self, _: Stream, _: &Event) -> Result<()> {
        unreachable!()
    }
    fn query(&self, _: &Event) -> Result<bool> {
        unreachable!()
    }
    fn synchronize(&self, _: &Event) -> Result<()> {
        unreachable!()
    }
    fn elapsed_ms(&self, _: &Event, _: &Event) -> Result<Option<f64>> {
        unreachable!()
    }
}

fn spec(name: &str, shape: &[u64], dtype: Dtype, role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.into(), dtype, role, group: 0, begin: 0 }
}

fn unit(name: &str, precision: Precision) -> UnitLayout {
    let specs = vec![
        spec("w", &[70, 100], Dtype::F32, Role::Trainable),
        spec("mask", &[3, 5], Dtype::F16, Role::Frozen),
        spec("b", &[33], Dtype::F32, Role::Trainable),
        spec("ids", &[7], Dtype::I64, Role::Frozen),
    ];
    UnitLayout::new(name, specs, precision).unwrap()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_ne_bytes(b)).collect()
}

fn one_unit(precision: Precision) -> Store {
    Store::new(&[unit("layers.0", precision)], &[true], StoreOptions::default()).unwrap()
}

#[test]
fn a_master_comes_back_exactly_whatever_it_is_stored_as() {
    let values: Vec<f32> = (0..7000).map(|i| (i as f32 - 3000.0) * 1.000_01e-3).collect();
    for precision in [Precision::Bf16, Precision::Fp32] {
        let store = one_unit(precision);
        store.write(0, 0, Plane::Master, 0, Dtype::F32, &bytes(&values)).unwrap();
        let mut out = vec![0u8; 7000 * 4];
        store.read(0, 0, Plane::Master, 0, &mut out).unwrap();
        assert_eq!(out, bytes(&values));
        store.write(0, 0, Plane::Master, 6990, Dtype::F32, &bytes(&[5.0; 10])).unwrap();
        let mut part = vec![0u8; 12 * 4];
        store.read(0, 0, Plane::Master, 6988, &mut part).unwrap();
        assert_eq!(floats(&part)[..2], values[6988..6990]);
        assert_eq!(floats(&part)[2..], [5.0; 10]);
        store.read(0, 2, Plane::Master, 0, &mut part).unwrap();
        assert_eq!(floats(&part), [0.0; 12], "the neighbour is untouched");
    }
}

#[test]
fn masters_are_taken_from_every_floating_point_format() {
    let store = one_unit(Precision::Bf16);
    let mut out = vec![0u8; 8];
    let f64s: Vec<u8> = [1.5f64, -0.1].iter().flat_map(|x| x.to_ne_bytes()).collect();
    store.write(0, 2, Plane::Master, 0, Dtype::F64, &f64s).unwrap();
    store.read(0, 2, Plane::Master, 0, &mut out).unwrap();
    assert_eq!(floats(&out), [1.5, -0.1f64 as f32]);
    let halves: Vec<u8> = [0x3e00u16, 0x8001].iter().flat_map(|x| x.to_ne_bytes()).collect();
    store.write(0, 2, Plane::Master, 0, Dtype::F16, &halves).unwrap();
    store.read(0, 2, Plane::Master, 0, &mut out).unwrap();
    assert_eq!(floats(&out), [1.5, -(2f32.powi(-24))]);
    let bf16s: Vec<u8> = [0x3fc0u16, 0xc0a0].iter().flat_map(|x| x.to_ne_bytes()).collect();
    store.write(0, 2, Plane::Master, 0, Dtype::Bf16, &bf16s).unwrap();
    store.read(0, 2, Plane::Master, 0, &mut out).unwrap();
    assert_eq!(floats(&out), [1.5, -5.0]);
    let mut image = vec![0u8; 4];
    store.read(0, 2, Plane::Weights, 0, &mut image).unwrap();
    assert_eq!(image, bf16s, "bf16 values are their own upper half");
    let mut residual = vec![1u8; 4];
    store.read(0, 2, Plane::Residual, 0, &mut residual).unwrap();
    assert_eq!(residual, [0; 4]);
}

#[test]
fn values_that_are_not_finite_are_refused_by_name_and_index_and_nothing_is_written() {
    let store = one_unit(Precision::Bf16);
    let mut values = vec![1f32; 7000];
    values[6001] = f32::NAN;
    let error = store.write(0, 0, Plane::Master, 0, Dtype::F32, &bytes(&values)).unwrap_err().to_string();
    assert_eq!(error, "w: element 6001 of master is NaN in fp32; values must be finite");
    let huge: Vec<u8> = 1e39f64.to_ne_bytes().to_vec();
    let error = store.write(0, 2, Plane::Master, 32, Dtype::F64, &huge).unwrap_err().to_string();
    assert_eq!(error, "b: element 32 of master is inf in fp32; values must be finite");
    let error = store.write(0, 2, Plane::ExpAvg, 1, Dtype::F32, &bytes(&[f32::NEG_INFINITY])).unwrap_err().to_string();
    assert_eq!(error, "b: element 1 of exp_avg is -inf in fp32; values must be finite");
    let mut out = vec![1u8; 7000 * 4];
    store.read(0, 0, Plane::Master, 0, &mut out).unwrap();
    assert!(out.iter().all(|&b| b == 0));
}

#[test]
fn frozen_tensors_keep_their_bytes_in_their_own_dtype() {
    let store = one_unit(Precision::Bf16);
    // An attention mask holds infinities on purpose.
    let mask: Vec<u8> = [0xfc00u16, 0x0001, 0x7e01].iter().flat_map(|x| x.to_ne_bytes()).collect();
    store.write(0, 1, Plane::Weights, 12, Dtype::F16, &mask).unwrap();
    let mut out = vec![0u8; 6];
    store.read(0, 1, Plane::Weights, 12, &mut out).unwrap();
    assert_eq!(out, mask);
    store.write(0, 3, Plane::Weights, 0, Dtype::I64, &7i64.to_ne_bytes()).unwrap();
    let error = store.write(0, 3, Plane::Weights, 0, Dtype::F32, &[0; 4]).unwrap_err().to_string();
    assert_eq!(error, "ids: weights takes i64, not f32");
    let error = store.read(0, 1, Plane::Master, 0, &mut out).unwrap_err().to_string();
    assert!(error.contains("mask is frozen and has no master"), "{error}");
}

#[test]
fn requests_that_leave_the_store_are_refused_with_the_numbers() {
    let store = one_unit(Precision::Fp32);
    let mut out = [0u8; 8];
    let error = store.read(0, 2, Plane::Master, 32, &mut out).unwrap_err().to_string();
    assert!(error.contains("b: elements 32..32+2 leave a tensor of 33"), "{error}");
    let error = store.read(0, 2, Plane::Master, u64::MAX, &mut out).unwrap_err().to_string();
    assert!(error.contains("leave a tensor of 33"), "{error}");
    let error = store.read(0, 2, Plane::Residual, 0, &mut out).unwrap_err().to_string();
    assert!(error.contains("stored in fp32"), "{error}");
    let error = store.read(0, 2, Plane::Master, 0, &mut out[..7]).unwrap_err().to_string();
    assert!(error.contains("7 bytes"), "{error}");
    assert!(store.read(0, 4, Plane::Master, 0, &mut out).unwrap_err().to_string().contains("no tensor 4: it has 4"));
    assert!(
        store.read(1, 0, Plane::Master, 0, &mut out).unwrap_err().to_string().contains("no unit 1: the model has 1")
    );
    assert!(store.write(0, 0, Plane::Master, 0, Dtype::I32, &[0; 4]).unwrap_err().to_string().contains("i32"));
    assert!("gradients".parse::<Plane>().unwrap_err().to_string().contains("exp_avg_sq"));
    assert_eq!("exp_avg".parse::<Plane>().unwrap(), Plane::ExpAvg);
}

#[test]
fn units_on_the_device_take_no_host_memory_but_keep_their_counts() {
    let layouts = [unit("embed", Precision::Bf16), unit("layers.0", Precision::Bf16)];
    let store = Store::new(&layouts, &[false, true], StoreOptions::default()).unwrap();
    assert!(store.planes(0).is_none() && store.planes(1).is_some());
    assert_eq!(store.mapped_bytes(), one_unit(Precision::Bf16).mapped_bytes());
    store.set_step_count(0, 2, 17).unwrap();
    assert_eq!(store.step_count(0, 2).unwrap(), 17);
    assert_eq!(store.step_count(1, 2).unwrap(), 0);
    let error = store.read(0, 0, Plane::Master, 0, &mut [0; 4]).unwrap_err().to_string();
    assert!(error.contains("embed is on the device"), "{error}");
    assert!(Store::new(&layouts, &[true], StoreOptions::default()).is_err());
    let bounce = UnitPlanes::map(&layouts[0]).unwrap();
    bounce.write(&layouts[0], 2, Plane::Master, 0, Dtype::F32, &bytes(&[2.5])).unwrap();
}

#[test]
fn an_update_through_the_planes_moves_its_tensor_and_no_padding() {
    let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
    for precision in [Precision::Bf16, Precision::Fp32] {
        let store = one_unit(precision);
        let (layout, planes) = (store.layout(0), store.planes(0).unwrap());
        let grad = HostSpan::map(usize::try_from(layout.elements * 4).unwrap()).unwrap();
        grad.elements_mut::<f32>(0, layout.elements).fill(1.0);
        let scalars = AdamwScalars::new(0.5, (0.9, 0.999), 1e-8, 0.0, 1, 1.0).unwrap();
        let updates = [0, 2].map(|tensor| planes.update(layout, tensor, &grad, Dtype::F32, scalars));
        Adamw::new(Isa::best()).update(&pool, &updates).unwrap();
        for (tensor, numel) in [(0, 7000), (2, 33)] {
            let mut out = vec![0u8; numel * 4];
            store.read(0, tensor, Plane::Master, 0, &mut out).unwrap();
            assert!(floats(&out).iter().all(|w| (w + 0.5).abs() < 1e-6));
        }
        let moved = planes.exp_avg.elements::<f32>(0, layout.elements).iter().filter(|&&m| m != 0.0).count();
        assert_eq!(moved, 7033);
    }
}

#[test]
fn images_are_registered_in_bounded_chunks_that_no_unit_straddles() {
    let layouts: Vec<_> = (0..5).map(|i| unit(&format!("layers.{i}"), Precision::Bf16)).collect();
    let image = usize::try_from(layouts[0].image_bytes).unwrap();
    let device = Registrar::default();
    let options = |most: usize| StoreOptions {
        device: Some(&device),
        registration_bytes: most as u64,
        ..StoreOptions::default()
    };
    let store = Store::new(&layouts, &[true; 5], options(2 * image + 100)).unwrap();
    assert_eq!(device.sizes(), [2 * image, 2 * image, image]);
    assert_eq!(store.pinning(), &Pinning { asked: 5 * image as u64, obtained: 5 * image as u64, refusal: None });
    let inside = store.planes(3).unwrap().image.address() as usize;
    assert!(region_flags(inside).unwrap().contains(" dc"), "registered memory is not handed to children of a fork");
    drop(store);
    assert_eq!(device.sizes(), [0usize; 0]);
    assert_eq!(*device.log.lock().unwrap(), ["unpin while mapped: true"; 3]);

    let store = Store::new(&layouts, &[true; 5], options(100)).unwrap();
    assert_eq!(device.sizes(), [image; 5], "a unit larger than a registration gets one of its own");
    drop(store);
    let store = Store::new(&layouts, &[true; 5], options(0)).unwrap();
    assert_eq!(device.sizes(), [5 * image]);
    drop(store);
}

#[test]
fn what_is_refused_stays_pageable_the_rest_is_pinned_and_the_store_works_with_one_warning() {
    let layouts: Vec<_> = (0..5).map(|i| unit(&format!("layers.{i}"), Precision::Bf16)).collect();
    let image = layouts[0].image_bytes;
    let mut seen = Vec::new();
    for limit in [3 * image, image, 0] {
        let device = Registrar::limited(limit);
        let options = StoreOptions { device: Some(&device), registration_bytes: image, ..StoreOptions::default() };
        let store = Store::new(&layouts, &[true; 5], options).unwrap();
        let pinned = limit / image;
        assert_eq!(device.sizes(), vec![image as usize; pinned as usize]);
        let pinning = store.pinning();
        assert_eq!((pinning.asked, pinning.obtained), (5 * image, limit));
        let warning = pinning.warning().unwrap();
        assert!(warning.contains(&format!("only {limit} of {} bytes", 5 * image)), "{warning}");
        assert!(warning.contains(&format!("chunk {} of 5, ", pinned + 1)) && warning.contains("KiB"), "{warning}");
        assert!(warning.contains("out of memory"), "{warning}");
        assert!(warning.contains(&format!("{} chunks were refused in all", 5 - pinned)), "{warning}");
        for layer in 0..5 {
            let inside = store.planes(layer).unwrap().image.address() as usize;
            assert_eq!(region_flags(inside).unwrap().contains(" dc"), (layer as u64) < pinned);
        }
        store.write(0, 0, Plane::Master, 0, Dtype::F32, &bytes(&[1.25, 2.5])).unwrap();
        let mut out = vec![0u8; 8];
        store.read(0, 0, Plane::Master, 0, &mut out).unwrap();
        seen.push(out);
    }
    assert!(seen.iter().all(|out| floats(out) == [1.25, 2.5]));
}

#[test]
fn state_is_registered_unit_by_unit_as_plans_ask_for_it_and_nothing_between_or_twice() {
    let layouts: Vec<_> = (0..5).map(|i| unit(&format!("layers.{i}"), Precision::Bf16)).collect();
    let (small, device) = (Registrar::limited(5 * layouts[0].image_bytes), Registrar::default());
    let options = StoreOptions { registered_state: &[3], ..StoreOptions::default() };
    let store = Store::new(&layouts, &[true; 5], StoreOptions { device: Some(&small), ..options }).unwrap();
    let state = |unit: usize| {
        let planes = store.planes(unit).unwrap();
        [planes.residual.clone().unwrap(), planes.exp_avg.clone(), planes.exp_avg_sq.clone()]
    };
    let bytes = |unit: usize| state(unit).iter().map(|plane| plane.len() as u64).sum::<u64>();
    let range = |unit: usize| {
        let [first, .., last] = state(unit);
        (first.address() as usize, last.address() as usize + last.len() - first.address() as usize)
    };
    assert_eq!(small.sizes().len(), 1, "there was room for the images alone");
    assert_eq!(store.pinning().asked - store.pinning().obtained, bytes(3));

    // In memory, the state of units 0, 1, 2 and 4 follows that of unit 3.
    let pinning = store.register_state(&device, &[0, 4]);
    assert_eq!(*device.pinned.lock().unwrap(), [range(0), range(4)], "the units between are left alone");
    assert_eq!(pinning, Pinning { asked: bytes(0) + bytes(4), obtained: bytes(0) + bytes(4), refusal: None });
    let pinning = store.register_state(&device, &[0, 2, 3]);
    assert_eq!(*device.pinned.lock().unwrap(), [range(0), range(4), range(3), range(2)]);
    assert_eq!(pinning.asked, bytes(2) + bytes(3), "what was refused is asked for again, what is registered is not");
    assert_eq!(pinning.warning(), None);
    store.register_state(&device, &[4, 1]);
    assert_eq!(device.sizes().len(), 5);
    assert_eq!(store.register_state(&device, &[4, 3, 2, 1, 0]), Pinning::default());
}

#[test]
fn what_the_host_does_not_hold_of_a_unit_is_said_to_be_where_it_is() {
    let layouts = ["embed", "layers.0", "layers.1", "head"].map(|name| unit(name, Precision::Bf16));
    // The first on the device, the second on disk, of the third the state on disk, the last on the host.
    let options = StoreOptions { spilled: &[1, 2], ..StoreOptions::default() };
    let store = Store::new(&layouts, &[false, false, true, true], options).unwrap();
    let dtype_of = |plane| match plane {
        Plane::Weights => Dtype::Bf16,
        Plane::Residual => Dtype::I16,
        _ => Dtype::F32,
    };
    let error = |unit: usize, plane: Plane| {
        let read = store.read(unit, 0, plane, 0, &mut [0; 4]).err().map(|error| error.to_string());
        let written = store.write(unit, 0, plane, 0, dtype_of(plane), &[0; 4]);
        assert_eq!(read, written.err().map(|error| error.to_string()));
        read
    };
    for plane in [Plane::Master, Plane::Weights, Plane::Residual, Plane::ExpAvg, Plane::ExpAvgSq] {
        let message = error(0, plane).unwrap();
        assert!(message.starts_with("the state of unit embed is on the device"), "{message}");
        let what = if plane == Plane::Weights { "weights of unit layers.0 are" } else { "state of unit layers.0 is" };
        let message = error(1, plane).unwrap();
        assert!(message.starts_with(&format!("the {what} on disk")), "{message}");
        match error(2, plane) {
            None => assert_eq!(plane, Plane::Weights, "the weights of layers.1 are on the host"),
            Some(message) => assert!(message.starts_with("the state of unit layers.1 is on disk"), "{message}"),
        }
        assert_eq!(error(3, plane), None);
    }
}

#[test]
fn several_arenas_make_one_warning() {
    let mut sum = Pinning { asked: 10, obtained: 10, refusal: None };
    assert_eq!(sum.warning(), None);
    sum.absorb(Pinning { asked: 5, obtained: 0, refusal: Some("no".into()) });
    sum.absorb(Pinning { asked: 5, obtained: 0, refusal: Some("never".into()) });
    assert!(sum.warning().unwrap().starts_with("only 10 of 20 bytes of host memory could be pinned (no)"));
}

#[test]
fn an_arena_is_carved_on_its_alignments_and_refuses_more_than_it_has() {
    let mut arena = Arena::new(10_000, ArenaOptions::default()).unwrap();
    let first = arena.carve(100, 256).unwrap();
    let second = arena.carve(100, 256).unwrap();
    let third = arena.carve(100, 4096).unwrap();
    assert_eq!(second.address() as usize - first.address() as usize, 256);
    assert_eq!(third.address() as usize - first.address() as usize, 4096);
    let error = arena.carve(6000, 256).unwrap_err().to_string();
    assert_eq!(error, "an arena of 10000 bytes has 5648 left, not 6000");
    arena.carve(5648, 256).unwrap();
    drop(arena);
    third.fill(3);
    assert_eq!(third.elements::<u8>(99, 1)[0], 3, "a span keeps its memory alive");
    assert_eq!(Arena::new(0, ArenaOptions::default()).unwrap().bytes(), 0);
}

#[test]
fn memory_that_no_machine_has_is_an_ordinary_error() {
    for bytes in [u64::MAX, 1 << 62] {
        let error = Arena::new(bytes, ArenaOptions { huge_pages: true, pool: None }).err().unwrap();
        assert!(matches!(error, Error::HostMemory { .. }), "{error}");
    }
}
