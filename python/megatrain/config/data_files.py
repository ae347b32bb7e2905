"""The files behind an entry of `data.train` or `data.eval`, found and not yet read.

A folder is more than its rows: cards, licences, hidden folders and metadata are skipped and named, and where a folder
holds several splits one of them has to be named. Needs neither torch nor transformers.
"""

import dataclasses
import glob
import importlib.util
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from megatrain.config.schema import SourceConfig
from megatrain.errors import ConfigError

INSTALL = "pip install 'megatrain[datasets]'"
"""What brings the packages that Parquet, Arrow and zstd files and data sets of the hub need."""
ROWS = "rows:"
"""Before the name of rows that a Python program hands over, in place of a path."""
TEXT_SUFFIXES = (".txt", ".md")
"""Files that are one document."""
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Files of rows."""
_COLUMNAR = (".parquet", ".arrow")
SUFFIXES = (*ROW_SUFFIXES, *TEXT_SUFFIXES)
COMPRESSED = (".gz", ".zst")

_ADVICE = {
    (".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar"): "unpack it, or compress it with gzip or zstd",
    (".xlsx", ".xls", ".ods"): "save the sheet as CSV",
    (".pdf", ".docx", ".doc", ".odt", ".rtf", ".epub"): "convert it to plain text (.txt)",
    (".feather", ".orc", ".avro", ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".db", ".sqlite"): (
        "save its rows as Parquet or JSON lines"
    ),
}
"""What to do with files that `format: text` would read as noise."""
_BINARY = frozenset(suffix for group in _ADVICE for suffix in group) | frozenset(
    ".bin .safetensors .pt .pth .gguf .onnx .model .so .o .a .pyc .exe .dll .png .jpg .jpeg .gif .webp .bmp .ico .svgz "
    ".mp3 .wav .flac .ogg .mp4 .mkv .mov .woff .woff2 .ttf .class .jar".split()
)
_CARD = re.compile(
    r"(readme|licen[cs]e|copying|notice|authors|contributing|changelog|citation|security|code_of_conduct|"
    r"(data|dataset|model)[-_]?(card|sheet))([-_.].*)?",
    re.IGNORECASE,
)
_CARD_SUFFIXES = ("", ".md", ".txt", ".rst", ".html", ".cff", ".bib")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""A split's name, and the words of file and folder names that mean it, as the `datasets` library reads them."""

_CARDS, _HIDDEN, _METAFILES, _OTHER_KIND = "cards and licences", "hidden", "metadata", "files of another kind"


@dataclasses.dataclass(frozen=True, slots=True)
class DataFiles:
    """What one source consists of."""

    files: tuple[str, ...]
    """In the order of reading."""
    settings: SourceConfig
    """The source's settings, with what a `dataset_info.json` says filled in."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(why, file) of what is in the folder and is not read; files relative to the folder."""
    named: frozenset[str] = frozenset()
    """Our names of the columns that an entry of `dataset_info.json` names, rather than has by default."""


def find(config: SourceConfig) -> DataFiles:
    """The files of a source. Raises ConfigError when there are none, or when it is not clear which are meant."""
    if "dataset_info.json" in Path(config.path.partition("#")[0]).name:
        entry = _llama_factory(config)
        if entry is not None:
            settings, named = entry
            return dataclasses.replace(find(settings), settings=settings, named=named)
    path = Path(config.path)
    skipped: list[tuple[str, str]] = []
    if path.is_file():
        files = [config.path]
    elif path.is_dir() and (saved := _saved_dataset(path, config)) is not None:
        files = saved
        config = dataclasses.replace(config, split=None) if isinstance(config.split, str) else config
    elif path.is_dir():
        files, skipped = _folder(path, config)
    elif glob.has_magic(config.path):
        matches = glob.glob(config.path, recursive=True)  # noqa: PTH207 - the pattern is absolute
        files = sorted(file for file in matches if Path(file).is_file())
        if not files:
            raise ConfigError(f"no file matches {config.path}")
    else:
        raise ConfigError(f"{config.path}: there is no such file or folder")
    if isinstance(config.split, str):
        files = _named_split(files, config)
    for file in files:
        _check_file(file, config)
    if len(files) == 1 and Path(files[0]).stat().st_size == 0:
        raise ConfigError(f"{files[0]} is empty")
    return DataFiles(tuple(files), config, tuple(skipped))


