"""Files that a request names, looked at before anything is loaded: what is missing, or cannot be written, is refused in
the time that a look at a folder takes. Needs neither torch nor transformers.
"""

import glob
import os
import re
from pathlib import Path

from megatrain.config import Config, SourceConfig
from megatrain.errors import ConfigError

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (".jsonl", ".json", ".parquet", *TEXT_SUFFIXES)

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SLOW_TOKENIZERS = ("vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")


def check(config: Config) -> None:
    """Raises ConfigError for the first path of a configuration that is not what its key needs: model, tokenizer, chat
    template, data, and the checkpoint to go on from. A hub id is not looked up."""
    model = config.model
    if model.path is not None:
        check_model(model.path)
    if isinstance(model.tokenizer, str) and Path(model.tokenizer).exists():
        check_tokenizer(Path(model.tokenizer), "model.tokenizer")
    elif model.tokenizer is None and model.path is not None and not any(Path(model.path).glob("*.gguf")):
        check_tokenizer(Path(model.path), "model.path")
    if model.chat_template is not None:
        chat_template(model.chat_template)
    for source in (*config.data.train, *config.data.eval):
        if not source.path.startswith("python:"):
            find(source)
    resume = config.output.resume
    if resume not in ("auto", "never", "required") and not Path(resume).is_dir():
        raise ConfigError(f"output.resume: there is no folder {resume}; name a checkpoint or a run, or write auto")


def check_model(path: str) -> None:
    """Raises ConfigError when `path` is neither a model's folder, a `.gguf` file, nor possibly a hub id."""
    local = Path(path).expanduser()
    if path.startswith("python:"):
        return
    if local.is_dir():
        if not (local / "config.json").is_file() and not any(local.glob("*.gguf")):
            raise ConfigError(f"model.path: {local} holds no model (neither config.json nor a .gguf file)")
    elif local.is_file():
        if local.suffix != ".gguf":
            raise ConfigError(f"model.path is the file {path!r}; name the folder that it is in (or a .gguf file)")
    elif not _HUB_ID.fullmatch(path) or path.endswith((".gguf", ".safetensors")):
        raise ConfigError(f"model.path is {path!r}: there is no such folder, and a hub id looks like OWNER/NAME")


def check_tokenizer(place: Path, key: str) -> None:
    """Raises ConfigError when a folder holds no tokenizer."""
    if place.is_dir() and not any((place / name).is_file() for name in (*_TOKENIZERS, *_SLOW_TOKENIZERS)):
        raise ConfigError(f"{key}: {place} holds no tokenizer (tokenizer.json); set model.tokenizer")


def chat_template(setting: str) -> str:
    """The template that `model.chat_template` is or names. Raises ConfigError."""
    if "{" in setting:
        return setting
    try:
        text = Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise ConfigError(f"model.chat_template: {setting} cannot be read: {reason}") from None
    if "{" not in text:
        raise ConfigError(f"model.chat_template: {setting} holds no Jinja template")
    return text


def check_writable(path: Path, what: str) -> None:
    """Raises ConfigError when a file cannot be written at `path`, its folder being there already; `what` names it."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{what} {path} is a folder; name a file")
    if not folder.is_dir():
        raise ConfigError(f"{what} {path}: there is no folder {folder}; make it, or name another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{what} {path} cannot be written: permission denied; name another file")


def check_makeable(folder: Path, what: str) -> None:
    """Raises ConfigError when a folder cannot be made at `folder`, or is there and cannot be written."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{what} {folder}: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {folder}: {there} cannot be written (permission denied); name another folder")


def check_unused(folder: Path, what: str) -> None:
    """Raises ConfigError unless a new folder can be made at `folder`, or an empty one is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{what} {folder} exists already and is not empty; name another folder, or remove it first")
    check_makeable(folder, what)


def find(config: SourceConfig) -> tuple[str, ...]:
    """The files behind one entry of `data.train` or `data.eval`, in the order of reading. Raises ConfigError."""
    path = config.path
    if Path(path).is_file():
        files = [path]
    elif Path(path).is_dir():
        found = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
        files = [file for file in found if suffix_of(file) in SUFFIXES and not Path(file).name.startswith(".")]
        if not files:
            raise ConfigError(f"{path} holds no file with a suffix among {', '.join(SUFFIXES)}")
    elif glob.has_magic(path):
        matches = glob.glob(path, recursive=True)  # noqa: PTH207 - the pattern is absolute
        files = sorted(file for file in matches if Path(file).is_file())
        if not files:
            raise ConfigError(f"no file matches {path}")
    else:
        raise ConfigError(f"{path}: there is no such file or folder")
    if isinstance(config.split, str):
        files = _named_split(files, config)
    for file in files:
        if suffix_of(file) not in SUFFIXES and config.format != "text":
            raise ConfigError(
                f"{file}: the suffix is none of {', '.join(SUFFIXES)}; to read it as a document write format: text"
            )
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{file} cannot be read: permission denied")
    if len(files) == 1 and Path(files[0]).stat().st_size == 0:
        raise ConfigError(f"{files[0]} is empty")
    return tuple(files)


def _named_split(files: list[str], config: SourceConfig) -> list[str]:
    """Files called NAME or NAME-…, and those in a folder called NAME."""
    root = Path(config.path) if Path(config.path).is_dir() else Path(config.path).parent
    names: dict[str, list[str]] = {}
    for file in files:
        relative = Path(file).relative_to(root) if Path(file).is_relative_to(root) else Path(file)
        stem = relative.name.split(".")[0]
        for name in {*relative.parts[:-1], stem, stem.split("-")[0], stem.split("_")[0]}:
            names.setdefault(name, []).append(file)
    assert isinstance(config.split, str)
    if config.split not in names:
        raise ConfigError(
            f"{config.path} has no split {config.split!r}: no file or folder of that name. "
            f"There are {', '.join(sorted(names)[:12])}; a fraction such as 0.05 works too"
        )
    return names[config.split]


def suffix_of(file: str) -> str:
    """That of a file's name, `.gz` left out."""
    return Path(file.removesuffix(".gz")).suffix.lower()
