"""Generates text: from a run, a checkpoint or an export through transformers, or from an engine while it trains.

for piece in generate("runs/quickstart", "def main", max_new_tokens=64): print(piece, end="")
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.checkpoint import checkpoint
from megatrain.checkpoint.step_folders import steps_in
from megatrain.data.train_tokenizer import without_remark_on_type
from megatrain.errors import CheckpointError, ConfigError, MegatrainError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate(
    source: str | Path,  # a run, a checkpoint, an export, or any Hugging Face folder
    prompt: str,
    *,
    step: str | None = None,  # of a run: a number or `last`; None: the export, else the last checkpoint
    max_new_tokens: int = 64,
    temperature: float = 0.8,  # 0 takes the likeliest token
    top_p: float = 0.95,
    seed: int = 0,
    raw: bool = False,  # continue the text even when the tokenizer has a chat template
    device: str = "auto",
) -> Iterator[str]:
    """Yields the continuation piece by piece, without the prompt. Raises ConfigError or CheckpointError."""
    if max_new_tokens < 1 or not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        raise ConfigError(
            f"max_new_tokens must be at least 1, temperature not negative and top_p in (0, 1], not {max_new_tokens}, "
            f"{temperature} and {top_p}"
        )
    folder = find_model(Path(source), step)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model, tokenizer = _load(folder, device)
    ids = encode(tokenizer, prompt, raw).to(device)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + max_new_tokens > limit:
        raise ConfigError(
            f"the prompt has {ids.shape[1]} tokens and {max_new_tokens} more are asked for, but the model has "
            f"positions for {limit}; ask for fewer (--max-new-tokens) or shorten the prompt"
        )
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": top_p}
    return _stream(model, tokenizer, ids, options)


def find_model(source: Path, step: str | None = None) -> Path:
    """The Hugging Face folder to load: `source` itself, or, of a run, its checkpoint `step` (a number or `last`).
    Without `step` that is the run's export, or its last checkpoint if there is none. A checkpoint's weights are
    compared with their checksums. Raises ConfigError or CheckpointError."""
    if not source.is_dir():
        raise ConfigError(f"there is no folder {str(source)!r}; name a run, a checkpoint or a Hugging Face folder")
    if (source / "config.json").is_file():
        if step is not None:
            raise ConfigError(f"{source} is one model, not a run, so it has no step {step}; leave --step out")
        return source
    exported = source / "export"
    if step is None and (exported / "config.json").is_file():
        return exported
    if step is None and not steps_in(source):
        raise CheckpointError(
            f"{source} holds neither an export nor a complete checkpoint; train first, or name a Hugging Face folder"
        )
    chosen = checkpoint.choose(source, step or "last")
    checkpoint.Checkpoint.open(chosen).check("model")
    return chosen


def encode(tokenizer: "PreTrainedTokenizerBase", prompt: str, raw: bool = False) -> Tensor:
    """(1, length) int64 token ids: the prompt as a user's turn of the chat template, or as plain text without one."""
    if tokenizer.chat_template and not raw:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        # the template has written the special tokens that the model expects
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        ids = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise ConfigError("the prompt is empty and the tokenizer has no token to begin with; give a prompt")
    return torch.tensor([ids])


class Sampled(Protocol):
    """What `sample` needs of an engine."""

    def logits(self, input_ids: Tensor) -> Tensor:
        """(V,) or (1, V) logits of the token after `input_ids` (1, length). No update."""


def sample(
    engine: Sampled,
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    max_new_tokens: int,
    *,
    raw: bool = False,
    max_length: int | None = None,  # most tokens, prompt included
    stopped: Callable[[], bool] = lambda: False,  # asked before each token, which takes a pass through the model
) -> str:
    """The likeliest continuation by the engine's present weights, cut off when `stopped` says so. Nothing is cached
    between tokens, so that a streamed model needs no further memory: meant for a few short samples."""
    ids = encode(tokenizer, prompt, raw)
    start = ids.shape[1]
    ends = {tokenizer.eos_token_id} - {None}
    for _ in range(max_new_tokens):
        if stopped() or (max_length is not None and ids.shape[1] >= max_length):
            break
        token = int(engine.logits(ids).reshape(-1).argmax())
        if token in ends:
            break
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    text = tokenizer.decode(ids[0, start:], skip_special_tokens=True)
    return text if isinstance(text, str) else text[0]


def _load(folder: Path, device: str) -> tuple[Any, "PreTrainedTokenizerBase"]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with without_remark_on_type():
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{folder} has no tokenizer that transformers can read: {first_line(error)}") from None
    try:
        with _without_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto")
    except MegatrainError:
        raise
    except Exception as error:  # whatever transformers or safetensors say about a folder that is not ours
        raise ConfigError(f"{folder} holds no model that transformers can read: {first_line(error)}") from None
    return model.to(device).eval(), tokenizer


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hides the progress bars of transformers inside the block, so that only the text is seen."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]


def _stream(model: Any, tokenizer: "PreTrainedTokenizerBase", ids: Tensor, options: dict[str, Any]) -> Iterator[str]:
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    failed: list[BaseException] = []
    stopped = threading.Event()

    def stop(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), stopped.is_set(), device=input_ids.device)

    def run() -> None:
        try:
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=streamer,
                    stopping_criteria=[stop],
                    pad_token_id=tokenizer.pad_token_id
                    if tokenizer.pad_token_id is not None
                    else tokenizer.eos_token_id,
                    **options,
                )
        except BaseException as error:  # raised again where the pieces are read
            failed.append(error)
            streamer.end()  # type: ignore[no-untyped-call]

    worker = threading.Thread(target=run, name="megatrain-generate", daemon=True)
    worker.start()
    try:
        yield from (piece for piece in streamer if piece)
    finally:
        stopped.set()
        worker.join()
    if failed:
        raise failed[0]
