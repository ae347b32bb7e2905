//! The optimizer beside a library that has switched the thread to flush-to-zero.
#![cfg(target_arch = "x86_64")]
#![expect(unsafe_code, reason = "reads and writes MXCSR, as such a library does")]
use megatrain_core::adamw::AdamwScalars;
use megatrain_core::adamw::Isa;
use megatrain_core::adamw::kernels::{self, Values, Weights};
use megatrain_core::host::{Affinity, Pool};

/// Flush-to-zero, denormals-are-zero, rounding towards zero.
const FAST_MATH: u32 = 0x1f80 | 0x8040 | 0x6000;

fn mode() -> u32 {
    let mut value = 0u32;
    // SAFETY: stmxcsr writes four bytes to the address of `value`, which is live.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack)) };
    // The sticky exception flags are no mode.
    value & !0x3f
}

fn set_mode(value: u32) {
    // SAFETY: ldmxcsr reads four bytes from the address of `value`; no reserved bit is set.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, readonly)) };
}

/// Numbers small enough to be flushed, and doubles that round to such; made where the mode is the default.
fn inputs() -> (Vec<f32>, Vec<f64>) {
    let tiny: Vec<f32> = (0..100u32).map(|i| f32::from_bits(i * 0x0001_a375 + 1)).collect();
    let doubles = tiny.iter().map(|&x| f64::from(x) * 1.000_000_1).collect();
    (tiny, doubles)
}

/// Bits of everything that the kernels produce from them.
fn results(isa: Isa, (tiny, doubles): &(Vec<f32>, Vec<f64>)) -> Vec<u64> {
    let (mut hi, mut lo): (Vec<u16>, Vec<u16>) = tiny.iter().map(|x| kernels::split_bits(x.to_bits())).unzip();
    let (mut exp_avg, mut exp_avg_sq) = (tiny.clone(), tiny.clone());
    let scalars = AdamwScalars::new(1e-3, (0.9, 0.999), 1e-30, 0.1, 3, 0.37).unwrap();
    let weights = Weights::Split { hi: &mut hi, lo: &mut lo };
    kernels::adamw(isa, weights, &mut exp_avg, &mut exp_avg_sq, Values::F32(tiny), &scalars);
    let mut store = tiny.clone();
    kernels::accumulate(isa, &mut store, Values::F32(tiny));
    let mut rounded = vec![0f32; tiny.len()];
    kernels::f64_to_f32(doubles, &mut rounded);
    let sum = kernels::sum_squares(isa, Values::F32(tiny));
    let mut out: Vec<u64> = hi.iter().chain(&lo).map(|&x| x.into()).collect();
    out.extend(exp_avg.iter().chain(&exp_avg_sq).chain(&store).chain(&rounded).map(|x| u64::from(x.to_bits())));
    out.push(sum.to_bits());
    out
}

#[test]
fn flush_to_zero_in_the_calling_thread_changes_nothing_and_is_put_back() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let inputs = inputs();
        let expected = results(isa, &inputs);
        let (got, after) = std::thread::spawn(move || {
            set_mode(FAST_MATH);
            (results(isa, &inputs), mode())
        })
        .join()
        .unwrap();
        assert!(got == expected, "{isa:?}");
        assert_eq!(after, FAST_MATH, "{isa:?}");
    }
}

#[test]
fn workers_that_inherit_flush_to_zero_compute_the_same() {
    let inputs = inputs();
    let expected = results(Isa::best(), &inputs);
    std::thread::spawn(move || {
        set_mode(FAST_MATH);
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        pool.run(2, &|_| {
            assert_eq!(mode(), FAST_MATH, "threads inherit the mode of the one that starts them");
            assert!(results(Isa::best(), &inputs) == expected);
        })
        .unwrap();
    })
    .join()
    .unwrap();
}
