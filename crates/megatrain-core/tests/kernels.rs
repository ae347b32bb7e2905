//! The optimizer's loops: every body against the scalar one, and that against an fp64 AdamW.
use megatrain_core::adamw::AdamwScalars;
use megatrain_core::adamw::Isa;
use megatrain_core::adamw::kernels::{self, CANONICAL_NAN, Values, Weights};
use megatrain_core::host::HostSpan;
use megatrain_core::host::{Affinity, Pool};
use megatrain_core::layout::{Dtype, StateFormat};
use megatrain_core::optimizer::{Adamw, TensorSum, TensorUpdate};
use megatrain_core::random::SplitMix;
use proptest::prelude::*;

const LENGTHS: [usize; 9] = [0, 1, 7, 8, 15, 16, 17, 1023, 4097];

fn bodies() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

/// Between -1 and 1.
fn unit(random: &mut SplitMix) -> f32 {
    (random.draw() as i64 as f64 / 2f64.powi(63)) as f32
}

fn scalars(step: u64) -> AdamwScalars {
    AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.1, step, 0.7).unwrap()
}

/// A tensor's weights, moments and gradient, as bits.
#[derive(Clone, Debug, PartialEq)]
struct State {
    weights: Vec<u32>,
    exp_avg: Vec<u32>,
    exp_avg_sq: Vec<u32>,
    grad: Vec<u32>,
}

fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|&b| f32::from_bits(b)).collect()
}

fn bits(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|x| x.to_bits()).collect()
}

impl State {
    fn random(len: usize, seed: u64) -> Self {
        let mut random = SplitMix(seed);
        let mut draw = |scale: f32, positive: bool| -> Vec<u32> {
            let value = |x: f32| if positive { x.abs() } else { x };
            (0..len).map(|_| (value(unit(&mut random)) * scale).to_bits()).collect()
        };
        Self {
            weights: draw(1.0, false),
            exp_avg: draw(1e-2, false),
            exp_avg_sq: draw(1e-4, true),
            grad: draw(1e-2, false),
        }
    }

    /// One update of elements `[start, ..)`; the elements before and after must stay as they are.
    fn update(&mut self, isa: Isa, split: bool, narrow: bool, range: std::ops::Range<usize>, s: &AdamwScalars) {
        let mut exp_avg = floats(&self.exp_avg);
        let mut exp_avg_sq = floats(&self.exp_avg_sq);
        let grad_bf16: Vec<u16> = self.grad.iter().map(|&g| (g >> 16) as u16).collect();
        let grad_f32 = floats(&self.grad);
        let grad = if narrow { Values::Bf16(&grad_bf16[range.clone()]) } else { Values::F32(&grad_f32[range.clone()]) };
        let (m, v) = (&mut exp_avg[range.clone()], &mut exp_avg_sq[range.clone()]);
        if split {
            let (mut hi, mut lo): (Vec<u16>, Vec<u16>) = self.weights.iter().map(|&w| kernels::split_bits(w)).unzip();
            kernels::adamw(isa, Weights::Split { hi: &mut hi[range.clone()], lo: &mut lo[range] }, m, v, grad, s);
            self.weights = hi.iter().zip(&lo).map(|(&hi, &lo)| kernels::join_bits(hi, lo)).collect();
        } else {
            let mut weights = floats(&self.weights);
            kernels::adamw(isa, Weights::Full(&mut weights[range]), m, v, grad, s);
            self.weights = bits(&weights);
        }
        self.exp_avg = bits(&exp_avg);
        self.exp_avg_sq = bits(&exp_avg_sq);
    }
}

fn forms() -> impl Iterator<Item = (bool, bool)> {
    [(true, true), (true, false), (false, true), (false, false)].into_iter()
}

#[test]
fn all_bodies_agree_bit_for_bit_at_any_length_and_start_and_leave_the_neighbours_alone() {
    for (split, narrow) in forms() {
        for len in LENGTHS {
            for start in [0, 1, 3] {
                let before = State::random(start + len + 40, len as u64);
                let range = start..start + len;
                let mut expected = before.clone();
                expected.update(Isa::Scalar, split, narrow, range.clone(), &scalars(3));
                for isa in bodies() {
                    let mut state = before.clone();
                    state.update(isa, split, narrow, range.clone(), &scalars(3));
                    assert!(state == expected, "{isa:?} split {split} narrow {narrow} length {len} start {start}");
                }
                for (plane, old) in [
                    (&expected.weights, &before.weights),
                    (&expected.exp_avg, &before.exp_avg),
                    (&expected.exp_avg_sq, &before.exp_avg_sq),
                ] {
                    assert_eq!(plane[..start], old[..start]);
                    assert_eq!(plane[start + len..], old[start + len..]);
                    assert!(len == 0 || plane[range.clone()] != old[range.clone()]);
                }
            }
        }
    }
}

