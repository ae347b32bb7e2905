"""What a run is made from, by content: its data and its tokenizer.

Every checkpoint holds these fingerprints. Paths alone would let a run go on with a file that is another one by now.
"""

import contextlib
import datetime as dt
import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import SourceConfig
from megatrain.config.data_files import is_hub_id
from megatrain.data.readers import Source, texts
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data.dataset import Dataset

_PROBE = "The quick brown fox\n\tjumps 1234567 times; naïve café, 日本語 \U0001f98a <|x|> don't  stop\r\n"
"""Tells apart tokenizers of one vocabulary that merge in another order."""
_SAMPLE = 1 << 16
"""Characters of the training data whose tokens are compared, at least: what else a tokenizer does to text shows
there."""


def of_run(
    train: "Dataset", held_out: "Dataset | None", tokenizer: "PreTrainedTokenizerBase", sources: Sequence[SourceConfig]
) -> dict[str, Any]:
    """What every checkpoint of a run holds; `sources` are those of the training data."""
    data = {
        name: [of_source(part.source) for part in dataset.parts] if dataset is not None else []
        for name, dataset in (("train", train), ("eval", held_out))
    }
    return {"data": data, "tokenizer": of_tokenizer(tokenizer, sources), "date": train.date.isoformat()}


def of_source(source: Source) -> dict[str, Any]:
    """The fingerprint of one source's files; of the standard library's text also which Python it came with."""
    found: dict[str, Any] = {"sha256": source.digest()}
    if source.config.path.startswith("python:"):
        found["python"] = platform.python_version()
    return found


def of_tokenizer(tokenizer: "PreTrainedTokenizerBase", train: Iterable[SourceConfig]) -> dict[str, str]:
    """The fingerprint of what text becomes, that of the training data `train` above all. The library's own spelling of
    a tokenizer is not in it, since it changes with the library's version."""
    vocabulary = [
        sorted(tokenizer.get_vocab().items()),
        {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
        tokenizer(_PROBE, add_special_tokens=True)["input_ids"],
    ]
    sample = _sample(train)
    tokens = tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"] if sample else []
    return {
        "tokens": _sha256(vocabulary),
        "template": _sha256(tokenizer.chat_template),
        "sample": _sha256(sample),
        "sample_tokens": _sha256(tokens),
    }


def _sample(train: Iterable[SourceConfig]) -> list[str]:
    """The first texts of the data that lie here; none where they cannot be read, as where a finished run is evaluated
    elsewhere. Nothing is downloaded."""
    local = (Source(settings) for settings in train if not is_hub_id(settings.path))
    found, size = [], 0
    with contextlib.suppress(ConfigError):
        for text in texts(local):
            found.append(text[:_SAMPLE])
            size += len(found[-1])
            if size >= _SAMPLE:
                break
    return found


def date_of(checkpoint: Path | None) -> dt.date | None:
    """The day that chat templates were given in the run that a checkpoint belongs to; None where it does not say."""
    from megatrain.checkpoint.checkpoint import Checkpoint

    if checkpoint is None:
        return None
    date = Checkpoint.open(checkpoint).state().state.get("run", {}).get("date")
    return None if date is None else dt.date.fromisoformat(date)


def changed_sources(
    key: str,  # data.train or data.eval
    before: Sequence[dict[str, Any]],  # fingerprints, as a checkpoint has them
    settings: Iterable[SourceConfig],  # of the same sources, now
    step: int,  # of that checkpoint
) -> list[str]:
    """The sources whose content is another one, a sentence each. Reads their files. Raises ConfigError when there is
    nothing to read."""
    changes = []
    for index, (old, setting) in enumerate(zip(before, settings, strict=True)):
        now = of_source(Source(setting))
        if now["sha256"] == old["sha256"]:
            continue
        what = setting.path
        if "python" in now:
            what += f" of Python {old.get('python')} → {now['python']}"
        changes.append(f"{key}[{index}]: its content changed since step {step}: {what}")
    return changes


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
