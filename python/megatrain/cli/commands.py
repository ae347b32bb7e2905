"""One function per verb: it reads the arguments, calls the module that does the work, and prints the answer."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.cli import output, refusals
from megatrain.cli.exit_codes import DONE, REFUSED, STOPPED
from megatrain.cli.output import json_line, line, table
from megatrain.errors import ConfigError, StorageError
from megatrain.training.stop import Stop

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.system.hardware import Machine
    from megatrain.training.forecast import Forecast
    from megatrain.training.trainer import Result


def run(args: argparse.Namespace) -> int:
    """Runs the verb in `args`; returns its exit code."""
    import os

    if not sys.stderr.isatty():
        # Silences the progress bars of libraries, which would fill a log file. Ours checks for a terminal itself.
        os.environ.setdefault("TQDM_DISABLE", "1")
    refusals.several_processes(args.verb)
    verb = {
        "train": _train,
        "plan": _plan,
        "probe": _probe,
        "doctor": _doctor,
        "data": _data,
        "bench": _bench,
        "eval": _eval,
        "generate": _generate,
        "export": _export,
        "report": _report,
        "init": _init,
        "schema": _schema,
    }[args.verb]
    return verb(args)


def _train(args: argparse.Namespace) -> int:
    from megatrain.cli.signals import stopping
    from megatrain.config import Config
    from megatrain.training import run_dir
    from megatrain.training.progress import Display, mode_for

    refusals.train(args)
    config = Config.load(args.config, args.settings)
    config.require("data")
    folder = run_dir.output_folder(config)
    refusals.before_loading(config)
    run_dir.check(folder)
    display = Display(mode_for(sys.stdout, args.json))
    if args.dry_run:
        from megatrain.cli.dry_run import dry_run

        with display:
            dry_run(config, json=args.json, verbose=args.verbose)
        return DONE
    stop = Stop()
    with stopping(stop, can_save=True):
        from megatrain.training.trainer import Trainer

        result = Trainer(config, stop=stop, display=display).fit()
    try:
        _print_result(folder, result, args.json)
        output.flush()
    except (OSError, StorageError):  # the run has ended all the same, and its folder says how
        output.discard(sys.stdout)
    return STOPPED if result.stopped else DONE


def _print_result(run: Path, result: "Result", as_json: bool) -> None:
    from megatrain.training.metrics import without_progress
    from megatrain.training.run_dir import number_in, read_metrics

    early = not result.stopped and result.step < result.total_steps
    warning = ""
    if not result.stopped and result.loss is not None:
        warning = without_progress([number_in(record, "loss") for record in read_metrics(run) if "loss" in record])
    answer = {
        "step": result.step,
        "total_steps": result.total_steps,
        "loss": result.loss,
        "eval_loss": result.eval_loss,
        **({"eval_sets": result.eval_sets} if result.eval_sets else {}),
        "stopped": result.stopped or None,
        "early_stop": early,
        "warning": warning or None,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "export": str(result.export) if result.export else None,
        "best_step": result.best_step,
    }
    if as_json:
        json_line(answer)
    elif result.stopped:
        line(f"stopped by {result.stopped} after step {result.step} of {result.total_steps}")
        line(f"saved in {result.checkpoint}" if result.checkpoint else "no step was taken, so there is nothing to save")
        line("the same command goes on from there")
    else:
        held_out = f", held-out loss {result.eval_loss:.4f}" if result.eval_loss is not None else ""
        if result.eval_sets:
            held_out += " (" + ", ".join(f"{name} {loss:.4f}" for name, loss in result.eval_sets.items()) + ")"
        loss = f"loss {result.loss:.4f}" if result.loss is not None else "no step was left to do"
        steps = f"{result.step} steps"
        if early:
            steps = f"stopped early after {result.step} of {result.total_steps} steps (eval.early_stop)"
        line(f"done: {steps}, {loss}{held_out}")
        if warning:
            line(f"warning: {warning}")
        line(f"checkpoint {result.checkpoint}")
        if result.export:
            line(f"export {result.export}: the weights of step {result.step}, the last")
        if better := _better_step(run, result):
            line(better)


def _better_step(run: Path, result: "Result") -> str:
    """Where the weights of the lowest held-out loss are, when they are not the last step's; else empty."""
    best = result.best_step
    if best is None or best == result.step:
        return ""
    lowest = f"the lowest held-out loss was measured {f'after step {best}' if best else 'before the first step'}"
    if result.best_checkpoint is not None:
        return f"{lowest}; to export those weights: megatrain export {run} OUT --step best"
    return f"{lowest}, whose weights were not kept" + ("; eval.keep_best: true keeps them" if best else "")


