"""Builds the parts of a run from its configuration, in this order: tokenizer, model without storage, plan, data,
engine. Whatever can be refused is refused before the first weight is read.

Training, evaluation and the dry run all start here.
"""

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from megatrain import _core
from megatrain.checkpoint.checkpoint import Checkpoint
from megatrain.checkpoint.hf_folder import beside_tensors, check_model_files
from megatrain.checkpoint.step_folders import steps_in
from megatrain.config import Config, ModelConfig, TokenizerTraining
from megatrain.config.default_length import max_positions
from megatrain.config.validation import check_schedule_length
from megatrain.data import Dataset, Loader, by_name, fingerprint, prepare
from megatrain.data.train_tokenizer import build_tokenizer, with_vocabulary
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.models.config_overrides import check_shapes
from megatrain.models.decoder import Decoder
from megatrain.models.flops import ModelCount, count_model
from megatrain.models.hf_config import check, differences, load_config, text_config
from megatrain.planning import disk_space, planner
from megatrain.planning.optimizer_groups import optimizer_for
from megatrain.planning.planner import RunPlan
from megatrain.system import hardware as facts
from megatrain.system.hardware import Machine
from megatrain.training.forecast import FEW_STEPS
from megatrain.training.run_dir import read_correction
from megatrain.training.sampling import check_prompts
from megatrain.weights import gguf
from megatrain.weights.hf_layout import library
from megatrain.weights.initialize import initialize
from megatrain.weights.loader import load
from megatrain.weights.matching import exported
from megatrain.weights.source import ModelFiles, open_weights, resolve
from megatrain.weights.types import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log: logging.Logger = logging.getLogger("megatrain")


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelSetup:
    """The requested model without any storage: what a plan needs."""

    config: Config
    machine: Machine
    device: Literal["cuda", "cpu"]
    decoder: Decoder
    tokenizer: "PreTrainedTokenizerBase | None"
    files: ModelFiles | None
    source: Weights | None
    """The pretrained weights, opened and checked; None for a model that starts at random, and for a GGUF file."""
    unpacked: ModelFiles | None = None
    """The GGUF file that is unpacked when an engine is filled, for which `machine` has memory reserved."""

    @property
    def count(self) -> ModelCount:
        """What one token costs to compute."""
        decoder = self.decoder
        tensors = [(t.name, t.unit, t.shape) for t in decoder.tensors.values() if not t.is_buffer]
        return count_model(decoder.config, tensors, decoder.num_layers)


@dataclasses.dataclass(kw_only=True, slots=True)
class PlannedRun:
    """A run whose data are read and whose memory is planned; nothing of it is allocated yet."""

    model_setup: ModelSetup
    tokenizer: "PreTrainedTokenizerBase"
    run_plan: RunPlan
    train: Dataset
    loader: Loader
    held_out: Dataset | None
    eval_loaders: dict[str, Loader]
    """Batches of each set of `held_out` by its name, of a set without a name by ""; empty where that is None."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.loader.num_steps

    def close(self) -> None:
        """Stops the loaders' threads."""
        self.loader.close()
        for loader in self.eval_loaders.values():
            loader.close()


@dataclasses.dataclass(kw_only=True, slots=True)
class RunComponents:
    """A planned run and the engine that computes it."""

    planned: PlannedRun
    engine: Engine

    def close(self) -> None:
        """Stops all threads and gives all memory back."""
        self.planned.close()
        self.engine.close()


def prepare_model(
    config: Config,
    machine: Machine,
    *,
    resume: Path | None = None,  # the checkpoint that is loaded instead of pretrained weights, and has the tokenizer
    plan_only: bool = False,  # neither tokenizer nor weights are needed, and at most a configuration is downloaded
) -> ModelSetup:
    """The model without storage. Raises ConfigError; cheap refusals come first: device, precision, files, sequence
    length."""
    return _for_a_plan(config, machine) if plan_only else _for_a_run(config, machine, resume)[0]


