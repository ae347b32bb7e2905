"""Files that a request names, looked at before anything is loaded: what is missing, or cannot be written, is refused in
the time that a look at a folder takes. Needs neither torch nor transformers.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from megatrain.config import Config, SourceConfig, shared_rows
from megatrain.config.data_files import ROWS, check_hub_id, find, is_hub_id
from megatrain.config.loading import is_template_name
from megatrain.errors import ConfigError

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SLOW_TOKENIZERS = ("vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")


def check(config: Config) -> None:
    """Raises ConfigError for the first path of a configuration that is not what its key needs: model, tokenizer, chat
    template, data, and the checkpoint to go on from; also for a held-out file that is trained on. A hub id is not
    looked up."""
    model = config.model
    if model.path is not None:
        check_model(model.path)
    if isinstance(model.tokenizer, str) and Path(model.tokenizer).exists():
        check_tokenizer(Path(model.tokenizer), "model.tokenizer")
    elif model.tokenizer is None and model.path is not None and not any(Path(model.path).glob("*.gguf")):
        check_tokenizer(Path(model.path), "model.path")
    if model.chat_template is not None and not is_template_name(model.chat_template):
        chat_template(model.chat_template)
    shared_rows.check(_files(config.data.train), _files(config.data.eval))
    for folder in config.memory.nvme.paths if config.memory.nvme is not None else ():
        check_state_folder(Path(folder))
    resume = config.output.resume
    if resume not in ("auto", "never", "required") and not Path(resume).is_dir():
        raise ConfigError(f"output.resume: there is no folder {resume}; name a checkpoint or a run, or write auto")


def _files(sources: Iterable[SourceConfig]) -> list[shared_rows.Found]:
    """The files of those sources that are files; of the others it is only checked that they can be one."""
    found = []
    for source in sources:
        if is_hub_id(source.path):
            check_hub_id(source.path)
        elif not source.path.startswith(("python:", ROWS)):  # rows are looked for where they are used
            found.append((source, find(source)))
    return found


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


def check_state_folder(folder: Path) -> None:
    """Raises ConfigError when `memory.nvme.path` is no folder that can be written. It is not made here: where a drive
    is not mounted, its folder would be one on the wrong disk."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"memory.nvme.path: {folder} {what}; make the folder, or name another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"memory.nvme.path: {folder} cannot be written ({_why_not(folder)}); name another folder, or change that"
        )


def check_tokenizer(place: Path, key: str) -> None:
    """Raises ConfigError when a folder holds no tokenizer."""
    if place.is_dir() and not any((place / name).is_file() for name in (*_TOKENIZERS, *_SLOW_TOKENIZERS)):
        raise ConfigError(f"{key}: {place} holds no tokenizer (tokenizer.json); set model.tokenizer")


def chat_template(setting: str) -> str:
    """The template that `model.chat_template` is or names. Raises ConfigError."""
    if "{" in setting:
        return setting
    if not setting.strip():
        raise ConfigError(
            "model.chat_template is empty; name a Jinja file, write the template, or leave the key out for the "
            "tokenizer's own"
        )
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
        raise ConfigError(f"{what} {path} cannot be written: {_why_not(folder)}; name another file")


def check_makeable(folder: Path, what: str) -> None:
    """Raises ConfigError when a folder cannot be made at `folder`, or is there and cannot be written."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{what} {folder}: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {folder}: {there} cannot be written ({_why_not(there)}); name another folder")


def _why_not(folder: Path) -> str:
    """Why a folder, or a file in it, cannot be written."""
    return "read-only file system" if os.statvfs(folder).f_flag & os.ST_RDONLY else "permission denied"


def check_unused(folder: Path, what: str) -> None:
    """Raises ConfigError unless a new folder can be made at `folder`, or an empty one is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{what} {folder} exists already and is not empty; name another folder, or remove it first")
    check_makeable(folder, what)


def check_model_source(source: Path) -> None:
    """Refuses what is no folder, where a run or a model is asked for. Raises ConfigError."""
    if not source.is_dir():
        raise ConfigError(f"there is no folder {str(source)!r}; name a run, a checkpoint or a Hugging Face folder")
