//! A disk in memory that knows what a power cut can leave of it.
//!
//! It keeps the content of a file apart from what was there when the file was last flushed, and the entries of a folder
//! apart from those at its last flush. Nothing else orders what reaches the disk, as in POSIX: after a power cut each
//! change that was not flushed may be there or not, whatever was done before or after it. The idea of trying all such
//! states is that of `ALICE` (Pillai et al., OSDI 2014) and `CrashMonkey` (Mohan et al., OSDI 2018).
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Disk, DiskFile, DiskResult};
use crate::error::DiskError;

mod crash;
mod file;

pub use self::crash::CrashState;
use self::file::SimFile;

/// What one call does instead of what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Fails with this error number and does nothing.
    Error(i32),
    /// Reads or writes half of the bytes and says so; makes a file longer without reserving room and says so. Other calls
    /// are as always.
    Short,
    /// Another bit somewhere in what is read or written. Other calls are as always.
    FlipBit,
    /// Does nothing and reports success, as if the line were not in the program.
    LeftOut,
    /// The power is cut: it and all later calls fail and do nothing.
    PowerCut,
}

/// A fault of the call of this number, counted from 0 over all calls that change or read the disk.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Which call.
    pub call: u64,
    /// What it does.
    pub kind: FaultKind,
}

/// A disk in memory. Clones are the same disk.
#[derive(Clone)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

struct State {
    nodes: Vec<Node>,
    /// Changes of entries that were not flushed, oldest first.
    changes: Vec<Change>,
    calls: Vec<String>,
    faults: Vec<Fault>,
    cut: bool,
    capacity: u64,
}

enum Node {
    File(FileNode),
    Folder(FolderNode),
}

#[derive(Default)]
struct FileNode {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// What has happened to it since it was flushed.
    edits: Vec<Edit>,
    /// How often it is open.
    handles: usize,
}

enum Edit {
    Write { offset: usize, bytes: Vec<u8> },
    SetSize(usize),
}

#[derive(Default)]
struct FolderNode {
    live: BTreeMap<OsString, usize>,
    durable: BTreeMap<OsString, usize>,
}

/// One call's change of a folder, which a power cut leaves or not.
struct Change {
    folder: usize,
    name: OsString,
    /// What the name stands for; `None` where it was removed.
    node: Option<usize>,
}

impl Edit {
    fn apply(&self, content: &mut Vec<u8>, part: usize) {
        match self {
            Self::Write { offset, bytes } => {
                let bytes = &bytes[..bytes.len().min(part)];
                let end = offset + bytes.len();
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[*offset..end].copy_from_slice(bytes);
            }
            Self::SetSize(size) => content.resize(*size, 0),
        }
    }
}

impl FileNode {
    fn edit(&mut self, edit: Edit) {
        edit.apply(&mut self.live, usize::MAX);
        self.edits.push(edit);
    }
}

const ROOT: usize = 0;

impl State {
    /// The next call: its name is kept, and the fault that it has is returned.
    fn enter(&mut self, call: &'static str, path: &Path) -> DiskResult<Option<FaultKind>> {
        let number = self.calls.len() as u64;
        self.calls.push(format!("{call} {}", path.display()));
        let kind = self.faults.iter().find(|fault| fault.call == number).map(|fault| fault.kind);
        self.cut |= kind == Some(FaultKind::PowerCut);
        if self.cut {
            return Err(error(call, path, libc::EIO));
        }
        match kind {
            Some(FaultKind::Error(code)) => Err(error(call, path, code)),
            other => Ok(other),
        }
    }

    fn folder(&self, node: usize) -> Option<&FolderNode> {
        match &self.nodes[node] {
            Node::Folder(folder) => Some(folder),
            Node::File(_) => None,
        }
    }

    fn file(&mut self, node: usize) -> &mut FileNode {
        match &mut self.nodes[node] {
            Node::File(file) => file,
            Node::Folder(_) => unreachable!("a handle is of a file"),
        }
    }

    fn find(&self, path: &Path) -> Option<usize> {
        let names = path.components().skip(1);
        names.into_iter().try_fold(ROOT, |node, name| self.folder(node)?.live.get(name.as_os_str()).copied())
    }

    /// The folder that a path is in, and its name there.
    fn parent(&self, call: &'static str, path: &Path) -> DiskResult<(usize, OsString)> {
        let folder = path.parent().and_then(|parent| self.find(parent)).filter(|&node| self.folder(node).is_some());
        match (folder, path.file_name()) {
            (Some(folder), Some(name)) => Ok((folder, name.to_owned())),
            _ => Err(error(call, path, libc::ENOENT)),
        }
    }

    fn change(&mut self, folder: usize, name: OsString, node: Option<usize>) {
        let Node::Folder(changed) = &mut self.nodes[folder] else { unreachable!("parent() gives folders") };
        let change = Change { folder, name, node };
        change.apply(&mut changed.live);
        self.changes.push(change);
    }