/// Any pattern at all, and more often those at which bodies part: zeros, subnormals, the largest, infinities, NaNs.
fn pattern() -> impl Strategy<Value = u32> {
    prop_oneof![
        2 => any::<u32>(),
        2 => (-1f32..1.0).prop_map(f32::to_bits),
        1 => (0u32..0x0100_0000, any::<bool>()).prop_map(|(x, negative)| x | u32::from(negative) << 31),
        1 => prop::sample::select(vec![
            0, 0x8000_0000, 1, 0x007f_ffff, 0x0080_0000, 0x807f_ffff, 0x7f7f_ffff, 0x7f7f_8000, 0x7f80_0000, 0xff80_0000,
            0x7f80_0001, 0xffff_ffff, 0x7fc0_0000,
        ]),
    ]
}

proptest! {
    #[test]
    fn all_bodies_agree_on_any_patterns(
        rows in prop::collection::vec((pattern(), pattern(), pattern(), pattern()), 1..80),
        lr in 0.0f64..0.1, beta1 in 0.0f64..0.99, beta2 in 0.0f64..0.9999,
        eps in prop::sample::select(vec![0.0, 1e-8, 1e-3]), decay in 0.0f64..1.0, step in 1u64..5000, scale in 0.0f64..1.5,
    ) {
        let s = AdamwScalars::new(lr, (beta1, beta2), eps, decay, step, scale).unwrap();
        let before = State {
            weights: rows.iter().map(|r| r.0).collect(),
            exp_avg: rows.iter().map(|r| r.1).collect(),
            exp_avg_sq: rows.iter().map(|r| r.2).collect(),
            grad: rows.iter().map(|r| r.3).collect(),
        };
        for (split, narrow) in forms() {
            let mut expected = before.clone();
            expected.update(Isa::Scalar, split, narrow, 0..rows.len(), &s);
            for isa in bodies() {
                let mut state = before.clone();
                state.update(isa, split, narrow, 0..rows.len(), &s);
                prop_assert_eq!(&state, &expected, "{:?} split {} narrow {}", isa, split, narrow);
            }
            for &moment in expected.exp_avg.iter().chain(&expected.exp_avg_sq) {
                let value = f32::from_bits(moment);
                prop_assert!(moment == 0 || value.is_normal() || value.is_infinite() || moment == CANONICAL_NAN);
            }
        }
    }
}

/// AdamW as PyTorch defines it, in fp64.
struct Reference {
    w: f64,
    m: f64,
    v: f64,
}

impl Reference {
    fn step(&mut self, g: f64, lr: f64, betas: (f64, f64), eps: f64, decay: f64, t: u64) -> f64 {
        self.w *= 1.0 - lr * decay;
        self.m = betas.0 * self.m + (1.0 - betas.0) * g;
        self.v = betas.1 * self.v + (1.0 - betas.1) * g * g;
        let bias = (1.0 - betas.0.powf(t as f64), 1.0 - betas.1.powf(t as f64));
        let update = lr / bias.0 * self.m / (self.v.sqrt() / bias.1.sqrt() + eps);
        self.w -= update;
        update
    }
}

#[test]
fn several_steps_follow_an_fp64_adamw() {
    const LEN: usize = 4097;
    let (lr, betas, eps, decay) = (1e-3, (0.9, 0.999), 1e-8, 0.1);
    for (split, narrow) in forms() {
        let mut state = State::random(LEN, 7);
        state.exp_avg = vec![0; LEN];
        state.exp_avg_sq = vec![0; LEN];
        let mut reference: Vec<Reference> =
            floats(&state.weights).into_iter().map(|w| Reference { w: w.into(), m: 0.0, v: 0.0 }).collect();
        let mut travelled = [0f64; LEN];
        for t in 1..=20 {
            state.grad = State::random(LEN, 100 + t).grad;
            let s = AdamwScalars::new(lr, betas, eps, decay, t, 1.0).unwrap();
            state.update(Isa::best(), split, narrow, 0..LEN, &s);
            for (i, r) in reference.iter_mut().enumerate() {
                let grad = if narrow { state.grad[i] & 0xffff_0000 } else { state.grad[i] };
                let update = r.step(f32::from_bits(grad).into(), lr, betas, eps, decay, t);
                travelled[i] += update.abs();
            }
        }
        for (i, r) in reference.iter().enumerate() {
            let weight = f64::from(f32::from_bits(state.weights[i]));
            let allowed = 2e-6 * r.w.abs().max(travelled[i]);
            assert!((weight - r.w).abs() <= allowed, "element {i}: {weight} against {} (split {split})", r.w);
            let v = f64::from(f32::from_bits(state.exp_avg_sq[i]));
            assert!((v - r.v).abs() <= 2e-6 * r.v, "element {i}: second moment {v} against {}", r.v);
        }
    }
}

