//! Disks: the simulated one answers as the real one does, and a power cut leaves of it what was flushed and any part of
//! the rest.
use std::path::{Path, PathBuf};

use megatrain_core::disk::{Disk, DiskResult, Fault, FaultKind, RealDisk, SimDisk};

const ENOSPC: i32 = 28;

fn root() -> PathBuf {
    std::env::temp_dir().join(format!("megatrain-disk-{}", std::process::id()))
}

/// Answers of a sequence of calls below `root`, errors by number.
fn answers(disk: &dyn Disk, root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut note = |what: &str, answer: DiskResult<String>| {
        let answer = answer.map_err(|error| (error.call, error.source.raw_os_error(), error.offset, error.bytes));
        found.push(format!("{what}: {answer:?}"));
    };
    let done = |()| String::new();
    note("folder", disk.create_folder(root).map(done));
    note("folder again", disk.create_folder(root).map(done));
    note("folder in nothing", disk.create_folder(&root.join("none/inner")).map(done));
    note("missing", disk.open(&root.join("a")).map(|_| String::new()));
    let file = disk.create(&root.join("a"), 0o600).unwrap();
    note("in use", disk.create(&root.join("a"), 0o600).map(|_| String::new()));
    let mut out = [9; 8];
    note("empty", file.read_at(0, &mut out).map(|n| n.to_string()));
    note("hole", file.write_all_at(3, b"abc").map(done));
    note("whole", file.read_exact_at(0, &mut out[..6]).map(done));
    note("read", Ok(format!("{out:?}")));
    note("end", file.read_at(6, &mut out).map(|n| n.to_string()));
    note("beyond", file.read_exact_at(4, &mut out).map(done));
    note("longer", file.preallocate(10).map(|reserved| reserved.to_string()));
    note("not shorter", file.preallocate(2).map(|reserved| reserved.to_string()));
    note("size", file.size().map(|n| n.to_string()));
    note("cut", file.set_size(5).map(done));
    note("size", file.size().map(|n| n.to_string()));
    note("sync", file.sync().map(done));
    note("opened", disk.open(&root.join("a")).and_then(|f| f.size()).map(|n| n.to_string()));
    note("not empty", disk.remove(root).map(done));
    note("remove", disk.remove(&root.join("a")).map(done));
    note("removed and open", file.read_exact_at(3, &mut out[..2]).map(done));
    note("read", Ok(format!("{out:?}")));
    note("remove nothing", disk.remove(&root.join("a")).map(done));
    note("remove folder", disk.remove(root).map(done));
    note("free", disk.free_bytes(root.parent().unwrap()).map(|free| (free > 0).to_string()));
    found
}

#[test]
fn the_simulated_disk_answers_as_the_systems_does() {
    let sim = SimDisk::default();
    let mut above: Vec<_> = root().ancestors().skip(1).map(Path::to_path_buf).collect();
    above.pop();
    above.iter().rev().for_each(|folder| sim.create_folder(folder).unwrap());
    let _ = std::fs::remove_dir_all(root());
    assert_eq!(answers(&sim, &root()), answers(&RealDisk, &root()));
}

fn names(disk: &SimDisk) -> Vec<Vec<String>> {
    let name = |path: &PathBuf| path.display().to_string();
    let mut found: Vec<_> = disk.crash_states().iter().map(|state| state.entries.keys().map(name).collect()).collect();
    found.sort();
    found.dedup();
    found
}

#[test]
fn what_was_not_flushed_may_be_lost_in_every_combination() {
    let disk = SimDisk::default();
    let file = disk.create(Path::new("/a"), 0o600).unwrap();
    assert_eq!(names(&disk), [vec![], vec!["/a".to_owned()]]);
    file.write_all_at(0, b"12345678").unwrap();
    file.write_all_at(8, b"abcdefgh").unwrap();
    disk.sync_folder(Path::new("/")).unwrap();
    let mut left: Vec<_> = disk.crash_states().iter().map(|s| s.file(Path::new("/a")).unwrap().to_vec()).collect();
    left.sort();
    let wanted: [&[u8]; 5] = [b"", &[0; 16], b"\0\0\0\0\0\0\0\0abcdefgh", b"12345678abcd", b"12345678abcdefgh"];
    assert_eq!(left, wanted);
    file.sync().unwrap();
    assert_eq!(disk.crash_states(), [disk.contents()]);
    disk.remove(Path::new("/a")).unwrap();
    disk.create(Path::new("/c"), 0o600).unwrap();
    assert_eq!(names(&disk), [vec![], vec!["/a"], vec!["/a", "/c"], vec!["/c"]]);
    disk.sync_folder(Path::new("/")).unwrap();
    assert_eq!(names(&disk), [vec!["/c"]]);
    // A folder that was flushed is lost with its own entry, and the bytes of a file with the file's.
    disk.create_folder(Path::new("/folder")).unwrap();
    disk.create(Path::new("/folder/d"), 0o600).unwrap().sync().unwrap();
    disk.sync_folder(Path::new("/folder")).unwrap();
    assert_eq!(names(&disk), [vec!["/c"], vec!["/c", "/folder", "/folder/d"]]);
}

#[test]
fn a_call_does_what_its_fault_says() {
    let path = Path::new("/a");
    let run = |call: u64, kind: FaultKind| {
        let disk = SimDisk::new(vec![Fault { call, kind }], 100);
        let file = disk.create(path, 0o600)?;
        file.write_all_at(0, b"12345678")?;
        let mut out = [0; 8];
        file.read_exact_at(0, &mut out)?;
        file.sync()?;
        Ok::<_, megatrain_core::error::DiskError>((out.to_vec(), disk.calls(), disk.crash_states().len()))
    };
    let plain = run(9, FaultKind::Short).unwrap();
    assert_eq!((plain.0.as_slice(), plain.1.len(), plain.2), (&b"12345678"[..], 4, 2));
    for (call, name) in ["create", "write", "read", "sync"].into_iter().enumerate() {
        let error = run(call as u64, FaultKind::Error(ENOSPC)).unwrap_err();
        assert_eq!((error.call, error.path.as_path(), error.source.raw_os_error()), (name, path, Some(ENOSPC)));
        assert_eq!(error.bytes, if matches!(name, "read" | "write") { 8 } else { 0 });
        assert!(run(call as u64, FaultKind::PowerCut).is_err());
        assert_eq!(run(call as u64, FaultKind::Short).unwrap().0, b"12345678");
    }
    assert_eq!(run(1, FaultKind::FlipBit).unwrap().0, b"1234%678");
    assert_eq!(run(2, FaultKind::FlipBit).unwrap().0, b"1234%678");
    assert_eq!(run(3, FaultKind::LeftOut).unwrap().2, 5);
    assert_eq!(
        run(1, FaultKind::LeftOut).unwrap_err().to_string(),
        "/a: read of 8 bytes at byte 0 failed: the file ends before"
    );
    let full = SimDisk::new(Vec::new(), 10);
    let file = full.create(path, 0o600).unwrap();
    file.write_all_at(0, &[1; 8]).unwrap();
    let error = file.write_all_at(8, &[1; 3]).unwrap_err();
    assert_eq!((error.source.raw_os_error(), error.offset, error.bytes), (Some(ENOSPC), 8, 3));
    assert_eq!(full.free_bytes(Path::new("/")).unwrap(), 2);
    full.remove(path).unwrap();
    assert_eq!(full.free_bytes(Path::new("/")).unwrap(), 2, "it is there until it is closed");
    drop(file);
    assert_eq!(full.free_bytes(Path::new("/")).unwrap(), 10);
}
