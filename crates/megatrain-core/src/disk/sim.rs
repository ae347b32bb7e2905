//! A disk in memory that knows what a power cut can leave of it.
//!
//! It keeps the content of a file apart from what was there when the file was last flushed, and the entries of a folder
//! apart from those at its last flush. Nothing else orders what reaches the disk, as in POSIX: after a power cut each
//! change that was not flushed may be there or not, whatever was done before or after it. The idea of trying all such
//! states is that of `ALICE` (Pillai et al., OSDI 2014) and `CrashMonkey` (Mohan et al., OSDI 2018).
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Disk, DiskFile, DiskResult};
use crate::error::DiskError;

/// What one call does instead of what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Fails with this error number and does nothing.
    Error(i32),
    /// Reads or writes half of the bytes and says so. Other calls are as always.
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

/// What a power cut left: the bytes of each file by path, and folders, which have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrashState {
    /// In order of paths.
    pub entries: BTreeMap<PathBuf, Option<Arc<[u8]>>>,
    /// A number that states with other entries do not share, but for chance.
    pub digest: u64,
}

impl CrashState {
    fn new(entries: BTreeMap<PathBuf, Option<Content>>) -> Self {
        let mut hasher = DefaultHasher::new();
        for (path, content) in &entries {
            (path, content.as_ref().map(|content| content.digest)).hash(&mut hasher);
        }
        let entries = entries.into_iter().map(|(path, content)| (path, content.map(|content| content.bytes))).collect();
        Self { entries, digest: hasher.finish() }
    }

    /// The content of a file; `None` where there is no file of that path.
    #[must_use]
    pub fn file(&self, path: &Path) -> Option<&[u8]> {
        self.entries.get(path)?.as_deref()
    }
}

/// Bytes of a file, and a digest of them.
#[derive(Clone)]
struct Content {
    bytes: Arc<[u8]>,
    digest: u64,
}

impl Content {
    fn new(bytes: Vec<u8>) -> Self {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        Self { bytes: bytes.into(), digest: hasher.finish() }
    }
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

/// One call's changes of a folder, which a power cut leaves all or none of.
struct Change {
    folder: usize,
    entries: Vec<(OsString, Option<usize>)>,
}

/// What a power cut leaves of what was not flushed of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Survives {
    Everything,
    Nothing,
    /// The earlier half of the writes, the last of them in part.
    Half,
    /// The length, with zeros where the bytes were not flushed.
    Length,
    /// The last write without those before it.
    Last,
}

impl Survives {
    const ALL: [Self; 5] = [Self::Everything, Self::Nothing, Self::Half, Self::Length, Self::Last];
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