#[test]
fn updates_smaller_than_a_bf16_step_are_not_lost() {
    const LEN: usize = 33;
    for isa in bodies() {
        let mut state = State {
            weights: vec![1f32.to_bits(); LEN],
            exp_avg: vec![0; LEN],
            exp_avg_sq: vec![0; LEN],
            grad: vec![0x3f80_0000; LEN],
        };
        let mut reference = Reference { w: 1.0, m: 0.0, v: 0.0 };
        for t in 1..=100 {
            let s = AdamwScalars::new(1e-4, (0.9, 0.999), 1e-8, 0.0, t, 1.0).unwrap();
            state.update(isa, true, true, 0..LEN, &s);
            reference.step(1.0, 1e-4, (0.9, 0.999), 1e-8, 0.0, t);
        }
        for &weight in &state.weights {
            let moved = f64::from(f32::from_bits(weight));
            assert!((moved - reference.w).abs() <= 1e-5 * reference.w, "{moved} against {}", reference.w);
            let hi = f32::from_bits(u32::from(kernels::split_bits(weight).0) << 16);
            assert!((hi - f32::from_bits(weight)).abs() <= 2f32.powi(-9), "the compute copy is the master rounded");
        }
    }
}

#[test]
fn rows_without_gradient_reach_exact_zero_moments_and_stay_there() {
    for isa in bodies() {
        let mut state = State::random(64, 5);
        let first = scalars(1);
        state.update(isa, true, true, 0..64, &first);
        state.grad = vec![0; 64];
        for t in 2..=1200 {
            state.update(isa, true, true, 0..64, &scalars(t));
            for &moment in state.exp_avg.iter().chain(&state.exp_avg_sq) {
                assert!(moment == 0 || f32::from_bits(moment).is_normal(), "step {t}: {moment:#x}");
            }
        }
        assert!(state.exp_avg.iter().all(|&m| m == 0), "0.9^1200 is far below the smallest normal number");
        let untouched = state.clone();
        let frozen = AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.0, 1201, 1.0).unwrap();
        state.update(isa, true, true, 0..64, &frozen);
        assert_eq!(state.weights, untouched.weights);
    }
}

#[test]
fn every_fp32_pattern_survives_the_split_and_its_upper_half_is_the_nearest_bf16() {
    const BLOCK: u32 = 1 << 14;
    let check = |first: u32, blocks: u32| {
        let mut master = vec![0f32; BLOCK as usize];
        let (mut hi, mut lo) = (vec![0u16; BLOCK as usize], vec![0u16; BLOCK as usize]);
        let mut back = vec![0f32; BLOCK as usize];
        for block in 0..blocks {
            let base = first + block * BLOCK;
            for (i, value) in master.iter_mut().enumerate() {
                *value = f32::from_bits(base + i as u32);
            }
            kernels::split_master(&master, &mut hi, &mut lo);
            kernels::join_master(&hi, &lo, &mut back);
            let mut wrong = 0;
            for (i, value) in back.iter().enumerate() {
                wrong |= value.to_bits() ^ (base + i as u32);
            }
            assert_eq!(wrong, 0, "a pattern from {base:#x} on did not survive");
            // As integers, neighbouring bf16 values are 2^16 apart, so the nearest is within half of that.
            let mut far = 0;
            for (i, &hi) in hi.iter().enumerate() {
                let distance = (u32::from(hi) << 16).wrapping_sub(base + i as u32).cast_signed();
                far |= i32::from(!(-0x8000..=0x8000).contains(&distance));
            }
            assert_eq!(far, 0, "an upper half from {base:#x} on is not the nearest");
        }
    };
    std::thread::scope(|scope| {
        for quarter in 0..4u32 {
            scope.spawn(move || check(quarter << 30, (1 << 30) / BLOCK));
        }
    });
}

