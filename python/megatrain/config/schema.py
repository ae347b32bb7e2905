"""The settings, section by section: what each means, its default, and the range it may take.

This is the only place for defaults. What one section alone can refuse is refused on construction; contradictions
between sections are in `validation.py`.
"""

import dataclasses
import datetime as dt
import math
import re
from typing import Annotated, Any, Literal

from megatrain.config.constraints import (
    MOST_SEED,
    check_eps,
    check_matmul,
    check_memory,
    check_plan,
    refuse_beyond_fp32,
)
from megatrain.errors import ConfigError
from megatrain.units import Duration

Size = Annotated[int, "size"]
"""Bytes; in YAML a number with a unit, such as 12GiB."""

DEFAULT_EPOCHS = 1.0
DEFAULT_BATCH_TOKENS = 65536
_MOST_EPOCHS = 1_000_000
_MOST_ROWS = 2**31 - 1
"""Of a step."""


def _at_least(section: str, owner: Any, **limits: float) -> None:
    for name, least in limits.items():
        value = getattr(owner, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{section}.{name} is {value}; it must be at least {least}")


def _finite(section: str, owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{section}.{name} is {value}; it must be a finite number")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerTraining:
    """A tokenizer trained on the training data, instead of one that exists."""

    train: Literal["bpe"]
    """The kind: byte-level byte-pair encoding."""
    vocab_size: int
    """Number of tokens, the 256 bytes and the special ones included."""

    def __post_init__(self) -> None:
        _at_least("model.tokenizer", self, vocab_size=260)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What is trained."""

    path: str | None = None
    """A local folder, a `.gguf` file, or a Hugging Face hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random`: only the architecture is taken from `path`. A model from `config` alone is always random."""
    config: dict[str, Any] | None = None
    """An architecture written out, with the keys of a Hugging Face `config.json`, `model_type` among them; in place of
    `path`. Beside `path`: keys that replace those of its configuration, such as `max_position_embeddings` and
    `rope_scaling`. None may change the shapes of pretrained weights."""
    tokenizer: str | TokenizerTraining | None = None
    """A folder or hub id, or `{train: bpe, vocab_size: N}`; null: the one beside the model."""
    chat_template: str | None = None
    """A Jinja file, the template itself, or the name of one of several that the tokenizer has (`rag`); null: the
    tokenizer's, of several `tool_use` for rows with tools and `default` for others."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model or tokenizer may run."""
    freeze: tuple[str, ...] = ()
    """Patterns (shell style) of parameter names that are not trained."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Implementation of attention, by its name in transformers."""

    def __post_init__(self) -> None:
        if self.config is not None and self.path is not None:
            if "model_type" in self.config:
                raise ConfigError(
                    "model.path and model.config are both given; a model comes from one of the two. To replace keys "
                    "of the configuration of model.path, leave model_type out of model.config"
                )
        elif self.config is not None:
            if self.init == "pretrained":
                object.__setattr__(self, "init", "random")
            if not isinstance(self.config.get("model_type"), str):
                raise ConfigError("model.config has no model_type; write the architecture's name, such as llama")
            for name in ("revision", "trust_remote_code"):
                if getattr(self, name):
                    raise ConfigError(f"model.{name} has no effect on a model from model.config; remove one of the two")
        elif self.path is None:
            raise ConfigError("model names nothing to train: set model.path (a folder or hub id) or model.config")


_FIELDS = tuple(
    "text messages prompt completion instruction input output history system tools chosen rejected label documents "
    "weight role content role.user role.assistant role.system role.tool role.function_call".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Where rows come from."""

    path: str
    """A file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt, .md; also .gz and .zst), a folder, a pattern such as
    `data/*.jsonl`, a folder that `datasets` saved, an entry of LLaMA-Factory's `dataset_info.json#NAME`, a data set of
    the hub (`OWNER/NAME` or `OWNER/NAME#CONFIGURATION`), `python:stdlib`, or `rows:NAME`, rows that a Python program
    gives to `Trainer`."""
    format: Literal["auto", "text", "chat", "completion", "alpaca", "preference"] = "auto"
    """What a row is; `auto` goes by its columns: `messages` or `conversations`, `prompt` with `completion`,
    `instruction` with `output`, `text`. Of `preference` rows (`chosen`, `rejected`) the chosen answer is learnt."""
    weight: float = 1.0
    """Of training data: how many times an epoch takes each row; 0.5 takes another half each epoch."""
    split: float | str | None = None
    """A fraction of the rows, by their content: for evaluation from one end, for training from the other; of a single
    text its end and its beginning, parted where a line ends. Or the name of a split, which is that of files
    (`train-00001.jsonl`) or of a folder."""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Our name of a column to the file's: `{text: body}`; also `role` and `content` inside messages, and roles that are
    spelled otherwise: `{role.user: prompter}`. A column that no row has is refused; one named "" is not read:
    `{system: ""}`. `{weight: COLUMN}` multiplies the losses of each row by its number in that column; without it every
    row counts 1."""
    name: str | None = None
    """Of held-out data: the set that its losses are reported under. `eval: {chat: a.jsonl, code: b.jsonl}` is short for
    two sources with names."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("the path of a data source is empty")
        if self.name is not None and not re.fullmatch(r"[\w.-]+", self.name):
            raise ConfigError(
                f"name of {self.path} is {self.name!r}; the name of a held-out set has letters, digits and _ . - only"
            )
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"weight of {self.path} is {self.weight}; it must be above 0")
        if isinstance(self.split, float) and not 0 < self.split < 1:
            raise ConfigError(f"split of {self.path} is {self.split}; it must be between 0 and 1")
        for name in self.fields:
            if name not in _FIELDS:
                raise ConfigError(f"fields of {self.path}: {name!r} is not one of {', '.join(_FIELDS)}")
        if self.fields.get("weight") == "":
            raise ConfigError(f"fields of {self.path}: weight names no column; name one, or leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What it is trained on."""

    train: tuple[SourceConfig, ...] = ()
    """Training data; several sources are mixed by weight."""
    eval: tuple[SourceConfig, ...] = ()
    """Held-out data. A fraction (`eval: 0.05`) holds that part of every training source out. A mapping of names to
    sources, lists of them or fractions makes several sets, each with losses of its own. A source with a fraction as
    `split` leaves the rest to the training source of the same path; a file that `train` has under another path is
    refused."""
    seq_len: int = 4096
    """Longest sequence, in tokens; with packing the length of every window. Default: 4096, or the positions of a model
    (written out, or in a local folder) that has fewer."""
    packing: bool = True
    """Whether several rows share a window. They never see each other."""
    long_rows: Literal["split", "truncate", "drop", "error"] = "split"
    """What happens to a row longer than `seq_len`. Only text is split; of a conversation the first turns that fit are
    kept whole, and of a prompt with its completion the beginning."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of a conversation are learnt: all assistant turns, the last, or everything. Text: everything."""
    unused: Literal["warn", "error"] = "warn"
    """Whether columns and keys that nothing uses, and reasoning or tool calls that the chat template does not render,
    are named in a warning or refused."""
    shuffle: bool = True
    """Whether each epoch has its own order."""
    workers: int | Literal["auto"] = "auto"
    """Threads that tokenize; `auto`: one per processor that this process may use."""
    cache: str | None = None
    """Folder of tokenized data; null: the user's cache folder."""
    date: str | None = None
    """The day, such as 2026-11-28, that chat templates with today's date are given; null: that of the run's start,
    which the run keeps when it is resumed."""

    def __post_init__(self) -> None:
        if named := next((source for source in self.train if source.name is not None), None):
            raise ConfigError(
                f"data.train names {named.path} {named.name!r}; only held-out sets (data.eval) have names, remove it"
            )
        if any(source.name for source in self.eval) and (
            unnamed := next((source for source in self.eval if source.name is None), None)
        ):
            raise ConfigError(f"data.eval has sets with names, and {unnamed.path} has none; give it a name too")
        _at_least("data", self, seq_len=2)
        if self.workers != "auto":
            _at_least("data", self, workers=1)
        if self.date is not None:
            try:
                dt.date.fromisoformat(self.date)
            except ValueError:
                raise ConfigError(f"data.date is {self.date!r}; write a day such as 2026-11-28") from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate changes."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after warm-up; `wsd` is constant, then falls over the last part."""
    warmup: float = 0.03
    """Below 1: part of all steps. From 1 on: that many steps. Step k of W has lr·k/W."""
    min_lr: float = 0.0
    """The rate that decay ends at."""
    decay: float = 0.2
    """`wsd` only: part of all steps (from 1 on: steps) over which the rate falls; together with the warm-up at
    most the whole run."""

    def __post_init__(self) -> None:
        _finite("train.schedule", self, "warmup", "min_lr", "decay")
        _at_least("train.schedule", self, warmup=0, min_lr=0, decay=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """Parameters with hyper-parameters of their own; what is null is that of `train`."""

    params: tuple[str, ...]
    """Patterns (shell style) of parameter names; the first group that matches a parameter has it, so a group for some
    parameters stands before one for all. A group that is left without any is refused."""
    lr: float | None = None
    """Learning rate, before the schedule."""
    betas: tuple[float, float] | None = None
    """Decay rates of the two moments."""
    eps: float | None = None
    """Term added to the root of the second moment."""
    weight_decay: float | None = None
    """Decoupled weight decay; where it is given, also of parameters that `train.no_decay` names."""

    def __post_init__(self) -> None:
        if not self.params:
            raise ConfigError("a group of train.groups has no pattern in params")
        _optimizer("train.groups", self)


def _optimizer(section: str, owner: Any) -> None:
    _finite(section, owner, "lr", "eps", "weight_decay")
    _at_least(section, owner, lr=0, eps=0, weight_decay=0)
    for name in ("lr", "eps", "weight_decay"):
        refuse_beyond_fp32(getattr(owner, name) or 0.0, f"{section}.{name}")
    for beta in owner.betas or ():
        if not 0 <= beta < 1:
            raise ConfigError(f"{section}.betas holds {beta}; each must be at least 0 and below 1")
    if owner.eps is not None and owner.betas is not None:
        check_eps(owner.eps, owner.betas, f"{section}.eps")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How it is trained."""

    steps: int | None = None
    """Optimizer steps; instead of `epochs`."""
    epochs: float | None = None
    """Passes over the training data. Default: 1, unless `steps` is given."""
    batch_tokens: int | None = None
    """Tokens of a step; with packing a multiple of `seq_len`. Default: about 65536, unless `batch_size` is given."""
    batch_size: int | None = None
    """Rows of an optimizer step (with packing: windows); instead of `batch_tokens`."""
    lr: float = 1.0e-5
    """Learning rate."""
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    """How the learning rate changes; `schedule: linear` is short for its name."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    eps: float = 1.0e-8
    """AdamW's term added to the root of the second moment."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    no_decay: tuple[str, ...] = ()
    """Patterns (shell style) of parameter names without weight decay, but for those of a group (`groups`) that has a
    `weight_decay` of its own."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with hyper-parameters of their own."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; null: not clipped."""
    label_smoothing: float = 0.0
    """Part of the target that is spread over the vocabulary."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function in the loss."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of weights and activations in compute. `auto`: bf16 on CUDA with native bf16, fp32 on the CPU."""
    matmul: Literal["bf16", "fp8"] = "bf16"
    """In what the linear layers within decoder layers multiply where compute is bf16. `fp8`: e4m3 numbers with a scale
    for each token and each output channel, in forward and for the gradient of activations; gradients of weights, the
    embedding, the head, norms, routers and experts stay in bf16. Needs a card of compute capability 8.9."""
    grad_precision: Literal["bf16", "fp32"] | None = None
    """In which gradients leave for the host. Default: bf16, or fp32 where compute is fp32; a run's `config.yaml` says
    which."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How AdamW's moments are stored between updates: `bf16` takes half the memory, `8bit` a quarter, both rounded
    stochastically. Updates are computed in fp32."""
    master: Literal["32bit", "24bit"] = "32bit"
    """How many bits of the fp32 master weights are kept where compute is bf16; `24bit` saves a byte a parameter and is
    rounded stochastically."""
    update: Literal["just_in_time", "immediate"] = "just_in_time"
    """When weights change: once the gradient norm is known, or as gradients land (only without clipping)."""
    deterministic: bool = False
    """Bit-equal runs on CUDA, at some cost in speed."""
    seed: int = 0
    """Of data order and initial weights."""
    max_nonfinite: int = 5
    """Steps with non-finite gradients in a row after which the run stops itself."""
    check_every: int | None = None
    """Every so many steps forward and backward run twice, the second time one operation at a time, and the gradients
    are compared bit for bit before the update; a difference stops the run. Such a step takes about twice as long. On
    CUDA with `deterministic` only; null: never."""

    def __post_init__(self) -> None:
        for one, other in (("steps", "epochs"), ("batch_tokens", "batch_size")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigError(
                    f"train.{one} ({getattr(self, one)}) and train.{other} ({getattr(self, other)}) are both given; "
                    "keep one of the two"
                )
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"train.epochs is {self.epochs}; it must be above 0")
        if self.epochs is not None and self.epochs > _MOST_EPOCHS:
            raise ConfigError(f"train.epochs is {self.epochs:g}; it must be at most {_MOST_EPOCHS:,}")
        _at_least("train", self, steps=1, batch_tokens=1, batch_size=1, seed=0, max_nonfinite=0, check_every=1)
        if (self.batch_size or 0) > _MOST_ROWS:
            raise ConfigError(f"train.batch_size is {self.batch_size}; it must be at most {_MOST_ROWS}")
        if self.seed > MOST_SEED:
            raise ConfigError(f"train.seed is {self.seed}; it must be below 2**64")
        _optimizer("train", self)
        _finite("train", self, "max_grad_norm", "label_smoothing", "z_loss")
        _at_least("train", self, label_smoothing=0, z_loss=0)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"train.max_grad_norm is {self.max_grad_norm}; it must be above 0. For no clipping write null"
            )
        if self.label_smoothing >= 1:
            raise ConfigError(f"train.label_smoothing is {self.label_smoothing}; it must be below 1")
        if self.schedule.min_lr > self.lr:
            raise ConfigError(f"train.schedule.min_lr ({self.schedule.min_lr}) is above train.lr ({self.lr}); lower it")
        if self.grad_precision is None and self.precision != "auto":  # else it follows the device, like the precision
            object.__setattr__(self, "grad_precision", self.precision)
        elif self.precision == "fp32" and self.grad_precision == "bf16":
            raise ConfigError(
                "train.precision: fp32 sends fp32 gradients, which train.grad_precision: bf16 contradicts; remove it"
            )
        check_matmul(self.matmul, self.precision, "train.")
        if self.precision == "fp32" and self.master == "24bit":
            raise ConfigError(
                "train.precision: fp32 keeps fp32 weights, which train.master: 24bit contradicts; remove one of the two"
            )

    def sent_in(self, precision: str) -> Literal["bf16", "fp32"]:
        """In which gradients leave for the host where compute is in `precision`, bf16 or fp32."""
        return "fp32" if precision == "fp32" else self.grad_precision or "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplesConfig:
    """Text generated now and then, to look at."""

    every: int | None = None
    """Steps between two rounds; null: none."""
    prompts: tuple[str, ...] = ()
    """What is continued."""
    max_new_tokens: int = 64
    """Longest continuation, in tokens."""

    def __post_init__(self) -> None:
        _at_least("eval.samples", self, every=1, max_new_tokens=1)
        if (self.every is None) != (not self.prompts):
            given, missing = ("prompts", "every") if self.prompts else ("every", "prompts")
            raise ConfigError(f"eval.samples.{given} has no effect without eval.samples.{missing}; set both or neither")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """When held-out loss is measured, and what follows from it."""

    every: int | None = None
    """Steps between two evaluations; null: only before the first step and after the last."""
    at_start: bool = True
    """Whether to evaluate before the first step."""
    max_batches: int | None = None
    """Evaluation stops after so many batches, each the size of a training step; null: all of the data. Where there are
    more, what is measured is drawn at random from all rows of a set, once: every evaluation measures the same."""
    keep_best: bool = False
    """Whether the checkpoint of the lowest held-out loss is kept beside the newest ones."""
    best: str | None = None
    """Of several held-out sets the one whose loss decides which step is the best and when to stop early; null: the loss
    over all of them."""
    early_stop: int | None = None
    """Evaluations without a lower loss after which the run ends; null: never."""
    samples: SamplesConfig = dataclasses.field(default_factory=SamplesConfig)
    """Text generated now and then."""

    def __post_init__(self) -> None:
        _at_least("eval", self, every=1, max_batches=1, early_stop=1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NvmeConfig:
    """A place on fast disks for optimizer state, and then weights, that host memory cannot hold."""

    path: str | tuple[str, ...]
    """A folder, or several, best on different drives: state is spread over them evenly. They must be there."""
    size: Size | None = None
    """Bytes that may be used. null: what is free, less a margin."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("memory.nvme.path is an empty list; name a folder, or leave memory.nvme out")
        if len(set(self.paths)) < len(self.paths):
            twice = next(path for path in self.paths if self.paths.count(path) > 1)
            raise ConfigError(f"memory.nvme.path names {twice} twice; name each folder once")
        _at_least("memory.nvme", self, size=1)

    @property
    def paths(self) -> tuple[str, ...]:
        """All folders."""
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """How much of each memory may be used."""

    gpu: Size | Literal["auto"] = "auto"
    """Device memory, what torch caches included; `auto`: what is free."""
    host: Size | Literal["auto"] = "auto"
    """Host memory; `auto`: what the machine or its control group leaves."""
    nvme: NvmeConfig | None = None
    """Disk, for optimizer state, weights and layer inputs that host memory has no room for; used only then. null:
    none."""

    def __post_init__(self) -> None:
        for name in ("gpu", "host"):
            if getattr(self, name) != "auto":
                _at_least("memory", self, **{name: 1})
                check_memory(getattr(self, name), f"memory.{name}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Numbers that the planner derives; each can be given instead. null: derived. They count units, of which a decoder
    layer is one, or two where layers are sent in halves (`fragments`)."""

    micro_batch: int | None = None
    """Rows (with packing: windows) computed at a time."""
    slots: int | None = None
    """Device buffers that decoder layers' weights pass through, one unit in each. With one alone a unit is loaded only
    while none is computed."""
    slabs: int | None = None
    """Host buffers that gradients land in."""
    group: int | None = None
    """Micro-batches that pass through a layer before the next one is loaded. null: all of a step, so that weights cross
    the link once, or fewer where that is faster."""
    large_group: int | None = None
    """As many of the group that hides the host's updates, at least `group`: the first one, whose forward pass hides
    those of the step before, or with `train.update: immediate` the last one, whose backward pass hides its own step's.
    null: the same as `group` where that is given, else as many as make a step shortest."""
    large_keep: int | None = None
    """Units of decoder layers whose activations are kept in that group where it is larger than the others, `keep` at
    most. null: as many as fit."""
    keep: int | None = None
    """Units of decoder layers (whole layers, or halves) whose activations are kept on the device; the others are
    recomputed."""
    activation: Literal["keep", "offload", "recompute"] | None = None
    """What becomes of activations: kept by all layers; or, of those that `keep` does not count, sent to the host
    (`offload`) or recomputed."""
    offload: int | None = None
    """Units of decoder layers whose activations are sent to the host, while the others that `keep` does not count are
    recomputed: spread evenly among those, so that the link has the time in which the others are computed. null: none,
    or all with `activation: offload`."""
    inputs: Literal["device", "host"] | None = None
    """Where the inputs of layers that are not kept wait for backward. null: on the device while they fit."""
    inputs_on_disk: int | None = None
    """Units of decoder layers whose inputs wait on disk (`memory.nvme`) instead of on the host, with their activations
    where those are offloaded: spread evenly among those that are not kept. null: as few as let the others fit in host
    memory, where optimizer state on disk does not leave enough or costs more."""
    stage_buffers: int | None = None
    """Device buffers that activations and inputs pass through on their way to the host and back."""
    state_on_device: int | None = None
    """Units whose weights and optimizer state live on the device: embedding and head first, then those of layers in
    forward order."""
    updates_on_device: int | None = None
    """Units of decoder layers (whole layers, or halves) whose optimizer state lives on the host and that are updated on
    the device, which their state visits: the others are updated by the host meanwhile. null: as many as make a step
    shortest."""
    state_on_disk: int | None = None
    """Units whose optimizer state lives on disk (`memory.nvme`): those of layers from the last one backwards, then head
    and embedding. null: as few as let the others fit in host memory."""
    fragments: Literal["auto", "whole", "halves", "experts"] = "auto"
    """Whether a decoder layer is sent to the device whole, or as two halves of which a buffer holds one: attention, and
    the MLP or experts; or with its routed experts in groups, of which a buffer holds one. The numbers are the same,
    apart from what compilation rounds. auto: halves where whole layers do not fit, or leave little room on a card, and
    groups of experts where halves do not fit either."""
    expert_groups: int | Literal["auto"] = "auto"
    """Groups in which the routed experts of a layer are sent where `fragments` is experts: a divisor of their number.
    auto: as few as fit."""
    sent_experts: Literal["auto", "all", "routed"] = "auto"
    """Which experts of such a group are sent: all, while what is before them is computed; or those that the tokens of a
    group of micro-batches are routed to, once that is known. The numbers are the same. auto: routed where a micro-batch
    has so few tokens that it needs at most half of them."""
    mlp_tiles: int | Literal["auto"] = "auto"
    """Tiles of tokens in which the MLP halves of layers are computed, so that the activations of one tile exist at a
    time; backward computes each again. More than 1 changes rounding, so a run that goes on keeps what it began with.
    auto: 1, and as many as make a single row fit where it does not otherwise, or leave more room on a card."""
    kept_tensors: Literal["auto", "least", "usual"] = "auto"
    """What a compiled layer keeps for backward: `usual` is what torch chooses; `least` has pointwise operations made
    again even where a matmul reads them, which takes two thirds of the memory and a little longer. May change rounding,
    so a run that goes on keeps what it began with. Layers that are not compiled keep what their operations save.
    auto: least, unless all state and all activations fit on the card with `usual`, and no key here says where any of
    them are."""
    weights_on_disk: int | None = None
    """Of these units, how many have their weights there too, the first ones; they are read each time that they are sent
    to the device. null: none, unless host memory is too small with all optimizer state on disk."""
    parts: int | None = None
    """Parts in which embedding and head are offloaded, updated and sent, in which a layer's state is copied to the
    device to be updated there, and in which state on disk is read and written."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time."""
    compile: bool | None = None
    """Whether layers are compiled: on CUDA only, and there by default. Changes rounding, so a run that goes on keeps
    what it began with."""
    graphs: bool = True
    """Whether layers whose weights stay on the card are captured as CUDA graphs, which launch all kernels of a layer at
    once. That takes the memory of their activations a second time, so only where it is left."""
    threads: int | None = None
    """Threads of the host's optimizer. null: as many as leave room for those that compute."""
    synchronous: bool = False
    """For debugging: one operation at a time."""
    poison: bool = False
    """For debugging: buffers are filled with NaN before they are used again."""
    huge_pages: bool = True
    """Whether host memory is asked for in huge pages."""

    def __post_init__(self) -> None:
        check_plan({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """Where a run leaves what, and how often."""

    dir: str | None = None
    """The run's folder. Needed to train."""
    resume: str = "auto"
    """`auto`: go on from the folder's last checkpoint if there is one; `required`: only so; `never`: only into an
    empty folder; or the path of another run or checkpoint."""
    save_every: int | Duration | None = None
    """Steps or wall time (`30min`) between two checkpoints; null: only at the end."""
    keep: int = 2
    """Newest checkpoints that stay."""
    export: Literal["auto", "bf16", "fp32", "never"] = "auto"
    """The Hugging Face folder written at the end: its number type (`auto`: that of compute), or never."""
    log_every: int = 1
    """Steps between two lines, in `log.txt` and where output is not a terminal. A terminal shows a bar instead, with
    some of these lines above it."""
    report_stall: Duration | None = dataclasses.field(default_factory=lambda: Duration(1800.0))
    """Wall time without any progress after which `log.txt` and `status.json` say what every thread does and waits for;
    the run is left as it is. Default: 30min; null: never."""
    tensorboard: bool = False
    """Whether metrics are written for TensorBoard too, into `tensorboard` in the run's folder. Needs the package:
    `pip install 'megatrain[tensorboard]'`."""
    wandb: bool = False
    """Whether metrics are logged to Weights & Biases too, where WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE say. Needs
    the package: `pip install 'megatrain[wandb]'`."""

    def __post_init__(self) -> None:
        _at_least("output", self, keep=1, log_every=1)
        if isinstance(self.save_every, int):
            _at_least("output", self, save_every=1)
