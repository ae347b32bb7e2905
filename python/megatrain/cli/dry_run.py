"""What a run is about to do, shown before it does anything: `megatrain train --dry-run` and `megatrain data`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.cli.output import json_line, line
from megatrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.config import Config


def dry_run(config: "Config", json: bool) -> None:
    """Everything of a run but its steps: configuration, data, the beginning of the next step's batch, plan. What a
    start would refuse is refused."""
    from megatrain.cli import tables
    from megatrain.data import inspection
    from megatrain.training.forecast import forecast
    from megatrain.training.resume import resolve_resume
    from megatrain.training.setup import assemble

    assert config.output.dir is not None
    run = Path(config.output.dir)
    origin, parts = resolve_resume(
        config,
        run,
        lambda origin: assemble(
            config,
            folder=run,
            resume=origin.folder if origin else None,
            numerics=origin.numerics if origin else None,
            dry=True,
        ),
    )
    step = origin.position.step if origin else 0
    try:
        config = config.run_plan(parts.run_plan.precision)
        train = inspection.summary(parts.train)
        held_out = inspection.summary(parts.held_out) if parts.held_out is not None else None
        assert parts.model_setup.tokenizer is not None
        left = step < parts.total_steps
        first = inspection.batch(parts.loader.batch(step), parts.model_setup.tokenizer) if left else []
        plan = forecast(
            parts.model_setup, parts.run_plan, origin.numerics if origin else None, (parts.train, parts.held_out)
        )
        if json:
            json_line(
                plan.to_dict()
                | {
                    "config": config.to_dict(),
                    "train": train.to_dict(),
                    "eval": held_out.to_dict() if held_out is not None else None,
                    "resume": str(origin.folder) if origin else None,
                    "step": step,
                    "steps": parts.total_steps,
                    "first_batch": [[[token.id, token.text, token.supervised] for token in line] for line in first],
                }
            )
            return
        line(config.to_yaml())
        tables.data("train", train)
        if held_out is not None:
            tables.data("held-out", held_out)
        if left:
            which = f"step {step + 1}" if step else "the first step"
            line(f"{which}'s first micro-batch, {len(first)} sequences, begins:")
            tables.batch(first)
            line()
        tables.plan(plan)
        line(f"steps: {parts.total_steps}" + (f", of which {step} are done" if step else ""))
    finally:
        parts.close()


def data(config: "Config", *, num_rows: int, held_out: bool, json: bool) -> None:
    """The data sets in numbers, and rows of one of them token by token."""
    from megatrain.cli import tables
    from megatrain.data import inspection, prepare

    tokenizer = _tokenizer(config)
    train, evaluated = prepare(config, tokenizer)
    chosen = evaluated if held_out and evaluated is not None else train
    rows = inspection.rows(chosen, tokenizer, num_rows)
    if json:
        json_line(
            {
                "train": inspection.summary(train).to_dict(),
                "eval": inspection.summary(evaluated).to_dict() if evaluated is not None else None,
                "rows": [row.to_dict() for row in rows],
            }
        )
        return
    tables.data("train", inspection.summary(train))
    if evaluated is not None:
        tables.data("held-out", inspection.summary(evaluated))
    shown = 0
    for row in rows:
        tables.row(row)
        shown += 1
    pieces = inspection.summary(chosen).num_pieces
    if shown < pieces:
        line(f"shown: {shown} of {pieces:,} rows and parts of rows; --rows N shows more")


def _tokenizer(config: "Config") -> "PreTrainedTokenizerBase":
    """The tokenizer that a start would use. Where a start would be refused, says so, and takes the configuration's."""
    from megatrain.training.resume import resolve_resume
    from megatrain.training.setup import run_tokenizer

    if config.output.dir is not None:
        run = Path(config.output.dir)
        try:
            return resolve_resume(config, run, lambda origin: run_tokenizer(config, origin.folder if origin else None))[
                1
            ]
        except (ConfigError, CheckpointError) as error:
            tokenizer = run_tokenizer(config)
            sys.stderr.write(f"megatrain train would refuse this: {error}\n")
            return tokenizer
    return run_tokenizer(config)
