//! Smaller states: every body, every division of the work and every number of threads gives the same bits.
use megatrain_core::adamw::kernels::compact::{
    CompactMoments, CompactWeights, GROUP, GROUP_BYTES, adamw_compact, key_from, mix,
};
use megatrain_core::adamw::kernels::{self, Values};
use megatrain_core::adamw::{AdamwScalars, Isa};
use megatrain_core::host::{Affinity, HostSpan, Pool};
use megatrain_core::layout::{Dtype, Master, Moments, Precision, StateFormat, TensorSpec, UnitLayout};
use megatrain_core::optimizer::{Adamw, ElementRange, TensorUpdate};
use megatrain_core::random::SplitMix;
use megatrain_core::store::{Plane, UnitPlanes};

const MOMENTS: [Moments; 3] = [Moments::Fp32, Moments::Bf16, Moments::Bits8];

fn formats() -> Vec<(Precision, StateFormat)> {
    let both = |moments| [Master::Bits32, Master::Bits24].map(|master| StateFormat { moments, master });
    let mut all: Vec<_> = MOMENTS.into_iter().flat_map(both).map(|format| (Precision::Bf16, format)).collect();
    all.extend(MOMENTS.map(|moments| (Precision::Fp32, StateFormat { moments, master: Master::Bits32 })));
    all.retain(|(_, format)| *format != StateFormat::default());
    all
}

fn scalars(step: u64) -> AdamwScalars {
    let scalars = AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.1, step, 0.5).unwrap();
    scalars.rounded_by(17, "layers.0.weight", step)
}

/// One tensor, its unit and a gradient for every step.
struct Tensor {
    layout: UnitLayout,
    planes: UnitPlanes,
    grads: Vec<HostSpan>,
    dtype: Dtype,
}