#[test]
fn sums_of_squares_do_not_depend_on_the_body() {
    for len in LENGTHS.into_iter().chain([65536]) {
        let values = floats(&State::random(len, 11).weights);
        let narrow: Vec<u16> = values.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
        let wide = Values::F32(&values);
        let expected = kernels::sum_squares(Isa::Scalar, wide);
        let exact: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        assert!((expected - exact).abs() <= 1e-12 * exact);
        for isa in bodies() {
            assert_eq!(kernels::sum_squares(isa, wide).to_bits(), expected.to_bits());
            let (a, b) = (
                kernels::sum_squares(isa, Values::Bf16(&narrow)),
                kernels::sum_squares(Isa::Scalar, Values::Bf16(&narrow)),
            );
            assert_eq!(a.to_bits(), b.to_bits());
        }
    }
    for isa in bodies() {
        let mut values = [1f32; 100];
        values[77] = f32::INFINITY;
        assert_eq!(kernels::sum_squares(isa, Values::F32(&values)), f64::INFINITY);
        values[3] = f32::NAN;
        assert!(kernels::sum_squares(isa, Values::F32(&values)).is_nan());
        // The square of the largest finite value is finite in fp64.
        assert!(kernels::sum_squares(isa, Values::F32(&[f32::MAX; 40])).is_finite());
    }
}

#[test]
fn gradients_are_added_in_fp32_by_every_body() {
    for isa in bodies() {
        for len in LENGTHS {
            let (a, b) = (State::random(len, 1), State::random(len, 2));
            let mut store = floats(&a.weights);
            kernels::accumulate(isa, &mut store, Values::F32(&floats(&b.weights)));
            for (i, sum) in store.iter().enumerate() {
                assert_eq!(*sum, f32::from_bits(a.weights[i]) + f32::from_bits(b.weights[i]));
            }
            let narrow: Vec<u16> = b.weights.iter().map(|x| (x >> 16) as u16).collect();
            let before = store.clone();
            kernels::accumulate(isa, &mut store, Values::Bf16(&narrow));
            for (i, sum) in store.iter().enumerate() {
                assert_eq!(*sum, before[i] + f32::from_bits(u32::from(narrow[i]) << 16));
            }
        }
    }
}

fn span_of<T: megatrain_core::host::span::Plain>(values: &[T]) -> HostSpan {
    let span = HostSpan::map(size_of_val(values)).unwrap();
    span.elements_mut(0, values.len() as u64).copy_from_slice(values);
    span
}

fn updates(lengths: &[usize]) -> Vec<TensorUpdate> {
    let tensor = |&len: &usize| {
        let state = State::random(len, len as u64 + 1);
        let (hi, lo): (Vec<u16>, Vec<u16>) = state.weights.iter().map(|&w| kernels::split_bits(w)).unzip();
        let grad: Vec<u16> = state.grad.iter().map(|&g| (g >> 16) as u16).collect();
        TensorUpdate {
            weights: span_of(&hi),
            residual: Some(span_of(&lo)),
            exp_avg: span_of(&floats(&state.exp_avg)),
            exp_avg_sq: span_of(&floats(&state.exp_avg_sq)),
            state: StateFormat::default(),
            first: 0,
            grad: span_of(&grad),
            grad_dtype: Dtype::Bf16,
            numel: len as u64,
            scalars: scalars(2),
        }
    };
    lengths.iter().map(tensor).collect()
}

fn bytes_of(span: &HostSpan) -> Vec<u8> {
    let mut bytes = vec![0; span.len()];
    span.copy_to(&mut bytes);
    bytes
}

fn planes_of(updates: &[TensorUpdate]) -> Vec<Vec<u8>> {
    updates
        .iter()
        .flat_map(|u| [&u.weights, u.residual.as_ref().unwrap(), &u.exp_avg, &u.exp_avg_sq])
        .map(bytes_of)
        .collect()
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let lengths = [1, 4097, 0, 130, 70_001, 17];
    let expected = updates(&lengths);
    for update in &expected {
        update.apply(Isa::Scalar, 0, update.numel).unwrap();
    }
    for threads in [1, 2, 3, 5] {
        let pool = Pool::new(Some(threads), &Affinity::Free).unwrap();
        let state = updates(&lengths);
        Adamw::new(Isa::best()).update(&pool, &state).unwrap();
        assert!(planes_of(&state) == planes_of(&expected), "{threads} threads");

        let store = span_of(&vec![1f32; 70_001]);
        let sum = TensorSum { store: store.clone(), values: state[4].grad.clone(), dtype: Dtype::Bf16, numel: 70_001 };
        Adamw::new(Isa::best()).accumulate(&pool, &[sum]).unwrap();
        for (sum, &grad) in store.elements::<f32>(0, 70_001).iter().zip(state[4].grad.elements::<u16>(0, 70_001).iter())
        {
            assert_eq!(*sum, 1.0 + f32::from_bits(u32::from(grad) << 16));
        }
    }
}

