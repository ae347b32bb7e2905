"""Plain mappings, as YAML gives them, into sections and back. All wrong settings are reported together, each with file
and line, its key, its value and what was expected."""

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatrain.config import yaml12
from megatrain.errors import ConfigError
from megatrain.names import nearest
from megatrain.units import Duration, format_size, parse_size

# What people write who come from other trainers.
_OTHER_NAMES = {
    "learning_rate": "train.lr",
    "max_lr": "train.lr",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "plan.micro_batch",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "lr_scheduler_type": "train.schedule.name",
    "warmup_ratio": "train.schedule.warmup",
    "warmup_steps": "train.schedule.warmup",
    "gradient_clipping": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "output_dir": "output.dir",
    "save_steps": "output.save_every",
    "logging_steps": "output.log_every",
    "eval_steps": "eval.every",
    "resume_from_checkpoint": "output.resume",
    "dtype": "train.precision",
    "bf16": "train.precision",
    "model_name_or_path": "model.path",
    "num_workers": "data.workers",
}


@functools.cache
def hints(section: type) -> dict[str, Any]:
    """Types of a section's settings, by name."""
    return typing.get_type_hints(section, include_extras=True)


@functools.cache
def all_keys(section: type, prefix: str = "") -> tuple[str, ...]:
    """Every setting in and below a section, dotted."""
    keys: list[str] = []
    for name, hint in hints(section).items():
        keys.append(prefix + name)
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type) and part is not Duration:
                keys.extend(all_keys(part, f"{prefix}{name}."))
    return tuple(keys)


class Reader:
    """What reading one configuration needs: where its keys are, and the errors found so far."""

    def __init__(self, root: type, lines: Mapping[str, str] | None = None) -> None:
        self.root = root
        """The class of the whole configuration."""
        self._lines = lines or {}
        """`FILE:LINE` by dotted key; empty for what the command line gives."""
        self._errors: list[str] = []

    def report(self, key: str, message: str) -> None:
        """Notes what is wrong with a setting."""
        parts = key.split(".")
        # A short form is on the line of the section or setting that it stands for.
        known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        where = next((self._lines[name] for name in known if name in self._lines), None)
        self._errors.append(message if not where else f"{where}: {message}")

    def failed(self, since: int = 0) -> bool:
        """Whether anything was reported after the first `since` errors."""
        return len(self._errors) > since

    @property
    def count(self) -> int:
        """Errors so far."""
        return len(self._errors)

    def check(self) -> None:
        """Raises ConfigError with all errors, where there are any."""
        if len(self._errors) == 1:
            raise ConfigError(self._errors[0])
        if self._errors:
            raise ConfigError(
                "\n".join([f"{len(self._errors)} settings are wrong:", *(f"  {e}" for e in self._errors)])
            )


def read(section: type, raw: Any, lines: Mapping[str, str] | None = None) -> Any:
    """An instance of the dataclass `section` from a mapping. `lines`: `FILE:LINE` of each key, dotted. Raises
    ConfigError with everything that is wrong."""
    reader = Reader(section, lines)
    found = build(section, raw, "", reader)
    reader.check()
    return found


def unknown_key(name: object, section: type, prefix: str, root: type) -> str:
    """The message about a key that `section` (at `prefix`, such as `train.`) does not have."""
    text = str(name)
    message = f"{prefix}{text} is not a setting"
    everywhere = all_keys(root)
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == text]
    if elsewhere:
        near = nearest(text, hints(section), cutoff=0.85)
        own = f" did you mean {prefix}{near}? Else" if near else ""
        return f"{message};{own} {text} belongs to another section: {' or '.join(elsewhere)}"
    if meant := _meant(text, section, prefix, everywhere):
        return f"{message}; did you mean {meant}?"
    where = prefix.rstrip(".") or "a configuration"
    return f"{message}; {where} has {', '.join(hints(section))}"


def _meant(text: str, section: type, prefix: str, everywhere: tuple[str, ...]) -> str | None:
    """The setting whose name, or whose name elsewhere, is the most like `text`; a neighbour in the section is likelier
    than one of another section."""
    names = [(name, prefix + name, 0.6, 0.1) for name in hints(section)]
    names += [(key.rpartition(".")[2], key, 0.7, 0.0) for key in everywhere]
    names += [(name, key, 0.8, 0.05) for name, key in _OTHER_NAMES.items()]
    matcher = difflib.SequenceMatcher(b=text)
    best, found = 0.0, None
    for name, key, cutoff, bonus in names:
        matcher.set_seq1(name)
        likeness = matcher.ratio()
        if likeness >= cutoff and likeness + bonus > best:
            best, found = likeness + bonus, key
    return found


def build(section: type, raw: Any, prefix: str, reader: Reader) -> Any:
    """An instance of the dataclass `section` from a mapping; None where something is wrong, which is reported to
    `reader`."""
    if not isinstance(raw, Mapping):
        key = prefix.rstrip(".")
        reader.report(key, f"{key} is {_show(raw)}; expected a mapping with keys from {', '.join(hints(section))}")
        return None
    before = reader.count
    values = {}
    for name, value in raw.items():
        if name not in hints(section):
            reader.report(f"{prefix}{name}", unknown_key(name, section, prefix, reader.root))
            continue
        try:
            values[name] = convert(value, hints(section)[name], prefix + name, reader)
        except ConfigError as error:
            reader.report(prefix + name, str(error))
    for field in dataclasses.fields(section):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in raw:
            reader.report(prefix + field.name, f"{prefix}{field.name} is missing")
    if reader.failed(before):
        return None
    try:
        return section(**values)
    except ConfigError as error:
        # Its first word is the key, where it names one.
        reader.report(str(error).partition(" ")[0].rstrip(":"), str(error))
        return None


