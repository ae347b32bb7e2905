"""`Config`: all settings of a run, read from YAML, a mapping or keywords, checked as a whole."""

import dataclasses
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from megatrain.config import loading as raw_config
from megatrain.config import yaml12
from megatrain.config.default_length import shorten
from megatrain.config.parsing import plain, read
from megatrain.config.schema import (
    DEFAULT_BATCH_TOKENS,
    DataConfig,
    EvalConfig,
    MemoryConfig,
    ModelConfig,
    OutputConfig,
    PlanConfig,
    SourceConfig,
    TrainConfig,
)
from megatrain.config.validation import check
from megatrain.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that is asked of a run. Construction raises ConfigError for what is wrong or contradictory."""

    model: ModelConfig
    """What is trained."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """What it is trained on."""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """How it is trained."""
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    """When held-out loss is measured."""
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    """How much of each memory may be used."""
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    """Numbers that the planner derives."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where layers are computed; `auto`: CUDA if there is a usable card."""
    output: OutputConfig = dataclasses.field(default_factory=OutputConfig)
    """Where a run leaves what."""

    def __post_init__(self) -> None:
        train, data = self.train, self.data
        if train.batch_tokens is None and train.batch_size is None:
            # The default follows seq_len; what was asked for is checked instead.
            windows = max(1, DEFAULT_BATCH_TOKENS // data.seq_len)
            tokens = windows * data.seq_len if data.packing else DEFAULT_BATCH_TOKENS
            object.__setattr__(self, "train", dataclasses.replace(train, batch_tokens=tokens))
        object.__setattr__(self, "data", _held_out(data))
        check(self)

    @classmethod
    def load(cls, path: str | PathLike[str], overrides: Iterable[str] = ()) -> "Config":
        """Reads a YAML file, then applies `section.key=value` words.

        Paths in the file are relative to it, those in `overrides` to the working directory.
        """
        tree, lines = raw_config.read(Path(path))
        words = list(overrides)
        tree = raw_config.override(tree, words, Path.cwd())
        # What the command line gives stands on no line of the file.
        lines |= {word.partition("=")[0].strip(): "" for word in words}
        config: Config = read(cls, _spread(tree), lines)
        return config

    @classmethod
    def from_dict(
        cls, mapping: Mapping[str, Any], overrides: Iterable[str] = (), base: str | PathLike[str] | None = None
    ) -> "Config":
        """The same from a mapping; its paths are relative to `base` (default: the working directory)."""
        tree = raw_config.located(raw_config.normal(mapping), Path.cwd() if base is None else Path(base))
        config: Config = read(cls, _spread(raw_config.override(tree, overrides, Path.cwd())))
        return config

    @classmethod
    def of(cls, config: "Config | Mapping[str, Any] | str | PathLike[str]") -> "Config":
        """What is given as a Config: itself, a mapping, or the path of a YAML file."""
        if isinstance(config, Config):
            return config
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        if not isinstance(config, (str, PathLike)):
            raise ConfigError(f"a configuration is a path, a mapping or a Config, not {config!r}")
        return cls.load(config)

    def to_dict(self) -> dict[str, Any]:
        """The effective settings as plain values; `from_dict` gives an equal Config back."""
        tree: dict[str, Any] = plain(self)
        return tree

    def run_plan(self, precision: str) -> "Config":
        """The same once it is known that compute is in `precision`, bf16 or fp32: with the precision of gradients that
        follows from it, where none was asked for."""
        train = dataclasses.replace(self.train, grad_precision=self.train.sent_in(precision))
        return dataclasses.replace(self, train=train)

    def to_yaml(self) -> str:
        """The effective settings as YAML; reading it gives an equal Config back."""
        return yaml12.dump(self.to_dict())

    def require(self, *keys: Literal["data", "output"]) -> None:
        """Raises ConfigError when what a verb needs is not set: training `data`, or the `output` folder."""
        if "data" in keys:
            if not self.data.train:
                raise ConfigError("data.train is not set; name a file, a folder or python:stdlib")
            if self.model.path is None and self.model.tokenizer is None:
                raise ConfigError(
                    "model.tokenizer is not set, and a model from model.config has none; name a folder or hub id, "
                    "or write {train: bpe, vocab_size: 4096}"
                )
        if "output" in keys and self.output.dir is None:
            raise ConfigError("output.dir is not set; name the folder for checkpoints, logs and the export")


def _spread(tree: dict[str, Any]) -> dict[str, Any]:
    """`data.eval: 0.05` holds that part of every training source out; `data.seq_len` is what the model has."""
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("train"), list):
        held_out = data.get("eval")
        if isinstance(held_out, float):
            data["eval"] = _parts_of(data["train"], {"split": held_out})
        elif isinstance(held_out, list):
            fractions = [f"data.eval.{entry['name']}" for entry in held_out if _is_fraction(entry)]
            if len(fractions) > 1:
                raise ConfigError(
                    f"{' and '.join(fractions)} are fractions of the training data, which are taken from one end: they "
                    "would hold the same rows. Keep one of them, and name other data for the rest"
                )
            data["eval"] = [
                source
                for entry in held_out
                for source in (_parts_of(data["train"], entry) if _is_fraction(entry) else [entry])
            ]
    if "model" not in tree:
        raise ConfigError("model is missing; write `model: PATH` with a folder or hub id")
    shorten(tree)
    return tree


def _is_fraction(entry: Any) -> bool:
    """Whether a held-out set is a part of every training source."""
    return isinstance(entry, dict) and entry.keys() == {"name", "split"} and isinstance(entry["split"], float)


def _parts_of(train: list[Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """The training sources with what `part` sets: the split that is held out, and the set's name."""
    sources = []
    for source in train:
        if not isinstance(source, dict):
            continue
        if isinstance(source.get("split"), str):
            raise ConfigError(
                f"data.eval: {part['split']} cannot hold rows of split {source['split']!r} of {source.get('path')} "
                "out; name another split of it in data.eval"
            )
        sources.append({name: value for name, value in source.items() if name != "weight"} | part)
    return sources


def _held_out(data: DataConfig) -> DataConfig:
    """A fraction of a path that `eval` takes is left out of the training source with the same path."""
    train: list[SourceConfig] = []
    for source in data.train:
        taken = [other.split for other in data.eval if other.path == source.path and isinstance(other.split, float)]
        if taken:
            rest = 1.0 - max(taken)
            if source.split is None:
                source = dataclasses.replace(source, split=rest)
            elif isinstance(source.split, float) and source.split > rest + 1e-9:
                raise ConfigError(
                    f"data.train and data.eval share rows of {source.path}: split {source.split} and split "
                    f"{max(taken)} are more than 1 together; lower one of them"
                )
        train.append(source)
    return dataclasses.replace(data, train=tuple(train))