def is_hub_id(path: str) -> bool:
    """Whether a source's path is that of a data set on the hub: `OWNER/NAME` or `OWNER/NAME#CONFIGURATION`, and no file
    or folder here."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(#[\w.-]+)?", path) or Path(path.partition("#")[0]).exists():
        return False
    return suffix_of(path.partition("#")[0]) not in (*SUFFIXES, *COMPRESSED)


def check_hub_id(path: str) -> None:
    """Raises ConfigError where the package that reads such data sets is not installed. Nothing is looked up."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"{path}: there is no such file or folder, and a data set of the hub needs {INSTALL}")


def suffix_of(file: str) -> str:
    """That of a file's name, in lower case; `.gz` and `.zst` are left out."""
    path = Path(file)
    return Path(path.stem if path.suffix.lower() in COMPRESSED else path.name).suffix.lower()


def is_document(file: str) -> bool:
    """Whether a file is one text rather than rows."""
    return suffix_of(file) not in ROW_SUFFIXES


def is_columnar(file: str) -> bool:
    """Whether every row of a file has every column."""
    return suffix_of(file) in _COLUMNAR


def _check_file(file: str, config: SourceConfig) -> None:
    suffix = suffix_of(file)
    advice = next((text for group, text in _ADVICE.items() if suffix in group), None)
    if advice is not None:
        raise ConfigError(f"{file}: files of kind {suffix} cannot be read; {advice}")
    if is_columnar(file) and Path(file).suffix.lower() in COMPRESSED:
        raise ConfigError(f"{file}: {suffix} files are compressed inside and cannot be read through another; unpack it")
    if suffix not in SUFFIXES and config.format != "text":
        raise ConfigError(
            f"{file}: the suffix is not one of {', '.join(SUFFIXES)} (also compressed: {', '.join(COMPRESSED)}); to "
            "read it as a document write format: text"
        )
    if not os.access(file, os.R_OK):
        raise ConfigError(f"{file} cannot be read: permission denied")


def _folder(root: Path, config: SourceConfig) -> tuple[list[str], list[tuple[str, str]]]:
    """The files of one kind in a folder, and what is left out."""
    found: list[Path] = []
    skipped: list[tuple[str, str]] = []
    for file in sorted(file for file in root.rglob("*") if file.is_file()):
        relative = file.relative_to(root)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            skipped.append((_HIDDEN, str(relative)))
        elif file.suffix.lower() in _CARD_SUFFIXES and _CARD.fullmatch(file.stem):
            skipped.append((_CARDS, str(relative)))
        elif file.name in _METADATA or (file.name.startswith("cache-") and file.suffix == ".arrow"):
            skipped.append((_METAFILES, str(relative)))
        else:
            found.append(file)
    rows = [file for file in found if not is_document(str(file))]
    documents = [file for file in found if is_document(str(file))]
    if config.format == "text":
        documents = [file for file in documents if not _is_binary(file)]
        chosen = documents or rows
    else:
        documents = [file for file in documents if suffix_of(str(file)) in TEXT_SUFFIXES]
        chosen = _of_one_kind(root, rows) or documents
    if not chosen:
        wanted = "text file" if config.format == "text" else f"file with a suffix among {', '.join(SUFFIXES)}"
        left = f"; skipped: {', '.join(name for _, name in skipped[:4])}" if skipped else ""
        raise ConfigError(f"{root} holds no {wanted}{left}")
    picked = set(chosen)
    skipped += [(_OTHER_KIND, str(file.relative_to(root))) for file in found if file not in picked]
    files = [str(file) for file in chosen]
    if not isinstance(config.split, str):
        _one_split(root, files)
    return files, skipped


def _of_one_kind(root: Path, rows: list[Path]) -> list[Path]:
    """The files of rows of the most frequent kind, as `datasets.load_dataset` takes them: the same rows are often
    there in two formats. Raises ConfigError where no kind is the most frequent."""
    kinds = Counter(suffix_of(str(file)) for file in rows).most_common()
    if len(kinds) > 1 and kinds[0][1] == kinds[1][1]:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in kinds)
        raise ConfigError(
            f"{root} holds files of several kinds ({counts}), which may be the same rows twice; name one kind, such as "
            f"{root / ('*' + kinds[0][0])}, or each as a source of its own"
        )
    return [file for file in rows if suffix_of(str(file)) == kinds[0][0]] if kinds else []


