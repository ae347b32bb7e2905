"""One function a verb: reads its arguments, calls the module that does the work, shows the answer."""

import argparse
import sys
from pathlib import Path

from megatrain.cli.output import json_line, line, table
from megatrain.errors import ConfigError

DONE, REFUSED, STOPPED = 0, 2, 3


def run(args: argparse.Namespace) -> int:
    """Runs the verb in `args`; returns its exit code."""
    import os

    processes = os.environ.get("WORLD_SIZE", "1")
    if args.verb in ("train", "bench", "eval") and processes not in ("", "1"):
        raise ConfigError(f"WORLD_SIZE is {processes}: more than one process is not supported yet; start a single one")
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
    }[args.verb]
    return verb(args)


def _probe(args: argparse.Namespace) -> int:
    from megatrain import machine as facts
    from megatrain import probe

    machine = facts.read(Path.cwd())
    device = "cuda" if machine.gpu is not None else "cpu"
    found = probe.measure(machine, device, Path.cwd(), lambda what: _say(f"measuring: {what}"))
    kept = probe.keep(machine, device, found)
    if args.out:
        probe.write_description(machine, found, Path(args.out))
    if args.json:
        json_line({"machine": facts.describe(machine) | {"rates": found}, "kept": str(kept) if kept else None})
    else:
        table(("rate", ">value", "unit"), [(key, f"{value:.3g}", probe.UNITS[key]) for key, value in found.items()])
        line(f"kept in {kept}" if kept else "not kept")
    return DONE


def _doctor(args: argparse.Namespace) -> int:
    if args.run is not None:
        return _verify(args)
    from megatrain import doctor

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


def _report(args: argparse.Namespace) -> int:
    from megatrain import report
    from megatrain.run_folder import replace

    run = Path(args.run)
    page = report.page(run)
    out = Path(args.out) if args.out else run / "report.html"
    try:
        replace(out, page)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; name another file with --out") from None
    json_line({"report": str(out)}) if args.json else line(str(out))
    return DONE


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
