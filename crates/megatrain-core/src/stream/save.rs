//! A checkpoint on its way to disk: what its files hold, and how far they have come.
//!
//! A save that has been asked for is carried by the next pass that begins, whose schedule then has an operation a unit
//! that appends the unit's state to the files, after the update of the pass before and ahead of the next one. Where
//! nothing else follows, a pass that only writes carries it. So the files hold one step's state although training goes
//! on, and there is no second copy of it.
//!
//! A disk that does not take the files ends the save and leaves the engine as it is; all else that fails breaks the engine, as
//! everywhere: so does a disk that does not return the state that it holds.
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use super::state::{Deadline, Shared};
use super::{Begin, Engine};
use crate::error::{Error, Result};
use crate::schedule::{Op, Pass};
use crate::store::Plane;
use crate::store::file::{Buffer, Writer};

/// Bytes that a thread collects before it writes them.
const BUFFER_BYTES: usize = 8 << 20;

/// A file to write: its first bytes, then one plane of each tensor, one after the other.
#[derive(Clone, Debug)]
pub struct SaveFile {
    /// Where; nothing must be there yet.
    pub path: PathBuf,
    /// First bytes.
    pub header: Vec<u8>,
    /// Of which plane.
    pub plane: Plane,
    /// Unit and index in it, units in ascending order.
    pub tensors: Vec<(usize, usize)>,
}

/// What was saved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saved {
    /// CRC32 per chunk of each file.
    pub sums: Vec<(PathBuf, Vec<u32>)>,
    /// How often each tensor of each unit had been updated.
    pub counts: Vec<Vec<u64>>,
}

/// Files of one plane through which the units ascend, written by a thread of their own.
struct Line {
    plane: Plane,
    files: VecDeque<SaveFile>,
    /// The first of them, once begun, and how many of its tensors it holds.
    open: Option<Writer>,
    appended: usize,
    buffer: Buffer,
}

impl Line {
    /// Whether a file can follow those of the line.
    fn takes(&self, file: &SaveFile) -> bool {
        let last = self.files.iter().flat_map(|f| &f.tensors).next_back().map_or(0, |t| t.0);
        self.plane == file.plane && file.tensors.first().is_none_or(|first| first.0 >= last)
    }
}

/// A save that has been asked for.
pub(super) struct Save {
    lines: Vec<Mutex<Line>>,
    chunk_bytes: u64,
    needed: u64,
    written: AtomicU64,
    saved: Mutex<Saved>,
    failure: Mutex<Option<Error>>,
    /// Nothing more is written: the disk has failed, or nobody wants it any more.
    stopped: AtomicBool,
    complete: AtomicBool,
}

/// The save under way, and the pass that carries it.
pub(super) struct Saving {
    pub(super) save: Arc<Save>,
    pub(super) pass: Option<u64>,
}

/// A lock that guards nothing which a panic leaves half-changed: what it would have completed is never taken as such.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Save {
    fn is_over(&self) -> bool {
        self.complete.load(Ordering::Acquire) || self.stopped.load(Ordering::Acquire)
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Stops it and waits until no thread writes any more, which takes a buffer at most.
    fn stop_writing(&self) {
        self.stop();
        self.lines.iter().for_each(|line| drop(lock(line)));
    }

    /// The engine closes: what is not complete will not be.
    pub(super) fn close(&self) {
        if !self.complete.load(Ordering::Acquire) {
            self.fail(Error::ClosedWhileSaving);
        }
    }

    fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.stop();
    }

    fn outcome(&self) -> Result<Saved> {
        match lock(&self.failure).take() {
            Some(error) => Err(error),
            None if self.complete.load(Ordering::Acquire) => Ok(std::mem::take(&mut *lock(&self.saved))),
            None => Err(Error::SaveCancelled),
        }
    }
}

