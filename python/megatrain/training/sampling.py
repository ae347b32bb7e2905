"""Generates text: from a run, a checkpoint or an export through transformers, or from an engine while it trains.

for piece in generate("runs/quickstart", "def main", max_new_tokens=64): print(piece, end="")
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.checkpoint import checkpoint
from megatrain.checkpoint.step_folders import list_checkpoints, steps_in
from megatrain.config.constraints import check_draws
from megatrain.config.paths import check_model_source
from megatrain.data.train_tokenizer import without_remark_on_type
from megatrain.errors import CheckpointError, ConfigError, MegatrainError, first_line
from megatrain.system import hardware
from megatrain.system.hardware import format_bytes
from megatrain.system.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log: logging.Logger = logging.getLogger(__name__)

_BESIDE_WEIGHTS = 1.1
"""What generating takes, as a multiple of the weights: keys and values of a few thousand tokens, and workspace."""


def generate(
    source: str | Path,  # a run, a checkpoint, an export, or any Hugging Face folder
    prompt: str,
    *,
    step: str | None = None,  # of a run: a number or `last`; None: the export, or the last checkpoint if that is newer
    max_new_tokens: int = 64,
    temperature: float = 0.8,  # 0 takes the likeliest token
    top_p: float = 0.95,
    seed: int = 0,
    raw: bool = False,  # continue the text even when the tokenizer has a chat template
    device: str = "auto",  # cpu, cuda, or auto: the card where the model fits there
) -> Iterator[str]:
    """Yields the continuation piece by piece, without the prompt. Loads the whole model, so that has to fit in memory.
    Raises ConfigError or CheckpointError."""
    check_draws(max_new_tokens, temperature, top_p)
    folder = find_model(Path(source), step)
    device = _device_for(folder, device)
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
    Without `step` that is the run's export, or its last checkpoint if that is newer or alone. A checkpoint's weights
    are compared with their checksums. Raises ConfigError or CheckpointError."""
    check_model_source(source)
    if (source / "config.json").is_file():
        if step is not None:
            raise ConfigError(f"{source} is one model, not a run, so it has no step {step}; leave --step out")
        return source
    exported = source / "export"
    if step is None and (exported / "config.json").is_file():
        later = _later_checkpoint(source, exported)
        if later is None:
            return exported
        log.warning("%s is older than %s, whose weights are taken", exported, later)
    if step is None and not steps_in(source):
        raise CheckpointError(
            f"{source} holds neither an export nor a complete checkpoint; train first, or name a Hugging Face folder"
        )
    chosen = checkpoint.choose(source, step or "last")
    checkpoint.Checkpoint.open(chosen).check("model")
    return chosen


def _later_checkpoint(run: Path, exported: Path) -> Path | None:
    """The last checkpoint of a run that went on after its export."""
    made = (exported / "config.json").stat().st_mtime
    newest = list_checkpoints(run)[-1:]
    return next((folder for folder in newest if (folder / "manifest.json").stat().st_mtime > made), None)


def _device_for(folder: Path, device: str) -> str:
    """The device to load a model on. Raises ConfigError where its weights do not fit there, or not on the host, which
    they pass through."""
    weights = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    needed, available = int(weights * _BESIDE_WEIGHTS), hardware.read(gpus=False).memory_available
    remedy = "; a run prints samples of a model of any size while it trains (eval.samples)"
    if needed > available:
        raise ConfigError(
            f"{folder} holds {format_bytes(weights)} of weights, of which all are loaded, and "
            f"{format_bytes(available)} of host memory are available{remedy}"
        )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, and torch finds no card it can use; leave it out, or give cpu")
    free = torch.cuda.mem_get_info()[0]
    if needed <= free:
        return "cuda"
    card = f"{folder} holds {format_bytes(weights)} of weights, and {format_bytes(free)} of the card's memory are free"
    if device != "auto":
        raise ConfigError(f"{card}; give cpu{remedy}")
    log.warning("%s: it generates on the CPU", card)
    return "cpu"


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
    ends: Collection[int] = (),  # tokens that end it, beside the tokenizer's end token
    stopped: Callable[[], bool] = lambda: False,  # asked before each token, which takes a pass through the model
) -> str:
    """The likeliest continuation by the engine's present weights, cut off when `stopped` says so. Nothing is cached
    between tokens, so that a streamed model needs no further memory: meant for a few short samples."""
    ids = encode(tokenizer, prompt, raw)
    start = ids.shape[1]
    stops = {tokenizer.eos_token_id, *ends} - {None}
    for _ in range(max_new_tokens):
        if stopped() or (max_length is not None and ids.shape[1] >= max_length):
            break
        token = int(engine.logits(ids).reshape(-1).argmax())
        if token in stops:
            break
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    text = tokenizer.decode(ids[0, start:], skip_special_tokens=True)
    return text if isinstance(text, str) else text[0]


def check_prompts(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], max_new: int, seq_len: int) -> None:
    """Refuses prompts of `eval.samples` that the chat template cannot render or after which there is no room for a
    token, and says so where there is room for fewer than `max_new`. Raises ConfigError."""
    for index, prompt in enumerate(prompts):
        name = f"eval.samples.prompts[{index}]"
        try:
            length = encode(tokenizer, prompt).shape[1]
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        except Exception as error:  # whatever a template raises
            raise ConfigError(f"{name}: the chat template cannot render it: {first_line(error)}") from None
        if length >= seq_len:
            raise ConfigError(
                f"{name} has {length} tokens, and data.seq_len is {seq_len}, so that none could follow; shorten it"
            )
        if length + max_new > seq_len:
            log.warning(
                "%s has %d tokens: at most %d of eval.samples.max_new_tokens = %d follow, up to data.seq_len = %d",
                name,
                length,
                seq_len - length,
                max_new,
                seq_len,
            )


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
        if is_out_of_memory(error):
            raise
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

    def check(_: Tensor, scores: Tensor) -> Tensor:
        if (scores.isnan() | scores.isposinf()).any():
            raise ConfigError(
                "the model's logits are not finite, as after training that has diverged; name an earlier checkpoint"
            )
        return scores

    def run() -> None:
        try:
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=streamer,
                    stopping_criteria=[stop],
                    logits_processor=[check],
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
