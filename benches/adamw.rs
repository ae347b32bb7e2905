//! The host optimizer over split planes against the bare memory traffic of the same planes.
//!
//! `MEGATRAIN_BENCH_PARAMS` sets the number of parameters (14 bytes each), `MEGATRAIN_BENCH_THREADS` the threads.
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use megatrain_core::adamw::Isa;
use megatrain_core::host::{Affinity, Pool};
use megatrain_core::layout::{Master, Moments, Precision, StateFormat};
use megatrain_core::optimizer::rates::sample;
use megatrain_core::optimizer::{Adamw, ElementRange};

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|e| panic!("{name}={value}: {e}")))
}

/// Bytes that one update moves: 26 a parameter with fp32 moments and a 32-bit master.
fn moved(numel: u64, state: StateFormat) -> Throughput {
    Throughput::Bytes((numel as f64 * state.update_bytes(Precision::Bf16)) as u64)
}

fn adamw(criterion: &mut Criterion) {
    let numel = setting("MEGATRAIN_BENCH_PARAMS").unwrap_or(1 << 24);
    let threads = setting("MEGATRAIN_BENCH_THREADS").map(|n| usize::try_from(n).expect("a number of threads"));
    let pool = Pool::new(threads, &Affinity::Free).expect("threads can be started");
    let mut group = criterion.benchmark_group(format!("{numel} parameters, {} threads", pool.threads()));
    group.throughput(moved(numel, StateFormat::default()));
    group.sample_size(10).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    for (name, cold_per_mille) in [("hot", 0), ("90 % cold rows", 900)] {
        let updates = [sample(&pool, numel, cold_per_mille, StateFormat::default()).expect("memory for the planes")];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let adamw = Adamw::new(isa);
            group.bench_function(format!("adamw {}, {name}", isa.name()), |bencher| {
                bencher.iter(|| adamw.update(&pool, &updates).expect("an update"));
            });
        }
        if cold_per_mille == 0 {
            // a table of which every third row was looked up
            let width = 3584;
            let row = |row| ElementRange { tensor: 0, start: row * width, len: width };
            let rows: Vec<ElementRange> = (0..numel / width).step_by(3).map(row).collect();
            group.throughput(moved(rows.len() as u64 * width, StateFormat::default()));
            group.bench_function("adamw, single rows", |bencher| {
                bencher.iter(|| Adamw::new(Isa::best()).update_ranges(&pool, &updates, &rows).expect("an update"));
            });
            group.throughput(moved(numel, StateFormat::default()));
            group.bench_function("touch", |bencher| {
                bencher.iter(|| Adamw::new(Isa::best()).touch(&pool, &updates).expect("a sweep"));
            });
        }
    }
    for (moments, master) in
        [(Moments::Fp32, Master::Bits24), (Moments::Bf16, Master::Bits32), (Moments::Bits8, Master::Bits24)]
    {
        let state = StateFormat { moments, master };
        group.throughput(moved(numel, state));
        let updates = [sample(&pool, numel, 0, state).expect("memory for the planes")];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available() && *isa != Isa::Scalar) {
            let bytes = state.update_bytes(Precision::Bf16);
            let name = format!("adamw {}, {moments:?} moments, {master:?} master, {bytes} bytes", isa.name());
            group.bench_function(name, |bencher| {
                bencher.iter(|| Adamw::new(isa).update(&pool, &updates).expect("an update"));
            });
        }
    }
}

criterion_group!(benches, adamw);
criterion_main!(benches);
