//! What the store costs in resident memory. Alone in its process, so that nothing else is measured.
use megatrain_core::host::{Affinity, Pool};
use megatrain_core::layout::{Precision, TensorSpec, UnitLayout};
use megatrain_core::store::{Store, StoreBytes, StoreOptions};

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn the_store_takes_twelve_bytes_a_parameter_and_no_more() {
    // 15 layers of 20 MiB and a bit, none of them a power of two or a multiple of huge pages. H07 asks for 340 MiB each,
    // 5 GiB that machines of a test may not have. Rounding up to a power of two would show as well: 32 MiB for each.
    const PARAMETERS: u64 = (20 << 20) / 12 + 12_345;
    let layer = |i: usize| {
        let spec = TensorSpec::trainable(format!("layers.{i}.weight"), [PARAMETERS]);
        UnitLayout::new(format!("layers.{i}"), vec![spec], Precision::Bf16).unwrap()
    };
    let layouts: Vec<UnitLayout> = (0..15).map(layer).collect();
    let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
    for huge_pages in [false, true] {
        let before = resident_bytes();
        let options = StoreOptions { huge_pages, pool: Some(&pool), ..StoreOptions::default() };
        let store = Store::new(&layouts, &[true; 15], options).unwrap();
        let growth = resident_bytes() - before;
        let planned: u64 = layouts.iter().map(|l| StoreBytes::of(l).total()).sum();
        assert_eq!(store.mapped_bytes(), planned);
        assert_eq!(store.bytes().total(), planned);
        assert!(planned <= 15 * PARAMETERS * 12 * 101 / 100, "{planned} bytes for {} parameters", 15 * PARAMETERS);
        assert!(growth <= planned + planned / 50, "{growth} bytes resident for {planned} (huge pages: {huge_pages})");
        assert!(growth >= planned - planned / 50, "the pages were touched: {growth} of {planned}");
        drop(store);
        assert!(resident_bytes() < before + planned / 50, "dropping the store gives the memory back");
    }
}
