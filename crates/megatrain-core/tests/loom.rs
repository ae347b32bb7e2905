//! The optimizer's threads under loom: every order in which their calls of locks and condition variables may take place, up
//! to a bound of preemptions. Run by `make test-loom`.
#![cfg(loom)]
#![expect(unsafe_code, reason = "cells whose accesses loom checks")]
use loom::cell::UnsafeCell;
use megatrain_core::host::{Affinity, Pool};

/// Numbers that jobs count without a lock: loom reports two accesses that nothing orders.
struct Counts([UnsafeCell<u32>; 2]);

// SAFETY: this is what the test proves; a race is a panic of loom's.
unsafe impl Sync for Counts {}

impl Counts {
    fn new() -> Self {
        Self([UnsafeCell::new(0), UnsafeCell::new(0)])
    }

    fn add(&self, index: usize) {
        // SAFETY: loom checks that nobody else has the cell.
        self.0[index].with_mut(|count| unsafe { *count += 1 });
    }

    fn all(&self) -> [u32; 2] {
        // SAFETY: as in `add`.
        [0, 1].map(|index| self.0[index].with(|count| unsafe { *count }))
    }
}

fn every_order(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn jobs_are_over_when_their_run_is_and_before_the_next_one() {
    every_order(3, || {
        let counts = Counts::new();
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        for run in 1..=2 {
            pool.run(2, &|job| counts.add(job)).unwrap();
            assert_eq!(counts.all(), [run; 2]);
        }
    });
}

#[test]
fn a_job_that_panics_is_an_error_once_and_the_pool_goes_on() {
    every_order(2, || {
        let counts = Counts::new();
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        pool.fail_run(1);
        assert!(pool.run(2, &|job| counts.add(job)).is_err());
        assert_eq!(counts.all(), [0, 1]);
        pool.run(2, &|job| counts.add(job)).unwrap();
        assert_eq!(counts.all(), [1, 2]);
    });
}

#[test]
fn callers_on_two_threads_take_turns() {
    every_order(2, || {
        let counts = loom::sync::Arc::new(Counts::new());
        let pool = loom::sync::Arc::new(Pool::new(Some(1), &Affinity::Free).unwrap());
        let other = {
            let (counts, pool) = (loom::sync::Arc::clone(&counts), loom::sync::Arc::clone(&pool));
            loom::thread::spawn(move || pool.run(1, &|job| counts.add(job)).unwrap())
        };
        pool.run(1, &|job| counts.add(job)).unwrap();
        other.join().unwrap();
        assert_eq!(counts.all(), [2, 0]);
    });
}

#[test]
fn a_pool_that_is_dropped_ends_its_threads() {
    // A thread that went on waiting would be a deadlock, which loom reports.
    every_order(3, || drop(Pool::new(Some(2), &Affinity::Free).unwrap()));
}