def _plan(args: argparse.Namespace) -> int:
    from megatrain.config import paths
    from megatrain.planning import planner
    from megatrain.system import hardware as facts
    from megatrain.training.forecast import without_data

    config = _planned(args.target, args.settings)
    if args.picture:
        paths.check_writable(Path(args.picture), "--picture")
    machine = facts.read(Path.cwd()) if args.machine is None else described_machine(args.machine)
    device = planner.choose_device(config, machine)
    planner.choose_precision(config, device, machine)
    report = without_data(config, machine)
    if args.picture:
        _draw(report, args.target, Path(args.picture))
    if args.json:
        json_line(report.to_dict())
    else:
        from megatrain.cli import tables

        tables.plan(report, verbose=args.verbose)
    return DONE


def _planned(target: str, settings: list[str]) -> "Config":
    """The configuration for `plan`: from a file, a public shape, or a model's folder or hub id."""
    from megatrain.config import Config
    from megatrain.models.presets import SHAPES

    if target.endswith((".yaml", ".yml")):
        return Config.load(target, settings)
    if target.lower() in SHAPES and not Path(target).exists():
        return Config.from_dict({"model": {"config": SHAPES[target.lower()].config()}}, settings)
    if "/" not in target and not target.startswith("python:") and not Path(target).exists():
        raise ConfigError(
            f"{target!r} is neither a file, a folder nor a known shape ({', '.join(SHAPES)}); a model on the hub is "
            "named OWNER/NAME"
        )
    return Config.from_dict({"model": {"path": target}}, settings)


def _draw(report: "Forecast", model: str, path: Path) -> None:
    """Writes the lanes of a step as an SVG file."""
    from megatrain.cli import timeline
    from megatrain.system.atomic import write_whole

    spans, seconds = timeline.simulated(report)
    machine = report.run_plan.machine
    where = machine.gpu.name if report.run_plan.device == "cuda" and machine.gpu else f"{machine.cpus} processors"
    caption = f"{model} on {where}: a step of {report.step_tokens:,} tokens, predicted {timeline.seconds_text(seconds)}"
    write_whole(path, timeline.document(timeline.draw(spans, seconds, caption), caption))


def described_machine(given: str) -> "Machine":
    """A machine by the name of a preset or from a file that describes it, by its numbers as key=value,…, or both.
    Raises ConfigError."""
    from megatrain.config import yaml12
    from megatrain.planning import presets
    from megatrain.system import descriptions

    first, *words = given.split(",")
    if "=" in first and not Path(first).exists():
        first, words = "", [first, *words]
    path = Path(first)
    try:
        if not first:
            return descriptions.from_words(words, None, given)
        if not path.exists() and not path.suffix and path.name == first:
            return presets.changed(first, words, given) if words else presets.preset(first)
        described = descriptions.from_description(yaml12.load(path.read_text(encoding="utf-8"), first), first)
        return descriptions.from_words(words, described, given) if words else described
    except OSError as error:
        raise ConfigError(f"--machine {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--machine: {error}") from None


