"""`megatrain init MODEL DATA`: a commented configuration to start from. Loads no torch and reads no weights."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from megatrain.cli.json_schema import descriptions
from megatrain.config import Config, paths, yaml12
from megatrain.config.parsing import hints, plain
from megatrain.errors import ConfigError
from megatrain.system.atomic import write_whole

_HEAD = """\
# A configuration for megatrain. Every key that is not here has its default; `megatrain schema` lists all of them.
#
#   megatrain plan {out}              whether it fits, and how long a step takes
#   megatrain train {out} --dry-run   everything but the steps
#   megatrain train {out}             Ctrl-C saves and stops; the same command goes on
"""

_SHOWN: dict[str, tuple[str, ...]] = {
    "data": ("seq_len", "packing"),
    "train": ("epochs", "batch_tokens", "lr", "schedule", "weight_decay", "max_grad_norm", "seed"),
    "output": ("dir", "save_every", "keep", "export"),
}
"""Keys that are written out, by section, besides `model`, `data.train` and `data.eval`."""

_SUGGESTED = {
    "data.eval": "0.05",
    "eval.every": "200",
    "eval.keep_best": "true",
    "memory.gpu": "20GiB",
    "memory.host": "100GiB",
    "plan.micro_batch": "4",
}
"""Keys that are written as a comment, with an example."""

_SAVE_EVERY = "30min"


def write_configuration(model: str, data: str, out: Path) -> Path:
    """Writes a configuration that trains `model` on `data` to the new file `out`. Raises ConfigError when one of them
    cannot be used, or when `out` exists."""
    paths.check_writable(out, "--out")
    if out.exists():
        raise ConfigError(f"--out {out} exists already; name another file, or remove it first")
    run = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).name or model) or "run"
    settings: dict[str, Any] = {
        "model": model,
        "data": {"train": data},
        "output": {"dir": f"runs/{run}", "save_every": _SAVE_EVERY},
    }
    config = Config.from_dict(settings)
    paths.check(config)
    tree = config.to_dict()
    tree["output"]["dir"] = settings["output"]["dir"]
    write_whole(out, _text(tree, out, model, data))
    Config.load(out)  # what was written is what a run accepts
    return out


def _text(tree: dict[str, Any], out: Path, model: str, data: str) -> str:
    lines = [_HEAD.format(out=out.name), *_setting(Config, "model", _scalar(_seen_from(out, model))), ""]
    for section in ("data", "train", "eval", "memory", "plan", "output"):
        kind = hints(Config)[section]
        inner = _setting(kind, "train", _scalar(_seen_from(out, data))) if section == "data" else []
        for key in _SHOWN.get(section, ()):
            inner += _setting(kind, key, _value(tree[section][key]))
        for name, value in _SUGGESTED.items():
            if name.startswith(f"{section}."):
                setting = _setting(kind, name.partition(".")[2], value)
                inner += [f"# {line}" for line in setting] if section in _SHOWN else setting
        lines.append(f"# {_sentence(Config, section)}")
        whole = [f"{section}:", *(f"  {line}" for line in inner)]
        lines += whole if section in _SHOWN else [f"# {line}" for line in whole]
        lines.append("")
    return "\n".join(lines)


def _setting(section: type, key: str, value: str) -> list[str]:
    return [f"# {_sentence(section, key)}", f"{key}: {value}"]


def _sentence(section: type, key: str) -> str:
    """The first sentence of a key's description."""
    return re.split(r"(?<=\.) ", descriptions(section)[key])[0]


def _value(value: Any) -> str:
    if isinstance(value, dict):  # a schedule: its name and warm-up
        return f"{{name: {value['name']}, warmup: {value['warmup']:g}, min_lr: {value['min_lr']:g}}}"
    return "null" if value is None else _scalar(plain(value))


def _scalar(value: Any) -> str:
    """A value as YAML reads it back, quoted where it has to be."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    with contextlib.suppress(ValueError):  # such as a path with a colon, which is no YAML as it is
        if yaml12.load(f"key: {text}", "a value") == {"key": value}:
            return text
    return json.dumps(value, ensure_ascii=False)


def _seen_from(out: Path, given: str) -> str:
    """A path of the command line as the file will read it: relative to the file's folder where it is inside of that.
    What is no path here (a hub id, `python:stdlib`) stays."""
    folder, path = out.absolute().parent, Path(os.path.normpath(Path.cwd() / Path(given).expanduser()))
    is_path = path.exists() or any(character in given for character in "*?[")
    if given.startswith("python:") or not is_path:
        return given
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