    fn make(&mut self, call: &'static str, path: &Path, node: Node) -> DiskResult<usize> {
        let (folder, name) = self.parent(call, path)?;
        if self.find(path).is_some() {
            return Err(error(call, path, libc::EEXIST));
        }
        self.nodes.push(node);
        let made = self.nodes.len() - 1;
        self.change(folder, name, Some(made));
        Ok(made)
    }

    fn is_empty_folder(&self, node: usize) -> bool {
        self.folder(node).is_some_and(|folder| folder.live.is_empty())
    }

    fn used(&self) -> u64 {
        let bytes_of = |node: &Node| match node {
            Node::File(file) => file.live.len() as u64,
            Node::Folder(_) => 0,
        };
        let mut held: HashSet<usize> = HashSet::new();
        for node in &self.nodes {
            if let Node::Folder(folder) = node {
                held.extend(folder.live.values());
            }
        }
        // A file without a name is there until it is closed.
        held.extend((0..self.nodes.len()).filter(|&n| matches!(&self.nodes[n], Node::File(file) if file.handles > 0)));
        held.into_iter().map(|node| bytes_of(&self.nodes[node])).sum()
    }

    fn grow(&mut self, call: &'static str, path: &Path, node: usize, size: u64) -> DiskResult<()> {
        let more = size.saturating_sub(self.file(node).live.len() as u64);
        if more > 0 && self.used().saturating_add(more) > self.capacity {
            return Err(error(call, path, libc::ENOSPC));
        }
        Ok(())
    }
}

impl Change {
    fn apply(&self, entries: &mut BTreeMap<OsString, usize>) {
        match self.node {
            Some(node) => entries.insert(self.name.clone(), node),
            None => entries.remove(&self.name),
        };
    }
}

fn error(call: &'static str, path: &Path, code: i32) -> DiskError {
    DiskError::new(call, path, io::Error::from_raw_os_error(code))
}

impl Default for SimDisk {
    fn default() -> Self {
        Self::new(Vec::new(), u64::MAX)
    }
}

impl SimDisk {
    /// An empty disk of so many bytes, with these faults.
    #[must_use]
    pub fn new(faults: Vec<Fault>, capacity: u64) -> Self {
        let (nodes, changes, calls) = (vec![Node::Folder(FolderNode::default())], Vec::new(), Vec::new());
        Self { state: Arc::new(Mutex::new(State { nodes, changes, calls, faults, cut: false, capacity })) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every call so far, by name and path; [`Fault::call`] is an index of it.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.lock().calls.clone()
    }

    /// Faults from now on, in place of those before; calls are counted from 0 again.
    pub fn arm(&self, faults: Vec<Fault>) {
        let mut state = self.lock();
        (state.faults, state.cut) = (faults, false);
        state.calls.clear();
    }

    /// Waits until all changes of a folder's entries are on the disk: the part of a save that is its caller's.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn sync_folder(&self, path: &Path) -> DiskResult<()> {
        let mut state = self.lock();
        if state.enter("sync folder", path)? == Some(FaultKind::LeftOut) {
            return Ok(());
        }
        let found = state.find(path);
        match found.map(|node| (node, &mut state.nodes[node])) {
            Some((node, Node::Folder(folder))) => {
                folder.durable = folder.live.clone();
                state.changes.retain(|change| change.folder != node);
                Ok(())
            }
            _ => Err(error("sync folder", path, libc::ENOTDIR)),
        }
    }
}

impl Disk for SimDisk {
    fn create(&self, path: &Path, _mode: u32) -> DiskResult<Box<dyn DiskFile>> {
        let mut state = self.lock();
        state.enter("create", path)?;
        let node = state.make("create", path, Node::File(FileNode::default()))?;
        Ok(Box::new(SimFile::new(self, &mut state, path, node)))
    }

    fn open(&self, path: &Path) -> DiskResult<Box<dyn DiskFile>> {
        let mut state = self.lock();
        state.enter("open", path)?;
        match state.find(path) {
            Some(node) if state.folder(node).is_none() => Ok(Box::new(SimFile::new(self, &mut state, path, node))),
            Some(_) => Err(error("open", path, libc::EISDIR)),
            None => Err(error("open", path, libc::ENOENT)),
        }
    }

    fn create_folder(&self, path: &Path) -> DiskResult<()> {
        let mut state = self.lock();
        if state.enter("create folder", path)? == Some(FaultKind::LeftOut) {
            return Ok(());
        }
        state.make("create folder", path, Node::Folder(FolderNode::default())).map(drop)
    }

    fn remove(&self, path: &Path) -> DiskResult<()> {
        let mut state = self.lock();
        if state.enter("remove", path)? == Some(FaultKind::LeftOut) {
            return Ok(());
        }
        let (folder, name) = state.parent("remove", path)?;
        match state.find(path) {
            None => Err(error("remove", path, libc::ENOENT)),
            Some(node) if state.folder(node).is_some() && !state.is_empty_folder(node) => {
                Err(error("remove", path, libc::ENOTEMPTY))
            }
            Some(_) => {
                state.change(folder, name, None);
                Ok(())
            }
        }
    }

    fn free_bytes(&self, _folder: &Path) -> DiskResult<u64> {
        let state = self.lock();
        Ok(state.capacity.saturating_sub(state.used()))
    }
}