def _for_a_plan(config: Config, machine: Machine) -> ModelSetup:
    files = _files(config, plan_only=True)
    source = None
    if _is_pretrained(config, files) and files is not None and files.gguf is None:
        with contextlib.suppress(ConfigError):
            source = open_weights(files)
    model_setup = _model_setup(config, machine, files, source, _types(source), None)
    return _with_room_to_unpack(model_setup) if _is_gguf(config, files) else model_setup


def _for_a_run(
    config: Config, machine: Machine, resume: Path | None, goes_on: bool = True
) -> "tuple[ModelSetup, PreTrainedTokenizerBase]":
    device = planner.choose_device(config, machine)
    planner.choose_matmul(config, planner.choose_precision(config, device, machine), device, machine)
    files = _files(config, plan_only=False)
    source, unpacked = None, None
    if resume is None and _is_pretrained(config, files) and files is not None:
        if files.gguf is None:
            source = open_weights(files)
        else:
            gguf.check(files.gguf)
            unpacked = files
    # Both read the same files, so that a hub id is looked up once.
    tokenizer = build_tokenizer(_located(config, files), resume)
    stored = _types(source) if resume is None else Checkpoint.open(resume).types()
    model_setup = _model_setup(config, machine, files, source, stored, tokenizer)
    if resume is not None:
        _refuse_another_model(model_setup, resume, goes_on)
    if unpacked is not None:
        model_setup = dataclasses.replace(_with_room_to_unpack(model_setup), unpacked=unpacked)
    return model_setup, tokenizer


def _refuse_another_model(model_setup: ModelSetup, checkpoint: Path, goes_on: bool) -> None:
    """Raises ConfigError where the model's configuration is no longer the one that a checkpoint was written with: the
    same weights would compute something else. `goes_on`: whether a run goes on from there, which could begin anew."""
    changed = differences(model_setup.decoder.config, Checkpoint.open(checkpoint).config())
    if changed:
        remedy = as_before(model_setup.config.model, model_setup.files)
        anew = ", or name another output.dir to start anew" if goes_on else ""
        raise ConfigError(
            f"{checkpoint} was written with another configuration of the model: {'; '.join(changed)}. {remedy}{anew}"
        )


def as_before(model: ModelConfig, files: ModelFiles | None) -> str:
    """What to do for a model to have the configuration again that it had."""
    if files is None:
        return "Put model.config back"
    if files.gguf is not None:
        what = f"the file {files.gguf}, which holds it,"
    elif Path(files.name).expanduser().is_dir() or files.name.startswith("python:"):
        what = f"the config.json of {files.name}"
    else:
        also = ", and put model.config back" if model.config else ""
        return f"Name the revision of {files.name} that it was written with (model.revision){also}"
    return f"Put {what}{' and model.config' if model.config else ''} back"


def _with_room_to_unpack(model_setup: ModelSetup) -> ModelSetup:
    """With the memory that a GGUF file takes while an engine is filled left out of every plan."""
    reserved = gguf.unpacking_bytes(model_setup.decoder)
    return dataclasses.replace(model_setup, machine=dataclasses.replace(model_setup.machine, host_reserved=reserved))


def _is_pretrained(config: Config, files: ModelFiles | None) -> bool:
    return files is not None and config.model.init == "pretrained"


def _is_gguf(config: Config, files: ModelFiles | None) -> bool:
    return _is_pretrained(config, files) and files is not None and files.gguf is not None


def _model_setup(
    config: Config,
    machine: Machine,
    files: ModelFiles | None,
    source: Weights | None,
    stored: dict[str, torch.dtype] | None,  # of every tensor where it is read from, which frozen ones keep
    tokenizer: "PreTrainedTokenizerBase | None",
) -> ModelSetup:
    device = planner.choose_device(config, machine)
    precision = planner.choose_precision(config, device, machine)
    hf_config = _hf_config(config, files, tokenizer)
    check(hf_config)
    if config.model.config and config.model.init == "pretrained":
        own = functools.partial(_folder_config, config, files)
        check_shapes(own, config.model.config, config.model.trust_remote_code)
    _check_length(config, text_config(hf_config))
    make = functools.partial(
        Decoder.from_config,
        hf_config,
        precision=precision,
        matmul=planner.choose_matmul(config, precision, device, machine),
        freeze=config.model.freeze,
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
    )
    decoder = make(frozen_dtypes=stored)
    if source is not None:
        decoder.set_layout(exported(source, decoder))
    elif _is_gguf(config, files):
        other = gguf.unpacked_types(decoder) if stored is None else {}
        decoder = make(frozen_dtypes=other) if other else decoder
        decoder.set_layout(library({name: ref.shape for name, ref in decoder.tensors.items()}))
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