def _probe(args: argparse.Namespace) -> int:
    from megatrain.config import paths
    from megatrain.planning import calibrate
    from megatrain.system import descriptions
    from megatrain.system import hardware as facts

    if args.out:
        paths.check_writable(Path(args.out), "--out")
    machine = facts.read(Path.cwd())
    device = "cuda" if machine.gpu is not None else "cpu"
    for folder in args.state or ():
        paths.check_state_folder(Path(folder))
    say = lambda what: _say(f"measuring: {what}")  # noqa: E731 - one line, used once
    measured = calibrate.measure(machine, device, Path.cwd(), say, [Path(folder) for folder in args.state or ()])
    found = measured.rates
    kept = calibrate.keep(machine, device, found, measured.busy)
    if args.out:
        calibrate.write_description(machine, found, Path(args.out))
    if args.json:
        description = descriptions.describe(machine) | {"rates": found}
        kept_in = str(kept) if kept else None
        json_line({"machine": description, "busy": measured.busy, "kept": kept_in, "state_io": measured.state_io})
    else:
        table(
            ("rate", ">value", "unit"), [(key, f"{value:.3g}", descriptions.UNITS[key]) for key, value in found.items()]
        )
        if measured.state_io:
            line(f"optimizer state on disk was read and written by {measured.state_io}")
        line(f"stored in {kept}" if kept else "not stored: the cache folder cannot be written")
        if measured.busy:
            line(f"busy: {measured.busy}, so plans will expect too little of this machine; probe again when it is idle")
    return DONE


def _doctor(args: argparse.Namespace) -> int:
    if args.run is not None:
        refusals.run_folder(Path(args.run))
        return _verify(args)
    from megatrain.cli import doctor

    findings = doctor.examine()
    if args.json:
        json_line(
            {
                "usable": doctor.usable(findings),
                "findings": [
                    {"what": one.what, "status": one.status, "value": one.value, "advice": one.advice}
                    for one in findings
                ],
            }
        )
    else:
        table(("", "what", "found", "what to do"), [(one.status, one.what, one.value, one.advice) for one in findings])
        line("ready" if doctor.usable(findings) else "not ready: see the lines marked missing")
    return DONE if doctor.usable(findings) else REFUSED


def _verify(args: argparse.Namespace) -> int:
    from megatrain.checkpoint import checkpoint
    from megatrain.checkpoint.step_folders import list_checkpoints
    from megatrain.errors import CheckpointError

    run = Path(args.run)
    folders = [run] if (run / "manifest.json").is_file() else list_checkpoints(run)
    if not folders:
        raise ConfigError(f"{run} holds no checkpoint; give the folder of a run (output.dir) or one checkpoint")
    found = {str(folder): checkpoint.verify(folder) for folder in folders}
    if args.json:
        json_line({"checkpoints": found, "whole": not any(found.values())})
    else:
        for folder, problems in found.items():
            line(f"{folder}: " + ("; ".join(problems) if problems else "whole"))
    if any(found.values()):
        damaged = [folder for folder, problems in found.items() if problems]
        raise CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints are damaged: {', '.join(damaged)}; remove them"
        )
    return DONE


def _data(args: argparse.Namespace) -> int:
    from megatrain.config import Config, paths

    config = Config.load(args.config, args.settings)
    config.require("data")
    refusals.data(args, config)
    paths.check(config)
    from megatrain.cli.dry_run import data

    data(config, num_rows=args.rows, held_out=args.eval, json=args.json)
    return DONE


def _bench(args: argparse.Namespace) -> int:
    from megatrain.cli.bench_request import bench_request, configuration

    request = bench_request(args)
    refusals.device(configuration(request))
    if sys.stderr.isatty():
        _say(
            f"steps: {request.warmup} to warm up, then {request.steps} timed, each of {request.batch} x {request.seq} "
            f"tokens, model {request.model}; then one line of JSON"
        )
    from megatrain.cli import bench

    json_line(bench.run(request))
    return DONE