def _is_binary(file: Path) -> bool:
    if suffix_of(str(file)) in _BINARY:
        return True
    if file.suffix.lower() in COMPRESSED:
        return False
    try:
        with file.open("rb") as stream:
            return b"\0" in stream.read(4096)
    except OSError:
        return False  # refused by name when it is looked at as one of the source's files


def _split_words(relative: Path) -> set[str]:
    """The splits whose words occur in a path, set apart as words."""
    words = set(re.split(r"[\W_]+", str(relative).lower()))
    return {split for split, names in _SPLITS.items() if words & set(names)}


def _one_split(root: Path, files: list[str]) -> None:
    """Raises ConfigError where a folder holds held-out rows beside others and none of its splits was named."""
    splits = {frozenset(_split_words(Path(file).relative_to(root))) or frozenset({"train"}) for file in files}
    if len(splits) > 1:
        names = sorted({name for split in splits for name in split}, key=list(_SPLITS).index)
        raise ConfigError(
            f"{root} holds the splits {', '.join(names)}; name one, such as {{path: {root}, split: {names[0]}}}, or a "
            "pattern of files"
        )


def _named_split(files: list[str], config: SourceConfig) -> list[str]:
    """Files called NAME or NAME-…, those in a folder called NAME, and those whose name has the split's word."""
    root = Path(config.path) if Path(config.path).is_dir() else Path(config.path).parent
    names: dict[str, list[str]] = {}
    words: dict[str, list[str]] = {}
    for file in files:
        relative = Path(file).relative_to(root) if Path(file).is_relative_to(root) else Path(file)
        stem = relative.name.split(".")[0]
        for name in {*relative.parts[:-1], stem, stem.split("-")[0], stem.split("_")[0]}:
            names.setdefault(name, []).append(file)
        for name in _split_words(relative):
            words.setdefault(name, []).append(file)
    wanted = str(config.split)
    canonical = next((split for split, spellings in _SPLITS.items() if wanted in spellings), wanted)
    found = names.get(wanted) or words.get(canonical)
    if not found and canonical == "train" and words:
        # Files without a split's word are what is trained on, beside those that are held out.
        held_out = {file for others in words.values() for file in others}
        found = [file for file in files if file not in held_out]
    if not found:
        raise ConfigError(
            f"{config.path} has no split {wanted!r}: no file or folder of that name. "
            f"There are {', '.join(sorted({*names, *words})[:12])}; a fraction such as 0.05 works too"
        )
    return found


def _saved_dataset(folder: Path, config: SourceConfig) -> list[str] | None:
    """The files of a folder that `datasets` saved (`save_to_disk`), or None for another folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = [str(name) for name in _json(folder / "dataset_dict.json").get("splits", ())]
        if isinstance(config.split, str):
            name = config.split
        elif len(splits) == 1:
            name = splits[0]
        else:
            raise ConfigError(
                f"{folder} is a saved dataset with the splits {', '.join(splits)}; name one, such as "
                f"{{path: {folder}, split: {splits[0] if splits else 'train'}}}"
            )
        if name not in splits:
            raise ConfigError(f"{folder} has no split {name!r}; there are {', '.join(splits)}")
        return _saved_dataset(folder / name, dataclasses.replace(config, split=None))
    if not (folder / "state.json").is_file():
        return None
    state = _json(folder / "state.json")
    if "_data_files" not in state:
        return None
    if isinstance(config.split, str) and state.get("_split") != config.split:
        what = f"is the split {state['_split']!r}" if state.get("_split") else "has no splits"
        raise ConfigError(f"{folder}, a saved dataset, {what}; leave split: {config.split} out, or name another folder")
    files = [str(folder / entry["filename"]) for entry in state["_data_files"]]
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"{file} is missing, and {folder / 'state.json'} names it; copy the whole folder")
    return files


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a JSON {type(value).__name__}; expected an object")
    return value


_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_COMMON_COLUMNS = {
    "system": "system",
    "tools": "tools",
    "history": "history",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
_ENTRY_KEYS = frozenset(
    "file_name file_sha1 formatting ranking columns tags num_samples hf_hub_url ms_hub_url om_hub_url script_url "
    "cloud_file_name subset split folder revision media_dir".split()
)
"""Keys of an entry; the last ones say where it is when it is no local file, which part of that is meant, and where its
images are."""
_TAGS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("role.user", "human"),
    "assistant_tag": ("role.assistant", "gpt"),
    "observation_tag": ("role.tool", "observation"),
    "function_tag": ("role.function_call", "function_call"),
    "system_tag": ("role.system", "system"),
}
"""Names in LLaMA-Factory's `dataset_info.json` to ours; of tags also the default there."""


