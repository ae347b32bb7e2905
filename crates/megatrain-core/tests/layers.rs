//! The folders of the core stand one on another: each uses only those before it in this list, so that there are no
//! circles and every folder can be read without those after it.
use std::path::{Path, PathBuf};

/// Bottom to top.
const LAYERS: [&str; 15] = [
    "error",
    "random",
    "layout",
    "trace",
    "disk",
    "host",
    "adamw",
    "device",
    "store",
    "plan",
    "schedule",
    "estimate",
    "planner",
    "optimizer",
    "stream",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The layer that a source file belongs to: its folder, or its own name at the top.
fn layer_of(path: &Path, root: &Path) -> String {
    let inside = path.strip_prefix(root).unwrap();
    let first = inside.components().next().unwrap().as_os_str().to_str().unwrap();
    first.trim_end_matches(".rs").to_owned()
}

fn rank(layer: &str) -> Option<usize> {
    LAYERS.iter().position(|&known| known == layer)
}

/// The names that follow `crate::` in code, those of a braced list included; comments and strings may name what they like.
fn used(text: &str) -> Vec<String> {
    let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let code = code.join("\n");
    let word = |text: &str| text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    let mut names: Vec<String> = Vec::new();
    for (at, path) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code[at + path.len()..];
        match rest.strip_prefix('{') {
            // One name for each item of the outermost list.
            Some(list) => {
                let mut depth = 0;
                let mut begins = true;
                for (index, c) in list.char_indices() {
                    if begins && depth == 0 && c.is_alphabetic() {
                        names.push(word(&list[index..]));
                        begins = false;
                    }
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => begins = true,
                        _ => {}
                    }
                }
            }
            None => names.push(word(rest)),
        }
    }
    names
}

#[test]
fn a_folder_uses_only_folders_before_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut wrong = Vec::new();
    let mut seen = [false; LAYERS.len()];
    for file in files.iter().filter(|file| !file.ends_with("lib.rs")) {
        let layer = layer_of(file, &root);
        let own = rank(&layer).unwrap_or_else(|| panic!("{} belongs to no layer of the list", file.display()));
        seen[own] = true;
        for name in used(&std::fs::read_to_string(file).unwrap()) {
            // `crate::Error` and its like are re-exports of the lowest layer.
            let Some(other) = rank(&name) else { continue };
            if other > own {
                wrong.push(format!("{}: {layer} uses {name}, which stands above it", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen.iter().all(|&seen| seen), "a layer of the list has no source: {seen:?}");
}

#[test]
fn uses_are_found_in_every_form() {
    let text = "use crate::host::{HostSpan, Pool};\nuse crate::{device, error::{Error, Result}, plan::Plan};\n\
                // use crate::stream::Engine;\nlet x = crate::layout::PAGE; my_crate::other::f();";
    assert_eq!(used(text), ["host", "device", "error", "plan", "layout"]);
}
