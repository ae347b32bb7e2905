"""`megatrain train --dry-run` and `megatrain data`: what a run would do, without doing it."""

import sys
from typing import TYPE_CHECKING

from megatrain.cli.output import json_line, line
from megatrain.errors import CheckpointError, ConfigError
from megatrain.training.run_dir import output_folder

if TYPE_CHECKING:
    import datetime as dt

    from transformers import PreTrainedTokenizerBase

    from megatrain.config import Config
    from megatrain.data import Dataset


def dry_run(config: "Config", *, json: bool, verbose: bool = False) -> None:
    """Everything of a run but its steps: configuration, data, the beginning of the next step's batch, plan. Refuses
    what a start would refuse."""
    from megatrain.cli import tables
    from megatrain.data import inspection
    from megatrain.training.forecast import forecast
    from megatrain.training.resume import resolve_resume
    from megatrain.training.setup import prepare_run

    run = output_folder(config)
    origin, planned = resolve_resume(
        config,
        run,
        lambda origin: prepare_run(
            config,
            folder=run,
            resume=origin.folder if origin else None,
            numerics=origin.numerics if origin else None,
        ),
    )
    step, total = (origin.position.step if origin else 0), planned.total_steps
    try:
        config = config.run_plan(planned.run_plan.precision)
        train = inspection.summary(planned.train)
        held_out = inspection.summary(planned.held_out) if planned.held_out is not None else None
        first = inspection.batch(planned.loader.batch(step), planned.tokenizer) if step < total else []
        plan = forecast(
            planned.model_setup,
            planned.run_plan,
            origin.numerics if origin else None,
            (planned.train, planned.held_out),
            total,
        )
        if json:
            json_line(
                plan.to_dict()
                | {
                    "config": config.to_dict(),
                    "train": train.to_dict(),
                    "eval": held_out.to_dict() if held_out is not None else None,
                    **inspection.sets(planned.held_out),
                    "resume": str(origin.folder) if origin else None,
                    "step": step,
                    "steps": total,
                    "first_batch": [[[token.id, token.text, token.supervised] for token in line] for line in first],
                }
            )
            return
        line(config.to_yaml())
        tables.data("train", train)
        _held_out(planned.held_out)
        if step < total:
            which = f"step {step + 1}" if step else "the first step"
            line(f"{which}'s first micro-batch, {len(first)} sequence{'s' * (len(first) != 1)}, begins:")
            tables.batch(first)
            line()
        tables.plan(plan, verbose=verbose)
        line(f"steps: {total}" + (f", of which {step} are done" if step else ""))
    finally:
        planned.close()


def data(config: "Config", *, num_rows: int, held_out: bool, json: bool) -> None:
    """Prints the data sets in numbers, and rows of one of them token by token."""
    from megatrain.cli import tables
    from megatrain.data import inspection, prepare
    from megatrain.system.terminal import progress_line
    from megatrain.training.setup import vocabulary_size

    tokenizer, date = _tokenizer(config)
    moving = progress_line()
    train, evaluated = prepare(
        config,
        tokenizer,
        vocab_size=vocabulary_size(config, tokenizer),
        progress=(lambda what, tokens: moving(f"tokenizing {what}", tokens, 0)) if moving else None,
        date=date,
    )
    chosen = evaluated if held_out and evaluated is not None else train
    rows = inspection.rows(chosen, tokenizer, num_rows)
    if json:
        json_line(
            {
                "train": inspection.summary(train).to_dict(),
                "eval": inspection.summary(evaluated).to_dict() if evaluated is not None else None,
                **inspection.sets(evaluated),
                "rows": [row.to_dict() for row in rows],
            }
        )
        return
    tables.data("train", inspection.summary(train))
    _held_out(evaluated)
    shown = 0
    for row in rows:
        tables.row(row)
        shown += 1
    pieces = inspection.summary(chosen).num_pieces
    if shown < pieces:
        line(f"shown: {shown} of {pieces:,} rows and parts of rows; --rows N shows more")


def _held_out(dataset: "Dataset | None") -> None:
    """Prints the held-out data in numbers, each set with a name by itself."""
    from megatrain.cli import tables
    from megatrain.data import by_name, inspection

    if dataset is not None:
        for name, one in (by_name(dataset) or {"": dataset}).items():
            tables.data(f"held-out {name}".rstrip(), inspection.summary(one))


def _tokenizer(config: "Config") -> "tuple[PreTrainedTokenizerBase, dt.date | None]":
    """The tokenizer that a start would use, and the day that a run that goes on gave its chat template. When a start
    would be refused, says so and uses the configuration's."""
    from megatrain.data.fingerprint import date_of
    from megatrain.training.resume import resolve_resume
    from megatrain.training.setup import run_tokenizer

    if config.output.dir is not None:
        run = output_folder(config)
        try:
            origin, tokenizer = resolve_resume(
                config, run, lambda origin: run_tokenizer(config, origin.folder if origin else None)
            )
            return tokenizer, date_of(origin.folder if origin else None)
        except (ConfigError, CheckpointError) as error:
            tokenizer = run_tokenizer(config)
            sys.stderr.write(f"megatrain train would refuse this: {error}\n")
            return tokenizer, None
    return run_tokenizer(config), None