#[test]
fn the_last_elements_beyond_two_to_the_31_are_updated() {
    const NUMEL: u64 = (1 << 31) + 16;
    let reserve = |size: u64| HostSpan::reserve((NUMEL * size) as usize).unwrap();
    let update = TensorUpdate {
        weights: reserve(2),
        residual: Some(reserve(2)),
        exp_avg: reserve(4),
        exp_avg_sq: reserve(4),
        state: StateFormat::default(),
        first: 0,
        grad: reserve(2),
        grad_dtype: Dtype::Bf16,
        numel: NUMEL,
        scalars: scalars(1),
    };
    let start = (1 << 31) - 32;
    update.grad.elements_mut::<u16>(start, 48).fill(0x3f80);
    update.apply(Isa::best(), start, 48).unwrap();
    let moved: Vec<u16> = update.weights.elements::<u16>(start - 8, 56).to_vec();
    assert!(moved[..8].iter().all(|&w| w == 0), "the elements before are untouched");
    assert!(moved[8..].iter().all(|&w| w == moved[8] && w != 0), "all of the last elements have moved alike");
    assert!(update.apply(Isa::best(), NUMEL - 1, 2).is_err());
    assert!(update.apply(Isa::best(), u64::MAX, 2).is_err());
}

#[test]
fn a_failed_thread_is_an_error_and_later_updates_work() {
    let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
    let state = updates(&[1000]);
    let adamw = Adamw::new(Isa::best());
    pool.fail_run(1);
    let error = adamw.update(&pool, &state).unwrap_err();
    assert!(error.to_string().contains("an optimizer thread failed"), "{error}");
    adamw.update(&pool, &state).unwrap();
}

#[test]
fn an_instruction_set_can_be_asked_for_and_unknown_ones_are_refused() {
    assert_eq!(Isa::select(Some("scalar")).unwrap(), Isa::Scalar);
    assert_eq!(Isa::select(Some("auto")).unwrap(), Isa::best());
    let error = Isa::select(Some("sse9")).unwrap_err().to_string();
    assert!(error.contains("sse9") && error.contains("avx512"), "{error}");
}

#[test]
fn the_environment_selects_the_bodies_of_a_process() {
    const CHILD: &str = "MEGATRAIN_TEST_EXPECTED_ISA";
    if let Ok(expected) = std::env::var(CHILD) {
        match Isa::select(None) {
            Ok(isa) => assert_eq!((isa.name(), Isa::preferred().name()), (expected.as_str(), expected.as_str())),
            Err(error) => assert!(error.to_string().starts_with(kernels::ISA_VARIABLE) && expected == "refused"),
        }
        assert_eq!(Isa::select(Some("auto")).unwrap(), Isa::best(), "an argument goes before the environment");
        return;
    }
    let asked = [("auto", Isa::best().name()), ("", Isa::best().name()), ("scalar", "scalar"), ("mmx", "refused")];
    let narrower = Isa::Avx2.available().then_some(("avx2", "avx2"));
    for (value, expected) in asked.into_iter().chain(narrower) {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_environment_selects_the_bodies_of_a_process"])
            .env(kernels::ISA_VARIABLE, value)
            .env(CHILD, expected)
            .output()
            .unwrap();
        assert!(status.status.success(), "{value}: {}", String::from_utf8_lossy(&status.stdout));
    }
}

/// Same bits on every processor: the value was the same on x86-64 (each body) and, emulated, on AArch64.
#[test]
fn results_are_those_of_every_other_processor() {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for (split, narrow) in forms() {
        let mut state = State::random(1000, 3);
        for t in 1..=5 {
            state.update(Isa::preferred(), split, narrow, 0..1000, &scalars(t));
        }
        for &word in state.weights.iter().chain(&state.exp_avg).chain(&state.exp_avg_sq) {
            hash = (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    assert_eq!(hash, 0x331e_b02c_31b0_16f5, "{hash:#018x}");
}