def prepare_run(
    config: Config,
    *,
    folder: Path | None,  # where the run will write: its disk must have room for the checkpoints still to come
    resume: Path | None = None,  # the checkpoint that weights and moments come from
    numerics: dict[str, Any] | None = None,  # the numerics key it was computed under
    progress: Callable[[str, int, int], None] | None = None,  # what, done, total (0: unknown)
    decided: RunPlan | None = None,  # the plan, of a run that has measured its steps
) -> PlannedRun:
    """Everything of a run but its engine. Raises ConfigError, DoesNotFit with the sum, StorageError."""
    config.require("data")
    model_setup, tokenizer = _for_a_run(config, facts.read(folder), resume, goes_on=folder is not None)
    decoder, machine = model_setup.decoder, model_setup.machine
    if folder is not None:
        decoder.refuse_other_loss()
    check_model_files(_model_folder(config, model_setup.files))
    end_tokens(model_setup)
    keep_threads(model_setup, numerics)
    samples = config.eval.samples
    check_prompts(tokenizer, samples.prompts, samples.max_new_tokens, config.data.seq_len)
    # What cannot fit is refused before any data is tokenized; only after that is it known how many rows a step has.
    nominal = planner.nominal_rows(config)
    correction = read_correction(folder) if folder is not None else None

    def plan_run(rows: int) -> RunPlan:
        return decided or planner.plan_run(
            config,
            decoder,
            device=model_setup.device,
            machine=machine,
            rows=rows,
            saved=numerics,
            correction=correction,
        )

    run_plan = plan_run(nominal)
    if folder is not None:
        needed = disk_space.disk_needed(config, decoder, decoder.precision)
        beside = beside_tensors(decoder, tokenizer)
        disk_space.check_disk(needed, beside, folder, len(steps_in(folder)), config, run_plan)
    train, held_out = prepare(
        config,
        tokenizer,
        vocab_size=decoder.num_embeddings,
        progress=(lambda what, rows: progress(f"tokenizing {what}", rows, 0)) if progress else None,
        date=fingerprint.date_of(resume),
    )
    _warn_of_ends(model_setup, tokenizer, train)
    rows = most_rows(config, train, held_out)
    if rows != nominal:
        run_plan = plan_run(rows)
    size, pad = run_plan.micro_batch[0], _pad_id(tokenizer)
    planned = PlannedRun(
        model_setup=model_setup,
        tokenizer=tokenizer,
        run_plan=run_plan,
        train=train,
        loader=Loader(train, config, micro_batch=size, pad_id=pad, mark_padding=decoder.router is not None),
        held_out=held_out,
        eval_loaders={
            name: Loader(part, config, micro_batch=size, pad_id=pad) for name, part in _held_out_sets(held_out).items()
        },
    )
    if config.train.steps is None:
        try:
            check_schedule_length(config.train, planned.total_steps, f"train.epochs {config.train.epochs:g}")
        except BaseException:
            planned.close()
            raise
        _warn_of_few_steps(config, planned)
    return planned


