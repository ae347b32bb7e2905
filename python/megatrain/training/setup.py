"""From a configuration to the parts of a run: tokenizer, model without storage, plan, data, engine. In that order, so
that everything that can be refused is refused before the first weight is read.

Training, evaluation and the dry run all start here.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from megatrain.checkpoint.checkpoint import Checkpoint
from megatrain.checkpoint.step_folders import steps_in
from megatrain.config import Config, TokenizerTraining
from megatrain.config.default_length import max_positions
from megatrain.data import Dataset, Loader, prepare
from megatrain.data.train_tokenizer import build_tokenizer, with_vocabulary
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.hf_config import check, load_config, text_config
from megatrain.planning import planner
from megatrain.planning.planner import RunPlan
from megatrain.system import hardware as facts
from megatrain.system.hardware import Machine
from megatrain.training import metrics
from megatrain.weights.hf_layout import library
from megatrain.weights.initialize import initialize
from megatrain.weights.loader import load
from megatrain.weights.matching import exported
from megatrain.weights.source import ModelFiles, open_weights, resolve
from megatrain.weights.types import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("megatrain")


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelSetup:
    """A model as it was asked for, without a byte of it: what a plan needs."""

    config: Config
    machine: Machine
    device: Literal["cuda", "cpu"]
    decoder: Decoder
    tokenizer: "PreTrainedTokenizerBase | None"
    files: ModelFiles | None
    source: Weights | None
    """The pretrained weights, opened and checked; None for a model that starts at random."""

    @property
    def count(self) -> metrics.ModelCount:
        """What a token costs."""
        decoder = self.decoder
        tensors = [(t.name, t.unit, t.shape) for t in decoder.tensors.values() if not t.is_buffer]
        return metrics.count_model(decoder.config, tensors, decoder.num_layers)


@dataclasses.dataclass(kw_only=True, slots=True)
class RunComponents:
    """What a run consists of."""

    model_setup: ModelSetup
    run_plan: RunPlan
    train: Dataset
    loader: Loader
    held_out: Dataset | None
    eval_loader: Loader | None
    engine: Engine | None = None
    """None in a dry run."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.loader.num_steps

    def close(self) -> None:
        """Gives back memory and threads."""
        self.loader.close()
        if self.eval_loader is not None:
            self.eval_loader.close()
        if self.engine is not None:
            self.engine.close()


def prepare_model(
    config: Config,
    machine: Machine,
    *,
    resume: Path | None = None,  # the checkpoint that takes the place of pretrained weights, and has the tokenizer
    plan_only: bool = False,  # neither tokenizer nor weights are needed, and nothing is fetched but a configuration
) -> ModelSetup:
    """The model without storage. Cheap refusals come first: device, precision, files, sequence length."""
    device = planner.choose_device(config, machine)
    precision = planner.choose_precision(config, device, machine)
    files = _files(config, plan_only)
    pretrained = files is not None and config.model.init == "pretrained"
    source = None
    # Opening a GGUF file widens all of it, which a plan has no use for.
    if files is not None and pretrained and (files.gguf is None if plan_only else resume is None):
        with contextlib.suppress(ConfigError) if plan_only else contextlib.nullcontext():
            source = open_weights(files)
    # Both read the same files, so that a hub id is looked up once.
    tokenizer = None if plan_only else build_tokenizer(_located(config, files), resume)
    hf_config = _hf_config(config, files, tokenizer)
    check(hf_config)
    _check_length(config, text_config(hf_config))
    decoder = Decoder.from_config(
        hf_config,
        precision=precision,
        freeze=config.model.freeze,
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
        frozen_dtypes=_stored_types(source, resume),
    )
    if source is not None:
        decoder.layout = exported(source, decoder)
    elif pretrained and files is not None and files.gguf is not None:
        decoder.layout = library({name: ref.shape for name, ref in decoder.tensors.items()})
    if tokenizer is not None and len(tokenizer) > decoder.num_embeddings:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's embedding {decoder.num_embeddings} rows, and "
            "growing the vocabulary is not supported. Name the model's own tokenizer (model.tokenizer), or, where "
            "tokens were added on purpose, grow the model first: in transformers, "
            f"model.resize_token_embeddings({len(tokenizer)}) and save_pretrained, then train that folder"
        )
    return ModelSetup(
        config=config, machine=machine, device=device, decoder=decoder, tokenizer=tokenizer, files=files, source=source
    )