def convert(value: Any, hint: Any, key: str, reader: Reader) -> Any:
    """`value` as the type `hint` asks for. Raises ConfigError."""
    if isinstance(value, str) and _asks_for_a_number(hint):
        # Mappings from elsewhere hold 2e-3 as a string, since other readers follow YAML 1.1.
        number = yaml12.number(value)
        value = value if number is None else number
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint is not Duration:
        return build(hint, value, f"{key}.", reader)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, typing.get_args(hint), key, reader)
    if origin is tuple:
        return _convert_sequence(value, hint, key, reader)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(value, hint, key)
        item = typing.get_args(hint)[1]
        if not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{key} has a key that is not a string: {_show(next(iter(value)))}")
        return {str(name): convert(inner, item, f"{key}.{name}", reader) for name, inner in value.items()}
    try:
        return _convert_scalar(value, hint)
    except TypeError:
        raise _wrong_type(value, hint, key) from None
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _asks_for_a_number(hint: Any) -> bool:
    """Whether a number fits and a string as such does not."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return (int in parts or float in parts) and str not in parts


def _convert_union(value: Any, parts: tuple[Any, ...], key: str, reader: Reader) -> Any:
    for part in parts:
        if isinstance(value, Mapping) and dataclasses.is_dataclass(part) and part is not Duration:
            return convert(value, part, key, reader)
    reason: ValueError | None = None
    for part in parts:
        try:
            return _convert_scalar(value, part)
        except TypeError:
            continue
        except ValueError as error:
            reason = error
    if reason is not None:
        others = [part for part in parts if typing.get_origin(part) is typing.Literal]
        hint = f" (or {' or '.join(describe(part) for part in others)})" if others else ""
        raise ConfigError(f"{key}: {reason}{hint}")
    for part in parts:
        if typing.get_origin(part) in (tuple, dict) and isinstance(value, (list, tuple, Mapping)):
            return convert(value, part, key, reader)
    raise _wrong_type(value, typing.Union[parts], key)  # noqa: UP007 - built at run time


def _convert_sequence(value: Any, hint: Any, key: str, reader: Reader) -> tuple[Any, ...]:
    parts = typing.get_args(hint)
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(value, hint, key)
    if parts[-1] is Ellipsis:
        return tuple(convert(item, parts[0], f"{key}.{index}", reader) for index, item in enumerate(value))
    if len(value) != len(parts):
        raise _wrong_type(value, hint, key)
    return tuple(
        convert(item, part, f"{key}.{index}", reader)
        for index, (item, part) in enumerate(zip(value, parts, strict=True))
    )


_MOST_BITS = 128
"""Of a whole number: no setting takes so large a one, and sums and floats of those that pass are finite."""


def _convert_scalar(value: Any, hint: Any) -> Any:
    """TypeError: another type fits better. ValueError: the right type, a wrong value."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin is typing.Literal:
        if isinstance(value, str) and value in typing.get_args(hint):
            return str(value)
        raise TypeError
    if origin is typing.Annotated:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return parse_size(value)
        raise TypeError
    if hint is Duration:
        if isinstance(value, Duration):
            return value
        if isinstance(value, str):
            return Duration.parse(value)
        raise TypeError
    if hint is type(None) and value is None:
        return None
    if hint is bool and isinstance(value, bool):
        return value
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a whole number of {value.bit_length()} bits; it must have at most {_MOST_BITS}")
    if hint is float and isinstance(value, (int, float)):
        return float(value)
    if hint is int and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        return int(value)
    if hint is str and isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{value!r} holds half a surrogate pair at character {error.start}") from None
        return str(value)
    raise TypeError


def _wrong_type(value: Any, hint: Any, key: str) -> ConfigError:
    message = f"{key} is {_show(value)}; expected {describe(hint)}"
    if isinstance(value, str) and "number" in describe(hint) and value.replace("_", "").isdigit():
        message += ". Write digits without underscores"
    choices = [choice for part in (hint, *typing.get_args(hint)) for choice in _choices(part)]
    if isinstance(value, str) and choices:
        close = nearest(value, choices)
        message += f"; did you mean {close}?" if close else ""
    return ConfigError(message)


def _choices(hint: Any) -> tuple[str, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def describe(hint: Any) -> str:
    """A type in words: `a whole number or null`."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " or ".join(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(part) for part in typing.get_args(hint))
    if origin is typing.Annotated:
        return "a size such as 12GiB"
    if origin is tuple:
        parts = typing.get_args(hint)
        if parts[-1] is Ellipsis:
            return f"a list, each {describe(parts[0])}"
        return f"a list of {len(parts)}, each {describe(parts[0])}"
    if origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint is not Duration:
        return f"a mapping with keys from {', '.join(hints(hint))}"
    return {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        type(None): "null",
        Duration: "a duration such as 30min",
    }.get(hint, str(hint))


def _show(value: Any) -> str:
    kind = {bool: "", type(None): "", str: "the string ", dict: "the mapping ", list: "the list "}.get(type(value), "")
    text = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    return kind + (text if len(text) <= 80 else text[:77] + "...")


def plain(value: Any, hint: Any = Any) -> Any:
    """The reverse of `convert`: what YAML can write and `convert` reads back as an equal value."""
    if isinstance(value, Duration):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name), part) for name, part in hints(type(value)).items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    sized = any(typing.get_origin(part) is typing.Annotated for part in (hint, *typing.get_args(hint)))
    return format_size(value) if sized and isinstance(value, int) else value