def _warn_of_few_steps(config: Config, planned: PlannedRun) -> None:
    steps, train = planned.total_steps, planned.train
    if steps >= FEW_STEPS:
        return
    longest = int(np.percentile(np.concatenate([part.tokens.lengths for part in train.parts]), 95, method="lower"))
    windows = "windows" if config.data.packing else "rows"
    size, key = (
        (f"{config.train.batch_tokens:,} tokens", "train.batch_tokens")
        if config.train.batch_tokens is not None
        else (f"{config.train.batch_size:,} {windows}", "train.batch_size")
    )
    multiple = (
        f" (a multiple of data.seq_len, {config.data.seq_len:,}; 95 % of the rows have at most {longest:,} tokens)"
        if key == "train.batch_tokens" and config.data.packing
        else ""
    )
    log.warning(
        "the run has only %d optimizer step%s: an epoch has %s tokens in %d %s, and a step takes up to %s. Lower "
        "%s%s or raise train.epochs",
        steps,
        "s" * (steps != 1),
        f"{train.num_tokens:,}",
        train.num_sequences,
        windows,
        size,
        key,
        multiple,
    )


def _held_out_sets(held_out: Dataset | None) -> dict[str, Dataset]:
    return {} if held_out is None else by_name(held_out) or {"": held_out}


def assemble(
    config: Config,
    *,
    folder: Path | None,
    resume: Path | None = None,
    numerics: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    decided: RunPlan | None = None,
) -> RunComponents:
    """All of a run, ready for its first step; arguments and errors as for `prepare_run`."""
    planned = prepare_run(config, folder=folder, resume=resume, numerics=numerics, progress=progress, decided=decided)
    try:
        engine = build_engine(planned.model_setup, planned.run_plan, resume, progress)
    except BaseException:
        planned.close()
        raise
    return RunComponents(planned=planned, engine=engine)