def _llama_factory(config: SourceConfig) -> tuple[SourceConfig, frozenset[str]] | None:
    """The settings that an entry of LLaMA-Factory's `dataset_info.json` stands for, and which of their fields it names
    itself; None for another file.

    `path: data/dataset_info.json#NAME`; the name may be left out where there is one entry. As there (DatasetAttr in
    `src/llamafactory/data/parser.py`), columns with a default are read under that name where the entry has no
    `columns`, and all others only where it names them.
    """
    name_of_file, _, name = config.path.partition("#")
    file = Path(name_of_file)
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file or folder")
    entries = {key: value for key, value in _json(file).items() if isinstance(value, dict)}
    if not any({"file_name", "hf_hub_url", "ms_hub_url", "script_url"} & value.keys() for value in entries.values()):
        if name:
            raise ConfigError(f"{file} names no data set with a file_name; leave out #{name}")
        return None
    if not name and len(entries) == 1:
        name = next(iter(entries))
    if name not in entries:
        what = f"has no entry {name!r}" if name else "has several entries"
        raise ConfigError(f"{file} {what}; write path: {file}#NAME with one of {', '.join(entries)}")
    entry = entries[name]
    where = f"{file}#{name}"
    if "file_name" not in entry:
        raise ConfigError(f"{where} is not a local file (it has no file_name); download it and name the file")
    path = os.path.normpath(file.parent / str(entry["file_name"]))
    if unknown := entry.keys() - _ENTRY_KEYS:
        raise ConfigError(f"{where}: {', '.join(sorted(unknown))} cannot be read; name the file as path instead")
    if entry.get("num_samples") is not None:
        raise ConfigError(f"{where}: num_samples is not supported; write a fraction as the source's split")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt"):
        raise ConfigError(f"{where}: formatting is {formatting!r}; it must be alpaca or sharegpt")
    columns, tags = dict(entry.get("columns") or {}), dict(entry.get("tags") or {})
    fields: dict[str, str] = {}
    if formatting == "alpaca":
        unnamed = dict.fromkeys(_COLUMNS.values(), "") if columns else {}
        fields |= unnamed | {mine: columns.pop(theirs) for theirs, mine in _COLUMNS.items() if theirs in columns}
    else:
        fields["messages"] = columns.pop("messages", "conversations")
    fields |= {mine: columns.pop(theirs, "") for theirs, mine in _COMMON_COLUMNS.items()} | {"documents": ""}
    if formatting == "sharegpt":
        fields |= {mine: tags.pop(theirs, default) for theirs, (mine, default) in _TAGS.items()}
    if columns or tags:
        raise ConfigError(f"{where}: {', '.join([*columns, *tags])} cannot be read; name the file as path instead")
    if formatting == "alpaca" and set(entry.get("columns") or {}) == {"prompt"}:  # rows for its stage pt
        text = {"text": fields["instruction"]}
        return dataclasses.replace(config, path=path, format="text", fields=text | config.fields), frozenset(text)
    named = frozenset(
        (_COLUMNS | _COMMON_COLUMNS | {"messages": "messages"})[theirs] for theirs in entry.get("columns") or ()
    )
    form: Any = "preference" if entry.get("ranking") else "alpaca" if formatting == "alpaca" else "chat"
    settings = dataclasses.replace(
        config,
        path=path,
        format=form if config.format == "auto" else config.format,
        fields=fields | config.fields,
    )
    return settings, named