fn tensor(len: u64, precision: Precision, state: StateFormat, dtype: Dtype, steps: usize) -> Tensor {
    let mut random = SplitMix(len + 1);
    let mut draw = |scale: f32| ((random.draw() >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * scale;
    let layout = UnitLayout::new("u", vec![TensorSpec::trainable("w", [len])], precision).unwrap().with_state(state);
    let planes = UnitPlanes::map(&layout).unwrap();
    let weights: Vec<u8> = (0..len).flat_map(|_| draw(0.05).to_ne_bytes()).collect();
    planes.write(&layout, 0, Plane::Master, 0, Dtype::F32, &weights).unwrap();
    let grads = (0..steps).map(|_| {
        let span = HostSpan::map(usize::try_from(layout.elements * dtype.size()).unwrap()).unwrap();
        for i in 0..len {
            // Every fifth element sees no gradient, every seventh next to none.
            let scale = if i % 5 == 0 { 0.0 } else { 0.1 };
            let value = draw(if i % 7 == 0 { 1e-9 } else { scale });
            match dtype {
                Dtype::Bf16 => span.elements_mut::<u16>(i, 1)[0] = (value.to_bits() >> 16) as u16,
                _ => span.elements_mut::<f32>(i, 1)[0] = value,
            }
        }
        span
    });
    let grads = grads.collect();
    Tensor { layout, planes, grads, dtype }
}

impl Tensor {
    fn update(&self, step: usize) -> TensorUpdate {
        self.planes.update(&self.layout, 0, &self.grads[step], self.dtype, scalars(step as u64 + 1))
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        let spans = [Some(&self.planes.image), self.planes.residual.as_ref(), Some(&self.planes.exp_avg)];
        let spans = spans.into_iter().flatten().chain([&self.planes.exp_avg_sq]);
        let bytes = |span: &HostSpan| {
            let mut bytes = vec![0; span.len()];
            span.copy_to(&mut bytes);
            bytes
        };
        spans.map(bytes).collect()
    }
}

#[test]
fn every_body_and_every_division_of_the_work_gives_the_same_bits() {
    for (precision, format) in formats() {
        for len in [1u64, 127, 128, 1000, 4099] {
            for dtype in [Dtype::Bf16, Dtype::F32] {
                let make = || tensor(len, precision, format, dtype, 3);
                let expected = make();
                for step in 0..3 {
                    expected.update(step).apply(Isa::Scalar, 0, len).unwrap();
                }
                let expected = expected.bytes();
                for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                    let whole = make();
                    let pieces = make();
                    for step in 0..3 {
                        whole.update(step).apply(isa, 0, len).unwrap();
                        // 8-bit moments are cut between groups, the others anywhere.
                        let cut = if format.moments == Moments::Bits8 { GROUP as u64 } else { 77 };
                        let update = pieces.update(step);
                        for start in
                            (0..len).step_by(usize::try_from(cut).unwrap()).collect::<Vec<_>>().into_iter().rev()
                        {
                            update.apply(isa, start, cut.min(len - start)).unwrap();
                        }
                    }
                    assert!(whole.bytes() == expected, "{format:?} {precision:?} {len} {dtype:?} {}", isa.name());
                    assert!(pieces.bytes() == expected, "pieces: {format:?} {precision:?} {len} {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_part_of_a_tensor_is_rounded_as_it_is_within_the_whole() {
    let mut random = SplitMix(5);
    for _ in 0..1000 {
        let (key, begin, counter) = (random.draw(), random.draw() >> 20, random.draw() as u32);
        let within = mix((begin as u32).wrapping_add(counter), key);
        assert_eq!(mix(counter, key_from(key, begin)), within);
    }
}

#[test]
fn neither_threads_nor_the_place_of_a_range_change_a_bit() {
    for (precision, format) in formats() {
        let make = || tensor(70_001, precision, format, Dtype::Bf16, 2);
        let expected = make();
        for step in 0..2 {
            expected.update(step).apply(Isa::best(), 0, 70_001).unwrap();
        }
        for threads in [1, 2, 5] {
            let pool = Pool::new(Some(threads), &Affinity::Free).unwrap();
            let found = make();
            for step in 0..2 {
                let update = found.update(step);
                let range = |start: u64, end: u64| ElementRange { tensor: 0, start, len: end - start };
                let adamw = Adamw::new(Isa::best());
                adamw
                    .update_ranges(&pool, std::slice::from_ref(&update), &[range(0, 1280), range(2560, 70_001)])
                    .unwrap();
                // The rest as an update of its own, as parts of state on disk are.
                let (from, len) = (1280, 1280);
                let part = |span: &HostSpan, from: u64, len: u64| span.slice(from as usize, len as usize);
                let (size, low) = (precision.dtype().size(), format.residual_size(precision));
                let stored = format.moments;
                let rest = TensorUpdate {
                    weights: part(&update.weights, from * size, len * size),
                    residual: update.residual.as_ref().map(|span| part(span, from * low, len * low)),
                    exp_avg: part(&update.exp_avg, stored.bytes(from), stored.bytes(len)),
                    exp_avg_sq: part(&update.exp_avg_sq, stored.bytes(from), stored.bytes(len)),
                    grad: part(&update.grad, from * 2, len * 2),
                    first: from,
                    numel: len,
                    ..update
                };
                adamw.update(&pool, &[rest]).unwrap();
            }
            assert!(found.bytes() == expected.bytes(), "{format:?} {precision:?}: {threads} threads");
        }
    }
}

#[test]
fn ranges_that_do_not_ascend_are_refused_before_anything_changes() {
    let (precision, format) = formats()[0];
    let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
    let found = tensor(4096, precision, format, Dtype::Bf16, 2);
    let before = found.bytes();
    let update = found.update(0);
    let range = |start: u64, end: u64| ElementRange { tensor: 0, start, len: end - start };
    for ranges in [[range(1024, 2048), range(0, 512)], [range(0, 1024), range(512, 2048)]] {
        let refused = Adamw::new(Isa::best()).update_ranges(&pool, std::slice::from_ref(&update), &ranges).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!(
                "ranges of an update must ascend; one from element {} of tensor 0 follows one from {}",
                ranges[1].start, ranges[0].start
            )
        );
    }
    assert!(found.bytes() == before);
}

/// Mean and largest distance of masters from those of fp32 state, in units of the learning rate, after 400 steps of noise around
/// a drift.
fn distance(format: StateFormat) -> (f64, f64) {
    const LEN: u64 = 2048;
    let states = [StateFormat::default(), format];
    let tensors = states.map(|state| tensor(LEN, Precision::Bf16, state, Dtype::F32, 1));
    let mut random = SplitMix(9);
    for step in 1..=400 {
        for i in 0..LEN {
            let noise = (random.draw() >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
            let scale = [1.0, 0.3, 0.1, 0.03][(i % 4) as usize];
            for tensor in &tensors {
                tensor.grads[0].elements_mut::<f32>(i, 1)[0] = scale * (noise + 0.3);
            }
        }
        for tensor in &tensors {
            let update = tensor.planes.update(&tensor.layout, 0, &tensor.grads[0], Dtype::F32, scalars(step));
            update.apply(Isa::best(), 0, LEN).unwrap();
        }
    }
    let masters = tensors.each_ref().map(|tensor| {
        let mut bytes = vec![0; LEN as usize * 4];
        tensor.planes.read(&tensor.layout, 0, Plane::Master, 0, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_ne_bytes(*b))).collect::<Vec<_>>()
    });
    let moved: Vec<f64> = masters[0].iter().zip(&masters[1]).map(|(a, b)| (a - b).abs() / 1e-3).collect();
    (moved.iter().sum::<f64>() / moved.len() as f64, moved.iter().fold(0.0, |a, &b| a.max(b)))
}

#[test]
fn four_hundred_steps_end_near_those_over_fp32_state() {
    // The weights have moved by nearly 200 learning rates. Gradients under one scale differ by a factor of 30.
    for (moments, mean, most) in [(Moments::Fp32, 0.05, 0.3), (Moments::Bf16, 1.5, 10.0), (Moments::Bits8, 9.0, 110.0)]
    {
        let found = distance(StateFormat { moments, master: Master::Bits24 });
        println!("{moments:?}: mean {:.3}, most {:.3} learning rates", found.0, found.1);
        assert!(found.0 < mean && found.1 < most, "{moments:?}: {found:?}");
    }
}

#[test]
fn over_fp32_state_the_compact_body_is_the_usual_one() {
    let Tensor { layout, planes, grads, .. } = tensor(1000, Precision::Fp32, StateFormat::default(), Dtype::F32, 1);
    let update = planes.update(&layout, 0, &grads[0], Dtype::F32, scalars(1));
    let mut weights = planes.image.elements::<f32>(0, 1000).to_vec();
    let (mut m, mut v) = (vec![0f32; 1000], vec![0f32; 1000]);
    let grad = grads[0].elements::<f32>(0, 1000).to_vec();
    let (compact, moments) = (CompactWeights::Full(&mut weights), CompactMoments::Fp32(&mut m, &mut v));
    adamw_compact(Isa::best(), compact, moments, Values::F32(&grad), &scalars(1), 0);
    update.apply(Isa::best(), 0, 1000).unwrap();
    assert_eq!(weights, planes.image.elements::<f32>(0, 1000).to_vec());
    assert_eq!(v, planes.exp_avg_sq.elements::<f32>(0, 1000).to_vec());
}

#[test]
fn a_24_bit_master_takes_the_nearest_and_keeps_bf16_weights_exactly() {
    let values = [1.0f32, -0.371_093_75, 1.000_123_4, -3.333_333, f32::MAX, 1e-30];
    let (mut hi, mut lo) = (vec![0u16; values.len()], vec![0u8; values.len()]);
    kernels::split_master_24(&values, &mut hi, &mut lo);
    let mut back = [0f32; 6];
    kernels::join_master_24(&hi, &lo, &mut back);
    for (&value, &back) in values.iter().zip(&back) {
        assert!(back.is_finite() && ((value - back) / value).abs() <= 2f32.powi(-16), "{value} as {back}");
    }
    assert_eq!(back[..2], values[..2]);
}

#[test]
fn moments_are_read_and_written_as_they_are_stored() {
    let format = StateFormat { moments: Moments::Bits8, master: Master::Bits24 };
    let Tensor { layout, planes, .. } = tensor(1000, Precision::Bf16, format, Dtype::F32, 1);
    let bytes: Vec<u8> = (0..8 * GROUP_BYTES).map(|i| (i * 7) as u8).collect();
    planes.write(&layout, 0, Plane::ExpAvg, 0, Dtype::U8, &bytes).unwrap();
    let mut part = vec![0; 100];
    planes.read(&layout, 0, Plane::ExpAvg, 200, &mut part).unwrap();
    assert_eq!(part, bytes[200..300]);
    let error = planes.write(&layout, 0, Plane::ExpAvg, 0, Dtype::F32, &[0; 4]).unwrap_err().to_string();
    assert!(error.contains("u8") && error.contains("f32"), "{error}");
    assert!(planes.write(&layout, 0, Plane::ExpAvg, 1, Dtype::U8, &bytes).is_err(), "a byte too many");
    let mut residual = vec![0; 1000];
    planes.read(&layout, 0, Plane::Residual, 0, &mut residual).unwrap();
    assert!(residual.iter().any(|&byte| byte != 0));
}