impl Engine {
    /// Asks for all of the model's state in `files`, as the passes so far have left it; the next pass carries it there,
    /// or [`Engine::finish_save`]. `needed` is what all files take, for error messages.
    ///
    /// # Errors
    /// [`Error`] while a pass or another save is under way, and for files that name no plane of the model's or
    /// whose units do not ascend.
    pub fn begin_save(&self, files: Vec<SaveFile>, chunk_bytes: u64, needed: u64) -> Result<()> {
        let shared = &self.shared;
        let mut lines: Vec<Line> = Vec::new();
        for file in files {
            let wrong = |rule| Err(Error::SaveFile { path: file.path.clone(), rule });
            if chunk_bytes == 0 || file.plane == Plane::Master {
                return wrong("a file holds chunks of a plane that is stored as it is");
            }
            if !file.tensors.is_sorted_by_key(|tensor| tensor.0) {
                return wrong("units are written in ascending order");
            }
            for &(unit, tensor) in &file.tensors {
                shared.plane_of(unit, tensor, file.plane)?;
            }
            match lines.iter_mut().find(|line| line.takes(&file)) {
                Some(line) => line.files.push_back(file),
                None => {
                    let buffer = Buffer::new(BUFFER_BYTES)?;
                    let (plane, files) = (file.plane, VecDeque::from([file]));
                    lines.push(Line { plane, files, open: None, appended: 0, buffer });
                }
            }
        }
        let save = Save {
            lines: lines.into_iter().map(Mutex::new).collect(),
            chunk_bytes,
            needed,
            written: AtomicU64::new(0),
            saved: Mutex::default(),
            failure: Mutex::default(),
            stopped: AtomicBool::new(false),
            complete: AtomicBool::new(false),
        };
        let mut core = shared.enter()?;
        if core.computing() {
            return Err(Error::PassUnderWay { remedy: "begin a save before it or after it" });
        }
        if core.saving.is_some() {
            return Err(Error::SaveUnderWay);
        }
        core.saving = Some(Saving { save: Arc::new(save), pass: None });
        Ok(())
    }

    /// Bytes written so far, and whether the save is over, well or not.
    ///
    /// # Errors
    /// [`Error`] when none was begun, [`Error::Broken`].
    pub fn save_progress(&self) -> Result<(u64, bool)> {
        let core = self.shared.lock();
        let Some(Saving { save, .. }) = &core.saving else { return Err(none_begun()) };
        if !save.is_over() {
            core.check()?;
        }
        Ok((save.written.load(Ordering::Acquire), save.is_over()))
    }

    /// Waits until everything is on the disk.
    ///
    /// # Errors
    /// [`Error::Storage`] when a file could not be written, [`Error`] when no save was begun or a pass is under
    /// way that does not carry it, [`Error::Broken`].
    pub fn finish_save(&self, limit: Duration) -> Result<Poll<Saved>> {
        let deadline = Deadline::after(limit);
        let core = self.shared.lock();
        let Some(Saving { save, pass }) = &core.saving else { return Err(none_begun()) };
        let (save, carried) = (Arc::clone(save), pass.is_some());
        drop(core);
        if !save.is_over() {
            if !carried && self.shared.begin(&Begin::write(), limit)? == Poll::Pending {
                return Ok(Poll::Pending);
            }
            let over = |_: &mut _| save.is_over().then_some(());
            if self.shared.wait_until(self.shared.enter()?, deadline, over)?.is_pending() {
                return Ok(Poll::Pending);
            }
        }
        self.shared.lock().saving = None;
        if !save.complete.load(Ordering::Acquire) {
            // One file has failed; the folder is the caller's to remove, or to write anew, once nothing else writes there.
            save.stop_writing();
        }
        save.outcome().map(Poll::Ready)
    }

    /// Gives the save up, if there is one; what it has written is the caller's to remove, once this returns.
    pub fn cancel_save(&self) {
        let saving = self.shared.lock().saving.take();
        if let Some(Saving { save, .. }) = saving {
            save.stop_writing();
        }
    }
}

fn none_begun() -> Error {
    Error::NoSave
}

impl Begin {
    /// A pass that only writes.
    pub(super) fn write() -> Self {
        Self::new(Pass::Write, 0)
    }
}