    fn after_crash(&self, survives: Survives) -> Vec<u8> {
        let mut content = self.durable.clone();
        match survives {
            Survives::Everything => return self.live.clone(),
            Survives::Nothing => {}
            Survives::Half => {
                let half = self.edits.len() / 2;
                self.edits[..half].iter().for_each(|edit| edit.apply(&mut content, usize::MAX));
                if let Some(edit @ Edit::Write { bytes, .. }) = self.edits.get(half) {
                    edit.apply(&mut content, bytes.len() / 2);
                }
            }
            Survives::Length => content.resize(self.live.len(), 0),
            Survives::Last => {
                if let Some(edit) = self.edits.last() {
                    edit.apply(&mut content, usize::MAX);
                }
            }
        }
        content
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

    fn change(&mut self, folder: usize, entries: Vec<(OsString, Option<usize>)>) {
        let Node::Folder(node) = &mut self.nodes[folder] else { unreachable!("parent() gives folders") };
        set_entries(&mut node.live, &entries);
        self.changes.push(Change { folder, entries });
    }

    fn make(&mut self, call: &'static str, path: &Path, node: Node) -> DiskResult<usize> {
        let (folder, name) = self.parent(call, path)?;
        if self.find(path).is_some() {
            return Err(error(call, path, libc::EEXIST));
        }
        self.nodes.push(node);
        let made = self.nodes.len() - 1;
        self.change(folder, vec![(name, Some(made))]);
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
        held.into_iter().map(|node| bytes_of(&self.nodes[node])).sum()
    }

    fn grow(&mut self, call: &'static str, path: &Path, node: usize, size: u64) -> DiskResult<()> {
        let more = size.saturating_sub(self.file(node).live.len() as u64);
        if more > 0 && self.used().saturating_add(more) > self.capacity {
            return Err(error(call, path, libc::ENOSPC));
        }
        Ok(())
    }

    /// Which of the changes of entries survive, for each state that is tried: all choices where they are few; where they
    /// are many, those of every moment, and each change alone and missing.
    fn choices(&self) -> Vec<Vec<bool>> {
        const FEW: usize = 6;
        let count = self.changes.len();
        if count <= FEW {
            return (0..1usize << count).map(|bits| (0..count).map(|i| bits >> i & 1 == 1).collect()).collect();
        }
        let moments = (0..=count).map(|kept| (0..count).map(|i| i < kept).collect());
        let alone = (0..count).map(|one| (0..count).map(|i| i == one).collect());
        let missing = (0..count).map(|one| (0..count).map(|i| i != one).collect());
        moments.chain(alone).chain(missing).collect()
    }

    /// The paths that a power cut leaves, with their nodes, when these changes survive.
    fn tree(&self, kept: &[bool]) -> BTreeMap<PathBuf, usize> {
        let mut folders: HashMap<usize, BTreeMap<OsString, usize>> = HashMap::new();
        for (change, _) in self.changes.iter().zip(kept).filter(|(_, kept)| **kept) {
            let durable = || self.folder(change.folder).map(|f| f.durable.clone()).unwrap_or_default();
            set_entries(folders.entry(change.folder).or_insert_with(durable), &change.entries);
        }
        let mut found = BTreeMap::new();
        let mut open = vec![(PathBuf::from("/"), ROOT)];
        let mut seen = HashSet::new();
        while let Some((path, node)) = open.pop() {
            let Some(folder) = self.folder(node) else { continue };
            // A folder of which two renames survived in part is under one name.
            if !seen.insert(node) {
                continue;
            }
            for (name, &inner) in folders.get(&node).unwrap_or(&folder.durable) {
                found.insert(path.join(name), inner);
                open.push((path.join(name), inner));
            }
        }
        found
    }
}

fn set_entries(folder: &mut BTreeMap<OsString, usize>, entries: &[(OsString, Option<usize>)]) {
    for (name, node) in entries {
        match node {
            Some(node) => folder.insert(name.clone(), *node),
            None => folder.remove(name),
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

    /// The files and folders as a program sees them.
    #[must_use]
    pub fn contents(&self) -> CrashState {
        let state = self.lock();
        let everything = vec![true; state.changes.len()];
        let content = |node: usize| match &state.nodes[node] {
            Node::File(file) => Some(Content::new(file.live.clone())),
            Node::Folder(_) => None,
        };
        CrashState::new(state.tree(&everything).into_iter().map(|(path, node)| (path, content(node))).collect())
    }

    /// Every state that a power cut could leave now, each once. Of the changes of folders all subsets are tried, or, when
    /// more than six are not flushed, each moment's, each alone, and all but each. With every subset the unflushed bytes
    /// of all files survive wholly, not at all, in part, as zeros, or without the earlier writes; with the whole and the
    /// empty subset each file also fares differently from all others.
    #[must_use]
    pub fn crash_states(&self) -> Vec<CrashState> {
        let state = self.lock();
        let mut contents: HashMap<(usize, Survives), Content> = HashMap::new();
        for (number, node) in state.nodes.iter().enumerate() {
            if let Node::File(file) = node {
                let whole = Content::new(file.live.clone());
                for survives in Survives::ALL {
                    let flushed = file.edits.is_empty();
                    let content = if flushed { whole.clone() } else { Content::new(file.after_crash(survives)) };
                    contents.insert((number, survives), content);
                }
            }
        }
        let unflushed: Vec<usize> = (0..state.nodes.len())
            .filter(|&n| matches!(&state.nodes[n], Node::File(file) if !file.edits.is_empty()))
            .collect();
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        for kept in state.choices() {
            let tree = state.tree(&kept);
            let mut add = |of: &dyn Fn(usize) -> Survives| {
                let content = |node: usize| contents.get(&(node, of(node))).cloned();
                let crashed = CrashState::new(tree.iter().map(|(path, &node)| (path.clone(), content(node))).collect());
                if seen.insert(crashed.digest) {
                    found.push(crashed);
                }
            };
            for survives in Survives::ALL {
                add(&|_| survives);
            }
            if kept.iter().all(|&kept| kept) || kept.iter().all(|&kept| !kept) {
                for &one in &unflushed {
                    for survives in Survives::ALL {
                        for others in [Survives::Everything, Survives::Nothing] {
                            add(&|node| if node == one { survives } else { others });
                        }
                    }
                }
            }
        }
        found
    }
}

impl Disk for SimDisk {
    fn create(&self, path: &Path, _mode: u32) -> DiskResult<Box<dyn DiskFile>> {
        let mut state = self.lock();
        state.enter("create", path)?;
        let node = state.make("create", path, Node::File(FileNode::default()))?;
        Ok(Box::new(SimFile { disk: self.clone(), path: path.to_owned(), node }))
    }

    fn open(&self, path: &Path) -> DiskResult<Box<dyn DiskFile>> {
        let mut state = self.lock();
        state.enter("open", path)?;
        match state.find(path) {
            Some(node) if state.folder(node).is_none() => {
                Ok(Box::new(SimFile { disk: self.clone(), path: path.to_owned(), node }))
            }
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

    fn rename(&self, from: &Path, to: &Path) -> DiskResult<()> {
        let mut state = self.lock();
        if state.enter("rename", from)? == Some(FaultKind::LeftOut) {
            return Ok(());
        }
        let (folder, old) = state.parent("rename", from)?;
        let (target, new) = state.parent("rename", to)?;
        let Some(node) = state.find(from) else { return Err(error("rename", from, libc::ENOENT)) };
        if folder != target {
            // Which of the two folders' changes survives would be a state of its own; nothing here needs it.
            return Err(error("rename", from, libc::EXDEV));
        }
        if let Some(there) = state.find(to) {
            let replaceable = match (state.folder(node), state.folder(there)) {
                (None, None) => true,
                (Some(_), Some(_)) => state.is_empty_folder(there),
                _ => false,
            };
            if !replaceable {
                return Err(error("rename", to, libc::ENOTEMPTY));
            }
        }
        state.change(folder, vec![(old, None), (new, Some(node))]);
        Ok(())
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
                state.change(folder, vec![(name, None)]);
                Ok(())
            }
        }
    }

    fn sync_folder(&self, path: &Path) -> DiskResult<()> {
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

    fn free_bytes(&self, _folder: &Path) -> DiskResult<u64> {
        let state = self.lock();
        Ok(state.capacity.saturating_sub(state.used()))
    }
}

struct SimFile {
    disk: SimDisk,
    path: PathBuf,
    node: usize,
}

impl SimFile {
    /// Runs one call that may be left out.
    fn run(&self, call: &'static str, act: impl FnOnce(&mut State) -> DiskResult<()>) -> DiskResult<()> {
        let mut state = self.disk.lock();
        if state.enter(call, &self.path)? == Some(FaultKind::LeftOut) { Ok(()) } else { act(&mut state) }
    }

    fn resize(&self, call: &'static str, state: &mut State, bytes: u64) -> DiskResult<()> {
        state.grow(call, &self.path, self.node, bytes)?;
        let size = usize::try_from(bytes).map_err(|_| error(call, &self.path, libc::EFBIG))?;
        state.file(self.node).edit(Edit::SetSize(size));
        Ok(())
    }
}

impl DiskFile for SimFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn size(&self) -> DiskResult<u64> {
        Ok(self.disk.lock().file(self.node).live.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> DiskResult<usize> {
        let mut state = self.disk.lock();
        let fault = state.enter("read", &self.path).map_err(|e| e.at(offset, out.len()))?;
        let live = &state.file(self.node).live;
        let start = usize::try_from(offset).map_or(live.len(), |start| start.min(live.len()));
        let mut len = out.len().min(live.len() - start);
        if fault == Some(FaultKind::Short) {
            len = len.div_ceil(2);
        }
        out[..len].copy_from_slice(&live[start..start + len]);
        if fault == Some(FaultKind::FlipBit) && len > 0 {
            out[len / 2] ^= 16;
        }
        Ok(len)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> DiskResult<usize> {
        let mut state = self.disk.lock();
        let failed = |error: DiskError| error.at(offset, bytes.len());
        let mut bytes = bytes.to_vec();
        match state.enter("write", &self.path).map_err(failed)? {
            Some(FaultKind::LeftOut) => return Ok(bytes.len()),
            Some(FaultKind::Short) => bytes.truncate(bytes.len().div_ceil(2)),
            Some(FaultKind::FlipBit) if !bytes.is_empty() => {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 16;
            }
            _ => {}
        }
        let len = bytes.len();
        let start = usize::try_from(offset).ok().filter(|start| start.checked_add(len).is_some());
        let start = start.ok_or_else(|| failed(error("write", &self.path, libc::EFBIG)))?;
        state.grow("write", &self.path, self.node, (start + len) as u64).map_err(failed)?;
        state.file(self.node).edit(Edit::Write { offset: start, bytes });
        Ok(len)
    }

    fn set_size(&self, bytes: u64) -> DiskResult<()> {
        self.run("set size", |state| self.resize("set size", state, bytes))
    }

    fn preallocate(&self, bytes: u64) -> DiskResult<()> {
        self.run("preallocate", |state| {
            let longer = bytes > state.file(self.node).live.len() as u64;
            if longer { self.resize("preallocate", state, bytes) } else { Ok(()) }
        })
    }

    fn sync(&self) -> DiskResult<()> {
        self.run("sync", |state| {
            let file = state.file(self.node);
            file.durable = file.live.clone();
            file.edits.clear();
            Ok(())
        })
    }

    fn forget_pages(&self) {}

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