def assemble(
    config: Config,
    *,
    folder: Path | None,  # where the run will write; its disk must hold the checkpoints beside those that are there
    resume: Path | None = None,  # the checkpoint that weights and moments come from
    numerics: dict[str, Any] | None = None,  # the numerics key it was computed under
    dry: bool = False,
    progress: Callable[[str, int, int], None] | None = None,  # what, done, in all
) -> RunComponents:
    """All parts of a run, ready for the first step. `dry`: everything but the engine."""
    config.require("data")
    machine = facts.read(folder)
    model_setup = prepare_model(config, machine, resume=resume)
    decoder, tokenizer = model_setup.decoder, model_setup.tokenizer
    assert tokenizer is not None
    keep_threads(model_setup, numerics)
    # What cannot fit is refused before any data is tokenized; only after that is it known how many rows a step has.
    nominal = planner.nominal_rows(config)
    run_plan = planner.plan_run(
        config, decoder, device=model_setup.device, machine=machine, rows=nominal, saved=numerics
    )
    if folder is not None:
        needed = planner.disk_needed(config, decoder, decoder.precision)
        planner.check_disk(needed, folder, len(steps_in(folder)), config)
    train, held_out = prepare(
        config,
        tokenizer,
        vocab_size=decoder.num_embeddings,
        progress=(lambda what, rows: progress(f"tokenizing {what}", rows, 0)) if progress else None,
    )
    rows = most_rows(config, train, held_out)
    if rows != nominal:
        run_plan = planner.plan_run(
            config, decoder, device=model_setup.device, machine=machine, rows=rows, saved=numerics
        )
    size, pad = run_plan.micro_batch[0], _pad_id(tokenizer)
    parts = RunComponents(
        model_setup=model_setup,
        run_plan=run_plan,
        train=train,
        loader=Loader(train, config, micro_batch=size, pad_id=pad, mark_padding=decoder.router is not None),
        held_out=held_out,
        eval_loader=None if held_out is None else Loader(held_out, config, micro_batch=size, pad_id=pad),
    )
    if not dry:
        try:
            parts.engine = build_engine(model_setup, run_plan, resume, progress)
        except BaseException:
            parts.close()
            raise
    return parts