def build_engine(
    model_setup: ModelSetup,
    run_plan: RunPlan,
    resume: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Engine:
    """Allocates what was planned and fills it from a checkpoint, from pretrained weights, or at random."""
    config, decoder = model_setup.config, model_setup.decoder
    train = config.train

    def report(what: str) -> Callable[[int, int], None] | None:
        return (lambda done, total: progress(what, done, total)) if progress else None

    def fill(decoder: Decoder, core: _core.Engine) -> None:
        if resume is not None:
            return  # `engine.load` below fills it
        if model_setup.source is not None:
            load(model_setup.source, decoder, core, progress=report("reading weights"))
        elif model_setup.unpacked is not None:  # which is given back when they are loaded
            load(open_weights(model_setup.unpacked), decoder, core, progress=report("reading weights"))
        else:
            initialize(decoder, core, train.seed, device=run_plan.device, progress=report("drawing weights"))

    engine = Engine(
        decoder,
        optimizer=optimizer_for(config, [t.name for t in decoder.tensors.values() if t.role == "trainable"]),
        max_grad_norm=train.max_grad_norm,
        grad_precision=train.sent_in(decoder.precision),
        moments=train.moments,
        master=train.master,
        update=train.update,
        device=run_plan.device,
        label_smoothing=train.label_smoothing,
        z_loss=train.z_loss,
        deterministic=train.deterministic,
        seed=train.seed,
        load=fill,
        tokenizer=model_setup.tokenizer,
        tokenizer_dir=_tokenizer_folder(config, model_setup.files),
        model_dir=_model_folder(config, model_setup.files),
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
    """The largest number of sequences in one step of the run, evaluation included."""
    tokens = config.train.batch_tokens
    if tokens is None or config.data.packing:
        return planner.nominal_rows(config)
    # Rows fill a step as far as they fit: no step has more than if it held the shortest rows alone.
    most = 1
    for dataset in (train, held_out):
        if dataset is not None:
            lengths = np.sort(np.concatenate([part.pieces.length for part in dataset.parts]))
            most = max(most, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))
    return most


def vocabulary_size(config: Config, tokenizer: "PreTrainedTokenizerBase") -> int:
    """How many token ids the model of `config` has embeddings for; nothing of it is built."""
    files = _files(config, plan_only=False)
    return int(text_config(_hf_config(config, files, tokenizer)).vocab_size)


def run_tokenizer(config: Config, checkpoint: Path | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer alone. A run that resumes from `checkpoint` uses that run's."""
    return build_tokenizer(_located(config, _files(config, plan_only=False)), checkpoint)


def keep_threads(model_setup: ModelSetup, numerics: dict[str, Any] | None) -> None:
    """Uses as many torch threads as the resumed run did: on the CPU their number is part of the numerics key."""
    threads = (numerics or {}).get("threads")
    if model_setup.device == "cpu" and isinstance(threads, int):
        import torch

        if threads != torch.get_num_threads():
            log.info("using %d torch threads, as this run did before", threads)
            torch.set_num_threads(threads)


def _files(config: Config, plan_only: bool) -> ModelFiles | None:
    path = config.model.path
    return None if path is None else resolve(path, config.model.revision, configuration_only=plan_only)


def _hf_config(config: Config, files: ModelFiles | None, tokenizer: "PreTrainedTokenizerBase | None") -> Any:
    if config.model.path is None:
        own = config.model.config or {}
        if tokenizer is not None:
            return load_config(with_vocabulary(own, tokenizer))
        trained = config.model.tokenizer
        size = {"vocab_size": trained.vocab_size} if isinstance(trained, TokenizerTraining) else {}
        return load_config(size | own)
    return _folder_config(config, files, config.model.config)


def _folder_config(config: Config, files: ModelFiles | None, overrides: Mapping[str, Any] | None) -> Any:
    """The configuration of `model.path` with keys replaced."""
    if files is None:
        return load_config(config.model.path, config.model.trust_remote_code, overrides)
    return load_config(files.folder, config.model.trust_remote_code, overrides, **files.arguments())


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
            ", or raise model.config.max_position_embeddings"
        )


def _tokenizer_folder(config: Config, files: ModelFiles | None) -> Path | None:
    """The folder whose tokenizer files are copied unchanged; None where the tokenizer has to be written anew."""
    if config.model.chat_template is not None:
        return None
    if config.model.tokenizer is None:
        return _model_folder(config, files)
    return _named_tokenizer(config)


def _model_folder(config: Config, files: ModelFiles | None) -> Path | None:
    """The folder whose generation config, processor and code are copied unchanged: the model's; the tokenizer's where
    the model has none; None where neither has one."""
    return files.folder if files is not None and files.gguf is None else _named_tokenizer(config)


def _named_tokenizer(config: Config) -> Path | None:
    named = config.model.tokenizer
    return Path(named) if isinstance(named, str) and Path(named).is_dir() else None


def _types(source: Weights | None) -> dict[str, torch.dtype] | None:
    return None if source is None else {name: entry.dtype for name, entry in source.entries.items()}


def end_tokens(model_setup: ModelSetup) -> tuple[set[int], str]:
    """The tokens at which the exported model stops when it generates, and what says so: its generation config, which is
    kept, or its configuration. Raises ConfigError for what are no tokens of the model."""
    text = text_config(model_setup.decoder.config)
    ends, named = getattr(text, "eos_token_id", None), "its configuration"
    where = f"the configuration of {text.model_type}"
    copied = _model_folder(model_setup.config, model_setup.files)
    own = None if copied is None else copied / "generation_config.json"
    if own is not None and own.is_file():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = json.loads(own.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                ends, named, where = content.get("eos_token_id"), str(own), str(own)
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    size = model_setup.decoder.num_embeddings
    for token in listed:
        if type(token) is not int or not 0 <= token < size:
            raise ConfigError(
                f"{where}: eos_token_id is {ends!r}, and {token!r} is no token of the model; write a number from 0 to "
                f"{size - 1}, a list of such, or null for none"
            )
    return set(listed), named


def _warn_of_ends(model_setup: ModelSetup, tokenizer: "PreTrainedTokenizerBase", train: Dataset) -> None:
    """Says so where the exported model would not stop at what it is taught to end an answer with."""
    stops, named = end_tokens(model_setup)
    missing = sorted((train.final_tokens() & set(tokenizer.added_tokens_decoder)) - stops)
    if missing:
        spelled = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in missing)
        log.warning(
            "answers are taught to end with %s, and the exported model does not stop there when it generates: "
            "%s has eos_token_id %s; add the id there, or to generation_config.json of the export",
            spelled,
            named,
            ", ".join(map(str, sorted(stops))) or None,
        )


def _pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0