impl Shared {
    /// Begins a pass that writes what was asked for and is not carried by another.
    pub(super) fn carry_save(&self, limit: Duration) -> Result<Poll<()>> {
        let waits = self.lock().saving.as_ref().is_some_and(|s| s.pass.is_none() && !s.save.is_over());
        if waits { self.begin(&Begin::write(), limit) } else { Ok(Poll::Ready(())) }
    }

    /// Appends a unit's state to the files.
    pub(super) fn write_unit(&self, op: &Op, save: &Save) -> Result<()> {
        let unit = op.unit as usize;
        if save.stopped.load(Ordering::Acquire) {
            return Ok(());
        }
        let tensors = 0..self.placement.layouts[unit].tensors.len();
        let counts = tensors.map(|t| self.memory.store.step_count(unit, t)).collect::<Result<Vec<u64>>>()?;
        lock(&save.saved).counts.push(counts);
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let spawn = |line| {
                let thread = std::thread::Builder::new().name("megatrain-write".to_owned());
                thread.spawn_scoped(scope, move || {
                    let mut line = lock(line);
                    // Under the lock: who has stopped the save and then had every lock knows that no file is made any more.
                    if save.stopped.load(Ordering::Acquire) {
                        return Ok(());
                    }
                    match self.append(unit, &mut line, save) {
                        Err(error @ Error::Storage { .. }) => {
                            save.fail(error);
                            Ok(())
                        }
                        // Others end early then, and what they say is not what has happened.
                        Err(_) if save.stopped.load(Ordering::Acquire) => Ok(()),
                        other => other,
                    }
                })
            };
            let threads: Vec<_> = save.lines.iter().map(spawn).collect();
            let joined = threads.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(error) => Err(Error::Worker(format!("thread megatrain-write could not be started: {error}"))),
            });
            joined.collect()
        });
        results.into_iter().collect::<Result<()>>()?;
        if op.unit == self.inputs.head() && !save.stopped.load(Ordering::Acquire) {
            save.complete.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Appends a unit's part of one plane; files that are complete are closed.
    fn append(&self, unit: usize, line: &mut Line, save: &Save) -> Result<()> {
        let Line { plane, files, open, appended, buffer } = line;
        while let Some(file) = files.front() {
            // A file is begun with its first unit, and one without tensors with any.
            if file.tensors.get(*appended).is_some_and(|next| next.0 != unit) {
                return Ok(());
            }
            let written = |bytes: u64| {
                save.written.fetch_add(bytes, Ordering::AcqRel);
                let stopped = save.stopped.load(Ordering::Acquire);
                if stopped { Err(Error::SaveCancelled) } else { Ok(()) }
            };
            let mut writer = match open.take() {
                Some(writer) => writer,
                None => {
                    let mut writer = Writer::create(&self.disk, &file.path, save.needed, save.chunk_bytes)?;
                    let header = |start: u64, out: &mut [u8]| {
                        let start = usize::try_from(start).expect("inside the header");
                        out.copy_from_slice(&file.header[start..start + out.len()]);
                        Ok(())
                    };
                    writer.append(buffer, file.header.len() as u64, 1, header, written)?;
                    writer
                }
            };
            while let Some(&(_, tensor)) = file.tensors.get(*appended).filter(|next| next.0 == unit) {
                let (dtype, numel) = self.plane_of(unit, tensor, *plane)?;
                let size = dtype.size();
                let read = |start: u64, out: &mut [u8]| self.read_stored(unit, tensor, *plane, start / size, out);
                let element = usize::try_from(size).expect("a few bytes");
                writer.append(buffer, numel * size, element, read, written)?;
                *appended += 1;
            }
            if *appended < file.tensors.len() {
                *open = Some(writer);
                return Ok(());
            }
            let (path, sums, last) = writer.finish(buffer)?;
            save.written.fetch_add(last, Ordering::AcqRel);
            lock(&save.saved).sums.push((path, sums));
            *appended = 0;
            files.pop_front();
        }
        Ok(())
    }
}
