"""The tokenizer of a run: the model's own, another one, or one trained on the training data.

A trained one is byte-level BPE in a normal Hugging Face folder, so that exports load with `AutoTokenizer`. Training is
deterministic and its result is cached by the content of the data. A run trains it once: from then on it is the one in
the run's checkpoints.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, TokenizerTraining
from megatrain.config.loading import is_template_name
from megatrain.config.paths import chat_template, check_tokenizer
from megatrain.data import cache
from megatrain.data.readers import Source, texts
from megatrain.errors import CheckpointError, ConfigError, StorageError
from megatrain.system.atomic import published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_log = logging.getLogger(__name__)

END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"

# Words with a leading blank, runs of at most three digits, punctuation, indentation: merges stay within such a piece.
_WORDS = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def build_tokenizer(config: Config, checkpoint: Path | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer that `config` asks for, with `model.chat_template` put in.

    Of a run that goes on from `checkpoint`, one that the run trained is the checkpoint's, whatever the data are by now;
    any other has to be as it was. Raises ConfigError, and DamagedCheckpoint.
    """
    model = config.model
    tokenizer: PreTrainedTokenizerBase
    if isinstance(model.tokenizer, TokenizerTraining) and checkpoint is not None:
        tokenizer = _saved(checkpoint)
    elif isinstance(model.tokenizer, TokenizerTraining):
        config.require("data")
        tokenizer = _trained(config, model.tokenizer)
    else:
        path, key = (model.path, "model.path") if model.tokenizer is None else (model.tokenizer, "model.tokenizer")
        if path is None:
            raise ConfigError(
                "model.tokenizer is not set, and a model from model.config has none; name a folder or hub id"
            )
        revision = model.revision if key == "model.path" else None
        tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=model.trust_remote_code, key=key)
    if model.chat_template is not None:
        tokenizer.chat_template = _template(tokenizer, model.chat_template)
    if checkpoint is not None:
        _check_same(config, tokenizer, checkpoint)
    return tokenizer


def _template(tokenizer: "PreTrainedTokenizerBase", setting: str) -> str:
    """The template that `model.chat_template` is or names."""
    if not is_template_name(setting):
        return chat_template(setting)
    own: Any = tokenizer.chat_template or {}
    named: dict[str, str] = {"default": own} if isinstance(own, str) else own
    if setting not in named:
        have = f"the tokenizer has {', '.join(sorted(named))}" if named else "the tokenizer has none"
        raise ConfigError(f"model.chat_template: there is no file and no template of the name {setting!r}; {have}")
    return named[setting]


def load_tokenizer(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    key: str = "model.tokenizer",
) -> "PreTrainedTokenizerBase":
    """Loads a folder, a `.gguf` file or a hub id. What lies on this machine is read without any network call.

    Raises ConfigError, naming the setting `key`.
    """
    from transformers import AutoTokenizer

    place = Path(path)
    name, extra = str(path), {}
    if place.suffix == ".gguf" and place.is_file():
        name, extra = str(place.parent), {"gguf_file": place.name}
    else:
        check_tokenizer(place, key)
    try:
        with without_remark_on_type():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                name,
                revision=revision or "main",
                trust_remote_code=trust_remote_code,
                local_files_only=place.exists(),
                **extra,
            )
    except Exception as error:  # whatever transformers raises for files that are not what it expects
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ConfigError(
                f"{key}: the tokenizer of {path} comes with Python code of its own; read that code, then set "
                "model.trust_remote_code: true"
            ) from None
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key}: no tokenizer can be loaded from {path}: {reason[:300]}") from None
    return tokenizer


@contextlib.contextmanager
def without_remark_on_type() -> Iterator[None]:
    """Loading the tokenizer beside a model whose type it does not know, transformers reads the model's configuration as
    one of no type, and warns that the types differ ("You are using a model of type …"). No model is made there, and
    the type is refused by name where one is: this remark, and no other, is left out."""
    remarks = logging.getLogger("transformers.configuration_utils")

    def is_another(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("You are using a model of type ")

    remarks.addFilter(is_another)
    try:
        yield
    finally:
        remarks.removeFilter(is_another)


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Byte-level BPE over `texts`: any text can be written in it and read back unchanged.

    `vocab_size` counts the 256 bytes and two special tokens, `<|endoftext|>` (end of a text) and `<|pad|>`; little text
    may not have that many pairs worth merging, and then there are fewer tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrap: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=PAD_TOKEN, clean_up_tokenization_spaces=False
    )