def build_engine(
    model_setup: ModelSetup,
    run_plan: RunPlan,
    resume: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Engine:
    """Allocates what was planned and fills it: from a checkpoint, from pretrained weights, or at random."""
    config, decoder = model_setup.config, model_setup.decoder
    train = config.train

    def told(what: str) -> Callable[[int, int], None] | None:
        return (lambda done, total: progress(what, done, total)) if progress else None

    def fill(decoder: Decoder, core: Any) -> None:
        if resume is not None:
            return  # `Engine.load` does it, once there is an engine
        if model_setup.source is not None:
            load(model_setup.source, decoder, core, progress=told("reading weights"))
        else:
            initialize(decoder, core, train.seed, device=run_plan.device, progress=told("drawing weights"))

    engine = Engine(
        decoder,
        optimizer=planner.optimizer_for(config, [t.name for t in decoder.tensors.values() if t.role == "trainable"]),
        max_grad_norm=train.max_grad_norm,
        grad_precision=train.sent_in(decoder.precision),
        update=train.update,
        device=run_plan.device,
        label_smoothing=train.label_smoothing,
        z_loss=train.z_loss,
        deterministic=train.deterministic,
        seed=train.seed,
        load=fill,
        tokenizer=model_setup.tokenizer,
        tokenizer_dir=_tokenizer_folder(config, model_setup.files),
        **run_plan.engine_options(),
    )
    if resume is not None:
        try:
            engine.load(resume)
        except BaseException:
            engine.close()
            raise
    return engine


def most_rows(config: Config, train: Dataset, held_out: Dataset | None = None) -> int:
    """The most sequences that one step of the run has, evaluation included."""
    if config.train.batch_size is not None:
        return config.train.batch_size
    assert config.train.batch_tokens is not None
    if config.data.packing:
        return max(1, config.train.batch_tokens // config.data.seq_len)
    # Rows fill a step as far as they fit: no step has more than if it held the shortest rows alone.
    most = 1
    for dataset in (train, held_out):
        if dataset is not None:
            lengths = np.sort(np.concatenate([part.pieces.length for part in dataset.parts]))
            most = max(most, int(np.searchsorted(np.cumsum(lengths), config.train.batch_tokens, side="right")))
    return most


def run_tokenizer(config: Config, checkpoint: Path | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer alone; of a run that goes on from `checkpoint`, that run's."""
    return build_tokenizer(_located(config, _files(config, plan_only=False)), checkpoint)


def keep_threads(model_setup: ModelSetup, numerics: dict[str, Any] | None) -> None:
    """Computes with as many of torch's threads as a resumed run did: on the CPU they are part of the numerics key."""
    threads = (numerics or {}).get("threads")
    if model_setup.device == "cpu" and isinstance(threads, int):
        import torch

        if threads != torch.get_num_threads():
            log.info("computing with %d threads, as the run did before", threads)
            torch.set_num_threads(threads)


def _files(config: Config, plan_only: bool) -> ModelFiles | None:
    path = config.model.path
    if path is None or (plan_only and not path.startswith("python:") and not Path(path).exists()):
        return None
    return resolve(path, config.model.revision)


def _hf_config(config: Config, files: ModelFiles | None, tokenizer: "PreTrainedTokenizerBase | None") -> Any:
    if config.model.config is not None:
        own = config.model.config
        if tokenizer is not None:
            return load_config(with_vocabulary(own, tokenizer))
        trained = config.model.tokenizer
        size = {"vocab_size": trained.vocab_size} if isinstance(trained, TokenizerTraining) else {}
        return load_config(size | own)
    if files is None:
        return load_config(config.model.path, config.model.trust_remote_code)
    return load_config(files.folder, config.model.trust_remote_code, **files.arguments())


def _located(config: Config, files: ModelFiles | None) -> Config:
    if files is None:
        return config
    model = dataclasses.replace(config.model, path=str(files.gguf or files.folder), revision=None)
    return dataclasses.replace(config, model=model)


def _check_length(config: Config, text: Any) -> None:
    limit = max_positions(text)
    if limit is not None and config.data.seq_len > limit:
        raise ConfigError(
            f"data.seq_len is {config.data.seq_len} and the model has positions for {limit} tokens; lower data.seq_len"
            + (", or raise model.config.max_position_embeddings" if config.model.config is not None else "")
        )


def _tokenizer_folder(config: Config, files: ModelFiles | None) -> Path | None:
    """The folder whose tokenizer files are copied unchanged; None where the tokenizer has to be written anew."""
    if config.model.chat_template is not None:
        return None
    if isinstance(config.model.tokenizer, str):
        folder = Path(config.model.tokenizer)
        return folder if folder.is_dir() else None
    if config.model.tokenizer is None and files is not None and files.gguf is None:
        return files.folder
    return None


def _stored_types(source: Weights | None, resume: Path | None) -> dict[str, torch.dtype] | None:
    """The type of every tensor where it is read from, which frozen ones keep; None for a model drawn at random."""
    if resume is not None:
        return Checkpoint.open(resume).types()
    return None if source is None else {name: entry.dtype for name, entry in source.entries.items()}


def _pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0
