"""`megatrain init MODEL DATA`: a commented configuration to start from. Loads no torch and reads no weights."""

import contextlib
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from megatrain.cli.json_schema import descriptions
from megatrain.config import Config, paths, yaml12
from megatrain.config.data_size import BYTES_PER_TOKEN, data_bytes, row_bytes
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

_STEPS = 25
"""Steps that an epoch should have: answers begin to change after a few dozen."""

_SHORTEST = 256
"""The shortest windows that are written."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """What suits the data in place of the defaults, by key."""

    values: dict[str, int]
    reasons: dict[str, str]
    """A sentence for each of the values."""
    suggested: dict[str, str]
    """In place of those of `_SUGGESTED`."""


def write_configuration(model: str, data: str, out: Path) -> Path:
    """Writes a configuration that trains `model` on `data` to the new file `out`. Raises ConfigError when one of them
    cannot be used, or when `out` exists."""
    paths.check_writable(out, "--out")
    if out.exists():
        raise ConfigError(f"--out {out} exists already; name another file, or remove it first")
    path = Path(model)
    name = f"{path.parent.name}-2" if path.name == "export" else path.name  # an export is named after its run
    run = re.sub(r"[^A-Za-z0-9_.-]+", "-", name or model) or "run"
    settings: dict[str, Any] = {
        "model": model,
        "data": {"train": data},
        "output": {"dir": f"runs/{run}", "save_every": _SAVE_EVERY},
    }
    config = Config.from_dict(settings)
    paths.check(config)
    tree = config.to_dict()
    tree["output"]["dir"] = settings["output"]["dir"]
    sizes = _sizes(config) or _Sizes({}, {}, {})
    for key, value in sizes.values.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    write_whole(out, _text(tree, out, model, data, sizes))
    Config.load(out)  # what was written is what a run accepts
    return out


def _sizes(config: Config) -> _Sizes | None:
    """Sizes for data of which the defaults would make hardly a step. None where the defaults do, and where the size of
    the data is not known."""
    size, default = data_bytes(config), config.train.batch_tokens
    if size is None or default is None:
        return None
    tokens = max(1, size // BYTES_PER_TOKEN)
    if tokens >= _STEPS * default:
        return None
    rows = row_bytes(config)
    if rows is None:
        return None
    # All rows but one in a hundred, which may be a mistake and would decide alone.
    rows.sort()
    counted = (len(rows) * 99 + 99) // 100
    longest = -(-rows[counted - 1] // BYTES_PER_TOKEN) if rows else 0
    # Twice that, for scripts that take more tokens; documents may be cut anywhere.
    window = _power_of_two(2 * longest) if rows else _power_of_two(tokens // _STEPS) // 2
    seq_len = min(config.data.seq_len, max(_SHORTEST, window))
    longer = [row for row in rows[counted:] if row > seq_len * BYTES_PER_TOKEN]
    tokens -= sum(row // BYTES_PER_TOKEN - seq_len for row in longer)  # which are cut
    step = seq_len * max(1, _power_of_two(tokens // (_STEPS * seq_len) + 1) // 2)
    steps = -(-tokens // step)
    others = f", and {len(longer)} of {len(rows):,} more" if longer else ""
    why = f"rows have up to about {longest:,} tokens{others}" if rows else "the text is short"
    more = f"; with the default of {default:,}, {-(-tokens // default)}" + "; raise epochs for more" * (
        2 * steps < _STEPS
    )
    epoch = f"an epoch of about {tokens:,} tokens (by the size of the data) has {steps} step{'s' * (steps != 1)}{more}"
    return _Sizes(
        values={"data.seq_len": seq_len, "train.batch_tokens": step},
        reasons={"data.seq_len": f"{seq_len:,} here: {why}.", "train.batch_tokens": f"With {step:,}, {epoch}."},
        suggested={"eval.every": str(max(1, steps // 4)), "plan.micro_batch": str(min(4, step // seq_len))},
    )


def _power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()


def _text(tree: dict[str, Any], out: Path, model: str, data: str, sizes: _Sizes) -> str:
    lines = [_HEAD.format(out=out.name), *_setting(Config, "model", _scalar(_seen_from(out, model))), ""]
    for section in ("data", "train", "eval", "memory", "plan", "output"):
        kind = hints(Config)[section]
        inner = _setting(kind, "train", _scalar(_seen_from(out, data))) if section == "data" else []
        for key in _SHOWN.get(section, ()):
            sentence, line = _setting(kind, key, _value(tree[section][key]))
            reason = sizes.reasons.get(f"{section}.{key}")
            inner += [sentence, *([f"# {reason}"] if reason else []), line]
        for name, value in (_SUGGESTED | sizes.suggested).items():
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