def with_vocabulary(model_config: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """`model.config` with what follows from the tokenizer: vocabulary size and the ids of special tokens.

    Raises ConfigError when `vocab_size` is given and too small for the tokenizer.
    """
    size = len(tokenizer)
    given = model_config.get("vocab_size", size)
    if not isinstance(given, int) or given < size:
        raise ConfigError(
            f"model.config.vocab_size is {given!r}, and the tokenizer has {size} tokens; write at least that many or "
            "leave it out"
        )
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("bos", "eos", "pad")
        if f"{name}_token_id" not in model_config
    }
    return {**model_config, **ids, "vocab_size": given}


def _saved(checkpoint: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer in a checkpoint, whose small files are compared with their sums."""
    from megatrain.checkpoint.checkpoint import Checkpoint

    Checkpoint.open(checkpoint).check()
    try:
        with without_remark_on_type():
            return _from_folder(checkpoint)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint} has no tokenizer that can be loaded: {reason}") from None


def _from_folder(folder: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer that was saved there, which saves the same files again."""
    from transformers import PreTrainedTokenizerFast

    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    for how in ("is_local", "local_files_only"):  # of this call, which transformers would write beside the rest
        found.init_kwargs.pop(how, None)
    return found


def _check_same(config: Config, tokenizer: "PreTrainedTokenizerBase", checkpoint: Path) -> None:
    from megatrain.checkpoint.checkpoint import Checkpoint
    from megatrain.data import fingerprint

    saved = Checkpoint.open(checkpoint)
    before = saved.state().state.get("run", {}).get("tokenizer")
    if before is None:
        return  # of an earlier version, or of the Python API
    now = fingerprint.of_tokenizer(tokenizer, config.data.train)
    named = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    template = "model.chat_template" if config.model.chat_template is not None else f"the chat template of {named}"
    own = f"the tokenizer of {named}"
    keys = {"tokens": own, "template": template}
    if now["sample"] == before.get("sample"):  # else the data are others, which is not the tokenizer's doing
        keys["sample_tokens"] = own
    other = dict.fromkeys(what for part, what in keys.items() if now[part] != before[part])
    changed = [f"{what}: its content changed since step {saved.step}" for what in other]
    if changed:
        raise ConfigError(
            f"{checkpoint} was trained with another tokenizer: {'; '.join(changed)}. Put it back; the checkpoint's own "
            "lies in its folder"
        )


def _trained(config: Config, training: TokenizerTraining) -> "PreTrainedTokenizerFast":
    import tokenizers

    sources = [Source(settings) for settings in config.data.train]
    parts = [[source.digest(8), *source.selection()] for source in sources]
    name = cache.key("bpe", training.vocab_size, _WORDS, tokenizers.__version__, parts)
    folder = (Path(config.data.cache) if config.data.cache else cache.default_folder()) / "tokenizers"
    if (folder / name / "tokenizer.json").is_file():
        return _from_folder(folder / name)
    _log.info("training a tokenizer of %d tokens", training.vocab_size)
    tokenizer = train_bpe(texts(sources), training.vocab_size)
    if len(tokenizer) < training.vocab_size:
        _log.warning(
            "model.tokenizer.vocab_size is %d, but the data has pairs for %d tokens only, so that is the size used",
            training.vocab_size,
            len(tokenizer),
        )
    _save(tokenizer, folder, name)
    return tokenizer


def _save(tokenizer: "PreTrainedTokenizerFast", folder: Path, name: str) -> None:
    """Renamed into place when complete. Without a writable cache the tokenizer is trained again next time."""
    try:
        with published(folder / name) as partial:
            tokenizer.save_pretrained(partial)
    except (OSError, StorageError) as error:
        _log.warning("the trained tokenizer cannot be cached in %s: %s", folder, error)
