"""From a file's text and command-line words to one mapping: short forms, paths, overrides."""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatrain.config import yaml12
from megatrain.config.data_files import ROWS, is_hub_id
from megatrain.config.schema import SourceConfig
from megatrain.errors import ConfigError

# Settings of which only one can be given: a word on the command line replaces the file's other one.
_RIVALS = {
    "train.steps": "train.epochs",
    "train.epochs": "train.steps",
    "train.batch_tokens": "train.batch_size",
    "train.batch_size": "train.batch_tokens",
    "model.path": "model.config",
    "model.config": "model.path",
}
_SOURCE_KEYS = frozenset(field.name for field in dataclasses.fields(SourceConfig))
_RESUME_WORDS = ("auto", "never", "required")


class _Resolved(str):
    """A path or id that has been looked at once already and stays as it is."""

    __slots__ = ()


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The mapping in a YAML file, short forms written out and paths absolute, and `FILE:LINE` of each of its
    keys. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        raw = yaml12.load(text, str(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if raw is None:
        raise ConfigError(f"{path} is empty; it needs at least model and data")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; expected sections such as `model:` and `data:`")
    return located(normal(raw), path.parent), yaml12.lines(text, str(path))


def normal(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Writes short forms out: `model: PATH`, `data: FILE`, one source for a list, a schedule's name, `section:`."""
    tree: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, Mapping):
            value = dict(value)
        elif value is None and name in ("model", "data", "train", "eval", "memory", "plan", "output"):
            value = {}
        tree[name] = value
    if isinstance(tree.get("model"), str):
        tree["model"] = {"path": tree["model"]}
    if isinstance(tree.get("data"), (str, list)):
        tree["data"] = {"train": tree["data"]}
    if isinstance(data := tree.get("data"), dict):
        for name in ("train", "eval"):
            if name in data:
                data[name] = _named_sets(data[name]) if name == "eval" else _sources(data[name])
        _check_held_out(data.get("eval"))
    if isinstance(train := tree.get("train"), dict) and isinstance(train.get("schedule"), str):
        train["schedule"] = {"name": train["schedule"]}
    if isinstance(output := tree.get("output"), dict) and output.get("export") is False:
        output["export"] = "never"
    return tree


def _check_held_out(value: Any, key: str = "data.eval") -> None:
    """Refuses numbers and switches that are no part of the training rows."""
    if isinstance(value, (bool, int, float)) and not (isinstance(value, float) and 0 < value < 1):
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ConfigError(
            f"{key} is {shown}; a fraction between 0 and 1, such as 0.05, holds that part of the training rows "
            "out, a file or a list of sources is held-out data of its own, and null turns it off"
        )


def _named_sets(value: Any) -> Any:
    """Held-out data as a list: a mapping of names to sources, lists or fractions becomes sources with names. One with a
    key of a source is a source itself."""
    if not isinstance(value, Mapping) or not value or _SOURCE_KEYS & value.keys():
        return _sources(value)
    found: list[Any] = []
    for name, sources in value.items():
        key = f"data.eval.{name}"
        _check_held_out(sources, key)
        if isinstance(sources, float):
            sources = {"split": sources}  # of every training source
        if not isinstance(sources, (str, Mapping, list, tuple)) or not sources:
            raise ConfigError(f"{key} names no source; write a file, a list of sources, or a fraction such as 0.05")
        found += [item | {"name": name} if isinstance(item, dict) else item for item in _sources(sources)]
    return found


def _sources(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, (str, Mapping)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    return [
        {"path": item} if isinstance(item, str) else dict(item) if isinstance(item, Mapping) else item for item in value
    ]


def located(tree: dict[str, Any], base: Path) -> dict[str, Any]:
    """Makes every path in a normal tree absolute, seen from `base`."""
    if isinstance(model := tree.get("model"), dict):
        for name in ("path", "tokenizer"):
            if isinstance(model.get(name), str):
                model[name] = _folder_or_id(model[name], base, f"model.{name}")
        template = model.get("chat_template")
        named = isinstance(template, str) and is_template_name(template) and not (base / template).is_file()
        if isinstance(template, str) and template and "{" not in template and not named:
            model["chat_template"] = _path(template, base, "model.chat_template")
    if isinstance(data := tree.get("data"), dict):
        if isinstance(data.get("cache"), str):
            data["cache"] = _path(data["cache"], base, "data.cache")
        for name in ("train", "eval"):
            sources = data.get(name)
            for source in sources if isinstance(sources, list) else ():
                path = source.get("path") if isinstance(source, dict) else None
                if isinstance(path, str) and path and not path.startswith(("python:", ROWS)):
                    located_path = _path(path, base, f"the path of a source of data.{name}")
                    there = Path(located_path.partition("#")[0]).exists()
                    source["path"] = _Resolved(path) if is_hub_id(path) and not there else located_path
    if isinstance(output := tree.get("output"), dict):
        if isinstance(output.get("dir"), str):
            output["dir"] = _path(output["dir"], base, "output.dir")
        if isinstance(output.get("resume"), str) and output["resume"] not in _RESUME_WORDS:
            output["resume"] = _path(output["resume"], base, "output.resume")
    if isinstance(memory := tree.get("memory"), dict) and isinstance(memory.get("nvme"), Mapping):
        memory["nvme"] = dict(memory["nvme"])
        key, given = "memory.nvme.path", memory["nvme"].get("path")
        if isinstance(given, str):
            memory["nvme"]["path"] = _path(given, base, key)
        elif isinstance(given, list | tuple):
            memory["nvme"]["path"] = [_path(path, base, key) if isinstance(path, str) else path for path in given]
    return tree


def is_template_name(setting: str) -> bool:
    """Whether `model.chat_template` is a word that names one of the tokenizer's templates, rather than a file."""
    return re.fullmatch(r"[A-Za-z_]\w*", setting) is not None


def _path(text: str, base: Path, key: str) -> str:
    if isinstance(text, _Resolved):
        return text
    if not text or "\0" in text:
        raise ConfigError(f"{key} is {text!r}, which is not a path; name one, or leave the key out")
    return _Resolved(os.path.normpath(base.absolute() / Path(text).expanduser()))


def _folder_or_id(text: str, base: Path, key: str) -> str:
    """A hub id (`owner/name`, `name`) stays; what exists, or can only be a path, becomes absolute."""
    if isinstance(text, _Resolved) or text.startswith("python:"):
        return text
    path = _path(text, base, key)
    if Path(path).exists():
        return path
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith((".gguf", "/")):
        raise ConfigError(f"{key}: {path} does not exist")
    return _Resolved(text)


def override(tree: dict[str, Any], words: Iterable[str], base: Path) -> dict[str, Any]:
    """Applies `section.key=value` words to a normal tree; values are YAML, paths seen from `base`."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"{word!r} is not an override; write section.key=value, such as train.lr=2e-5")
        if key in given:
            raise ConfigError(f"{key} is given twice on the command line: {given[key]} and {text}")
        try:
            value = yaml12.load(text, f"{key}=")
        except ValueError as error:
            raise ConfigError(f"the value of an override is not YAML: {error}") from None
        given[key] = text
        tree = located(normal(_set(tree, key.split("."), value, key)), base)
    for key in given:
        rival = _RIVALS.get(key)
        if rival in _RIVALS and rival not in given and isinstance(tree.get(rival.split(".")[0]), dict):
            if key.startswith("model.") and not _is_architecture(tree["model"].get("config")):
                continue  # keys of the path's configuration that are replaced
            section, name = rival.split(".")
            if tree[section].get(key.split(".")[1]) is not None:
                tree[section].pop(name, None)
    return tree


def _is_architecture(config: Any) -> bool:
    return isinstance(config, Mapping) and "model_type" in config


def _set(tree: dict[str, Any], parts: list[str], value: Any, key: str) -> dict[str, Any]:
    node: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            named = [index for index, item in enumerate(node) if isinstance(item, dict) and item.get("name") == part]
            if len(named) == 1:  # a held-out set
                index = named[0]
                if not last:
                    node = node[index]
                    continue
                node[index] = (dict(value) if isinstance(value, Mapping) else {"path": value}) | {"name": part}
                return tree
            if not part.isdigit():
                # `data.train.path=…` speaks of the only source.
                if len(node) > 1:
                    name = ".".join(parts[:depth])
                    raise ConfigError(
                        f"{key}: {name} has {len(node)} entries; write {name}.0.{'.'.join(parts[depth:])}"
                    )
                if not node:
                    node.append({})
                node[0] = _set(node[0] if isinstance(node[0], dict) else {}, parts[depth:], value, key)
                return tree
            index = int(part)
            if index > len(node):
                raise ConfigError(f"{key}: there are only {len(node)} entries")
            if index == len(node):
                node.append({})
            if last:
                node[index] = value
            node = node[index]
        elif last:
            node[part] = value
        else:
            inner = node.get(part)
            if isinstance(inner, Mapping):
                inner = dict(inner)
            elif not isinstance(inner, list):
                if inner is not None and not isinstance(inner, str):
                    raise ConfigError(
                        f"{key}: {'.'.join(parts[: depth + 1])} is {inner!r}, which has no settings below it"
                    )
                inner = [] if parts[: depth + 1] in (["data", "train"], ["data", "eval"]) else {}
            node[part] = inner
            node = inner
    return tree
