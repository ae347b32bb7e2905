//! Every state in which a power cut can leave the simulated disk.
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Edit, FileNode, Node, ROOT, SimDisk, State};

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

impl FileNode {
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

impl State {
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
            change.apply(folders.entry(change.folder).or_insert_with(durable));
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

impl SimDisk {
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
