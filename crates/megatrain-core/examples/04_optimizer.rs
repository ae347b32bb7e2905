//! AdamW on the host: a unit's tensors updated in one pass over a fixed pool of threads, clipped by the global norm.
//!
//! `cargo run -p megatrain-core --example 04_optimizer`
use megatrain_core::Result;
use megatrain_core::adamw::AdamwScalars;
use megatrain_core::adamw::Isa;
use megatrain_core::adamw::clip::{clip_coefficient, global_norm};
use megatrain_core::adamw::kernels::{Values, sum_squares};
use megatrain_core::host::HostSpan;
use megatrain_core::host::{Affinity, Pool};
use megatrain_core::layout::{Dtype, Precision, TensorSpec, UnitLayout};
use megatrain_core::optimizer::Adamw;
use megatrain_core::store::{Plane, Store, StoreOptions};

fn main() -> Result<()> {
    // A quadratic to be minimised: the loss is half the squared distance of each weight from 3.
    let spec = TensorSpec::trainable("weight", [1000, 300]);
    let layout = UnitLayout::new("layers.0", vec![spec], Precision::Bf16)?;
    let numel = layout.tensors[0].spec.numel();
    let pool = Pool::new(None, &Affinity::Free)?;
    let store = Store::new(std::slice::from_ref(&layout), &[true], StoreOptions::default())?;
    let adamw = Adamw::new(Isa::select(None)?);
    println!("{} threads, {} body", pool.threads(), adamw.isa().name());

    // Gradients land in a plane of the same element offsets, here bf16.
    let grad = HostSpan::map(usize::try_from(layout.elements * 2).expect("a small unit"))?;
    let planes = store.planes(0).expect("the host holds the unit");
    let mut master = vec![0u8; usize::try_from(numel * 4).expect("a small unit")];
    for step in 1..=200 {
        store.read(0, 0, Plane::Master, 0, &mut master)?;
        for (g, w) in grad.elements_mut::<u16>(0, numel).iter_mut().zip(master.as_chunks::<4>().0) {
            let difference = f32::from_ne_bytes(*w) - 3.0;
            *g = (difference.to_bits() >> 16) as u16;
        }

        // The norm is summed over fixed blocks in order, so that it does not depend on how the work is divided.
        let blocks = layout.norm_blocks();
        let sums = blocks
            .iter()
            .map(|&(first, len)| sum_squares(adamw.isa(), Values::Bf16(&grad.elements::<u16>(first, len))));
        let norm = global_norm(sums);
        let clip = clip_coefficient(norm, 100.0);

        let scalars = AdamwScalars::new(0.05, (0.9, 0.999), 1e-8, 0.0, step, clip.into())?;
        adamw.update(&pool, &[planes.update(&layout, 0, &grad, Dtype::Bf16, scalars)])?;
        store.set_step_count(0, 0, step)?;
        if step % 50 == 0 {
            println!("step {step:3}: norm {norm:8.3}, clipped by {clip:.3}");
        }
    }
    store.read(0, 0, Plane::Master, 0, &mut master)?;
    let last = f32::from_ne_bytes(master.as_chunks::<4>().0[0]);
    println!("the weights have come to {last}");
    assert!((last - 3.0).abs() < 0.05);
    Ok(())
}
