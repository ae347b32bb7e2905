//! Where a model lives between steps: layout, host planes, values in and out.
//!
//! `cargo run -p megatrain-core --example 02_store`
use megatrain_core::Result;
use megatrain_core::host::{Affinity, Pool};
use megatrain_core::layout::{Dtype, Precision, TensorSpec, UnitLayout};
use megatrain_core::store::{Plane, Store, StoreBytes, StoreOptions};

fn main() -> Result<()> {
    // A unit is what travels to the device in one copy: here a layer with two weights and a frozen buffer.
    let layer = UnitLayout::new(
        "layers.0",
        vec![
            TensorSpec::trainable("layers.0.up.weight", [512, 2048]),
            TensorSpec::trainable("layers.0.down.weight", [2048, 512]),
            TensorSpec::frozen("layers.0.scale", [512], Dtype::F32),
        ],
        Precision::Bf16,
    )?;
    for tensor in &layer.tensors {
        println!("{:24} {:?} starts at byte {} of the image", tensor.spec.name, tensor.spec.role, tensor.byte);
    }

    // What it costs is known before anything is allocated.
    let planned = StoreBytes::of(&layer);
    println!("image {} + residual {} + moments 2 x {} bytes", planned.image, planned.residual, planned.exp_avg);

    // The store maps exactly that, touches it with all threads, and would register the images with a device if it had one.
    let pool = Pool::new(Some(2), &Affinity::Free)?;
    let options = StoreOptions { huge_pages: true, pool: Some(&pool), ..StoreOptions::default() };
    let store = Store::new(&[layer], &[true], options)?;
    assert_eq!(store.mapped_bytes(), planned.total());
    for warning in store.warnings() {
        println!("note: {warning}");
    }

    // The master is fp32 and exact, although only its bf16 half is ever sent.
    let values = [0.1f32, -0.2, 1.000_000_1];
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
    store.write(0, 0, Plane::Master, 0, Dtype::F32, &bytes)?;
    let mut back = [0u8; 12];
    store.read(0, 0, Plane::Master, 0, &mut back)?;
    assert_eq!(back[..], bytes[..]);
    let mut sent = [0u8; 6];
    store.read(0, 0, Plane::Weights, 0, &mut sent)?;
    for (master, half) in values.iter().zip(sent.as_chunks::<2>().0) {
        let sent = f32::from_bits(u32::from(u16::from_ne_bytes(*half)) << 16);
        println!("master {master:>12} is sent as {sent}");
    }

    // Bad values are refused by name.
    let refusal = store.write(0, 1, Plane::Master, 7, Dtype::F32, &f32::NAN.to_ne_bytes()).unwrap_err();
    println!("refused: {refusal}");
    Ok(())
}