def _eval(args: argparse.Namespace) -> int:
    from megatrain.cli.signals import stopping
    from megatrain.config import Config
    from megatrain.training import run_dir

    target, resume = Path(args.target), None
    if target.is_dir():
        if not run_dir.is_run(target):
            raise ConfigError(
                f"{target} is a folder but not a run; give a configuration or a run's folder (output.dir)"
            )
        from megatrain.training.sampling import find_model

        config = Config.load(target / run_dir.CONFIG, args.settings)
        resume = find_model(target, refusals.best_step(target, args.step) or "last")
    else:
        refusals.step_of_configuration(args.step, target)
        config = Config.load(target, args.settings)
    config.require("data")
    refusals.nothing_held_out(config)
    refusals.before_loading(config)
    stop = Stop()
    with stopping(stop), stop.interruptible():
        from megatrain.training.evaluation import evaluate_sets
        from megatrain.training.progress import eval_sets, held_out
        from megatrain.training.setup import assemble

        parts = assemble(config, folder=None, resume=resume)
        try:
            found = evaluate_sets(parts.engine, refusals.held_out(parts.planned.eval_loaders))
            assert found is not None  # no stop was given to it
        finally:
            parts.close()
    weights = _weights(config, resume)
    answer = {
        "eval_loss": found.total.loss,
        "perplexity": found.total.perplexity,
        "accuracy": found.total.accuracy,
        "tokens": found.total.num_tokens,
        **({"eval_sets": sets} if (sets := eval_sets(found)) else {}),
        "weights": weights,
        "checkpoint": str(resume) if resume else None,
    }
    if args.json:
        json_line(answer)
    else:
        first, *others = held_out(found)
        for text in (f"{first}, of {weights}", *others):
            line(text)
    trained = config.output.dir
    if resume is None and trained is not None and run_dir.is_run(Path(trained)):
        _say(f"these are not the weights that the run in {trained} trained: for those, megatrain eval {trained}")
    return DONE


def _weights(config: "Config", checkpoint: Path | None) -> str:
    """Names the weights that an evaluation measured."""
    if checkpoint is not None:
        return f"the checkpoint {checkpoint}"
    if config.model.path is None or config.model.init != "pretrained":
        return f"an untrained model, drawn at random (train.seed {config.train.seed})"
    return f"the model {config.model.path}"


def _generate(args: argparse.Namespace) -> int:
    refusals.generate(args)
    from megatrain.training.sampling import generate

    pieces = generate(
        args.source,
        args.prompt,
        step=refusals.best_step(Path(args.source), args.step),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        raw=args.raw,
        device=args.device,
    )
    if args.json:
        json_line({"prompt": args.prompt, "text": "".join(pieces)})
        return DONE
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    line()
    return DONE


def _export(args: argparse.Namespace) -> int:
    from megatrain.config import paths

    paths.check_unused(Path(args.out), "OUT")
    refusals.run_folder(Path(args.run))
    from megatrain.checkpoint import checkpoint
    from megatrain.checkpoint.export import export_checkpoint

    run = Path(args.run)
    if (run / "manifest.json").is_file():
        refusals.step_of_checkpoint(args.step, run)
        source = run
    else:
        source = checkpoint.choose(run, refusals.best_step(run, args.step) or "last")
    export_checkpoint(source, args.out, dtype=args.dtype, layout=args.layout)
    json_line({"checkpoint": str(source), "export": args.out}) if args.json else line(f"{source} -> {args.out}")
    return DONE


def _report(args: argparse.Namespace) -> int:
    from megatrain.cli import report
    from megatrain.config import paths
    from megatrain.system.atomic import write_whole
    from megatrain.training.run_dir import REPORT

    runs = [Path(run) for run in args.run]
    out = Path(args.out) if args.out else runs[0] / REPORT
    if args.out:
        paths.check_writable(out, "--out")
    page = report.page(runs, Path(args.trace) if args.trace else None)
    try:
        write_whole(out, page)
    except StorageError as error:
        raise ConfigError(f"{error}; name another file with --out") from None
    json_line({"report": str(out)}) if args.json else line(str(out))
    return DONE


def _init(args: argparse.Namespace) -> int:
    from megatrain.cli.init import write_configuration

    out = write_configuration(args.model, args.data, Path(args.out))
    json_line({"config": str(out)}) if args.json else line(f"{out}: look at it, then megatrain train {out} --dry-run")
    if not args.model.startswith("python:") and not Path(args.model).expanduser().exists():
        _say(f"{args.model} is no folder here, so it will be looked for on the hub")
    return DONE


def _schema(args: argparse.Namespace) -> int:
    from megatrain.cli.json_schema import document
    from megatrain.config import paths
    from megatrain.system.atomic import write_whole

    if not args.out:
        json_line(document())
        return DONE
    paths.check_writable(Path(args.out), "--out")
    write_whole(Path(args.out), json.dumps(document(), indent=2) + "\n")
    json_line({"schema": args.out}) if args.json else line(args.out)
    return DONE


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
