"""Our steps beside their peers on one card, in one command: a JSON line each, then a table.

    python benches/h100.py [--only 3b-32k,7b-64k] [--peers llmq,resident] [--minutes 9] [--gpu-memory 78GiB]
    python benches/h100.py --list

Tokens a second of steps timed as one interval, after warm-up, with as many updates inside it as steps (those of the
step before, where they are hidden beneath the next one's forward); random weights, random tokens, bf16 with fp32
masters and moments, and no plan key but where a row is about state on the host. A ratio holds within one call of this
script only, since machines are shared and differ, so a row's peers run right after ours.
Rows are those of an H100 with 80 GB; on a larger card of its kind `--gpu-memory 78GiB` gives ours as much (peers use
what they use), and every result names the card. What does not end in its own time, or in that of the call, is a line
that says so.

Peers need their packages: LLMQ (`pyllmq`), RoundPipe (`roundpipe`), DeepSpeed (`deepspeed`); liger-kernel is used by
the resident model where it is installed. One that is installed apart runs by `--command PEER=WORDS`, such as
`--command "llmq=/opt/llmq/bin/python"`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import GIVEN_PLAN, MATMUL, PARTS, ROOT, ROWS, SCRIPTS, WHOLE_CARD, Row, select, write_model

LEAST_S = 20.0
"""A measurement is not begun with less time than this."""
PROBE = """
import json, time, torch
cuda = torch.cuda.is_available()
size, device = (8192, "cuda") if cuda else (512, "cpu")
a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
times = []
for i in range(25):
    start = time.perf_counter()
    for _ in range(4):
        a @ b
    if cuda:
        torch.cuda.synchronize()
    times.append((time.perf_counter() - start) / 4)
rate = 2 * size**3 / sorted(times[5:])[10] / 1e12
found = {"card": "cpu", "matmul_tflops": round(rate, 3), "torch": torch.__version__}
if cuda:
    found |= {"card": torch.cuda.get_device_name(), "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1)}
print(json.dumps(found))
"""
"""The card's name, and the rate of a bf16 matrix product of 8192 cubed, the median of 20."""


class Call:
    """One call of this script: its time, its results, and where they are written."""

    def __init__(self, seconds: float, out: Path | None) -> None:
        self.end = time.monotonic() + seconds
        self.out = out
        self.done: dict[str, dict[str, Any]] = {}
        """Answers by command: a peer of two rows is measured once."""

    def line(self, found: dict[str, Any]) -> None:
        """Prints a JSON line, and appends it to results.jsonl."""
        text = json.dumps(found)
        print(text, flush=True)
        if self.out is not None:
            with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def measure(self, row: str, system: str, command: list[str], limit: float) -> dict[str, Any]:
        """The JSON line that a command ends with, or `error`. It is printed with the row's name."""
        key = shlex.join(command)
        if key not in self.done:
            left, start = self.end - time.monotonic(), time.perf_counter()
            if left < LEAST_S:
                self.done[key] = {"error": f"not begun: {max(0.0, left):.0f} s of the call were left"}
            else:
                self.done[key] = self._run(f"{row}-{system}", command, min(limit, left))
            took = {"took_s": round(time.perf_counter() - start, 1)}
            self.line({"row": row, "system": system, **self.done[key], **took})
        return self.done[key]

    def _run(self, name: str, command: list[str], limit: float) -> dict[str, Any]:
        # a group of its own, so that a time that is over ends the workers of a peer too
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=limit)
                found = answer(out)
                if found is None or (process.returncode != 0 and "error" not in found):
                    found = {"error": last_words(err or out) or f"exit code {process.returncode}"}
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                found = {"error": f"not done after {limit:.0f} s"}
        if self.out is not None:
            (self.out / f"{name}.log").write_text(f"{shlex.join(command)}\n{out}\n{err}", encoding="utf-8")
        return found


def answer(out: str) -> dict[str, Any] | None:
    """The last line of an output that is a JSON object; None if there is none."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(line)
                return found
    return None


def last_words(text: str) -> str:
    """The end of what a failed command printed."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-4:])[-700:]


def compared(row: Row, ours: dict[str, Any], others: dict[str, dict[str, Any]], matmul_tflops: float) -> dict[str, Any]:
    """What a row comes to: our speed, its ratio to each peer and to the matmul rate, and what is wanted."""
    found: dict[str, Any] = {"what": row.what, "wanted": row.wanted}
    unmeasured = {name: other["error"] for name, other in others.items() if "error" in other}
    if "error" in ours:
        return found | {"error": ours["error"], "unmeasured": unmeasured}
    ratios = {
        name: round(ours["tokens_s"] / other["tokens_s"], 3) for name, other in others.items() if "error" not in other
    }
    ratios[MATMUL] = round(ours["model_tflops"] / matmul_tflops, 3)
    estimate = ours["plan"]["estimate"]
    return found | {
        "tokens_s": ours["tokens_s"],
        "step_s": ours["step_s"],
        "predicted_s": round(float(estimate.get("expected_step_s", estimate["step_s"])), 5),
        "ratios": ratios,
        "reached": reached(row.wanted, ratios),
        "unmeasured": unmeasured,
        "host_bytes_a_parameter": round(ours["host_anonymous_gib"] * 2**30 / ours["parameters"], 2),
    }


def reached(wanted: dict[str, float], ratios: dict[str, float]) -> bool | None:
    """Whether every ratio is what is wanted; None where one was not measured, or nothing is wanted."""
    if any(name in ratios and ratios[name] < least for name, least in wanted.items()):
        return False
    return True if wanted and wanted.keys() <= ratios.keys() else None


def table(results: dict[str, dict[str, Any]], card: str) -> str:
    """The rows as Markdown."""
    lines = [
        f"| {card} | tokens/s | step, predicted | ratios | wanted | host bytes a parameter |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        if "tokens_s" not in found:
            lines.append(f"| {name}: {found['what']} | {found['error']} | | | | |")
            continue
        ratios = [f"{ratio:.3f} x {peer}" for peer, ratio in found["ratios"].items()]
        ratios += [f"{peer}: {why[:90]}" for peer, why in found["unmeasured"].items()]
        wanted = ", ".join(f"{least} x {peer}" for peer, least in found["wanted"].items())
        lines.append(
            f"| {name}: {found['what']} | {found['tokens_s']:,.0f} | {found['step_s']:.4g}, "
            f"{found['predicted_s']:.4g} s | {'; '.join(ratios)} | {wanted} | {found['host_bytes_a_parameter']} |"
        )
    return "\n".join(lines)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Arguments; ends with a message for a row or a peer that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="ROW,…", help="rows, in this order (default: most; see --list)")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--peers", default=None, metavar="PEER,…", help="only these; empty for none (default: a row's)")
    parser.add_argument("--also", default="", metavar="PEER,…", help="these peers beside those that a row has")
    parser.add_argument("--minutes", type=float, default=9.0, help="the whole call's (default %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=None, metavar="SECONDS", help="of a measurement, for a row's own"
    )
    parser.add_argument("--steps", type=int, default=None, help="timed steps, in place of a row's own")
    parser.add_argument("--gpu-memory", default=None, metavar="SIZE", help="of rows on the whole card, such as 78GiB")
    parser.add_argument(
        "--against", default="", metavar="KEY=VALUE,…", help="also time ours with these plan keys: peer given-plan"
    )
    parser.add_argument(
        "--command", action="append", default=[], metavar="PEER=WORDS", help="what runs a peer, in place of this Python"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="of ours")
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="results.jsonl and every output")
    parser.add_argument("--trace", action="store_true", help="with --out: a trace of one more step of ours")
    arguments = parser.parse_args(words)
    if arguments.trace and arguments.out is None:
        parser.error("--trace needs --out FOLDER, where the traces are written")
    try:
        arguments.rows = select(arguments.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    known = (*SCRIPTS, WHOLE_CARD, GIVEN_PLAN)
    for option in ("peers", "also"):
        text = getattr(arguments, option)
        names = None if text is None else [name.strip() for name in text.split(",") if name.strip()]
        setattr(arguments, option, names)
        unknown = [name for name in names or [] if name not in known]
        if unknown:
            parser.error(f"--{option}: no peer {', '.join(unknown)}; there are {', '.join(known)}")
    arguments.against = tuple(word for word in arguments.against.split(",") if word)
    if wrong := [word for word in arguments.against if "=" not in word]:
        parser.error(f"--against: {wrong[0]!r} is not KEY=VALUE, such as micro_batch=8")
    commands = dict(word.partition("=")[::2] for word in arguments.command)
    if wrong := [name for name, command in commands.items() if name not in SCRIPTS or not command]:
        parser.error(f"--command: {wrong[0]!r} is not PEER=WORDS with one of {', '.join(SCRIPTS)}")
    arguments.command = {name: shlex.split(command) for name, command in commands.items()}
    return arguments


def peers_of(row: Row, arguments: argparse.Namespace) -> list[str]:
    """Peers that a row is compared with in this call."""
    names = [*row.peers, *([GIVEN_PLAN] if arguments.against else []), *arguments.also]
    if arguments.peers is not None:
        names = [name for name in names if name in arguments.peers]
    return list(dict.fromkeys(names))


def run_row(call: Call, name: str, arguments: argparse.Namespace, matmul_tflops: float, models: Path) -> dict[str, Any]:
    """Ours, then each peer."""
    row, place = ROWS[name], write_model(ROWS[name].model, models)
    if arguments.steps is not None:
        row = dataclasses.replace(row, steps=arguments.steps)
    limit, peer_limit = arguments.limit or row.seconds, arguments.limit or row.peer_seconds
    model = str(place) if row.model == "quickstart" else row.model

    def ours(system: str, memory: str | None, plan: tuple[str, ...] = ()) -> dict[str, Any]:
        words = row.ours(model, memory, arguments.device, plan)
        if arguments.trace:
            words += ["--trace", str(arguments.out / f"{name}-{system}.trace.json")]
        return call.measure(name, system, [sys.executable, "-m", "megatrain", *words], limit)

    memory = row.memory or arguments.gpu_memory
    result, others = ours("megatrain", memory), {}
    for peer in peers_of(row, arguments):
        if peer == WHOLE_CARD:
            others[peer] = ours(peer, arguments.gpu_memory)
        elif peer == GIVEN_PLAN:
            others[peer] = ours(peer, memory, arguments.against)
        else:
            command = arguments.command.get(peer, [sys.executable])
            others[peer] = call.measure(name, peer, [*command, *row.peer(peer, str(place))], peer_limit)
    return compared(row, result, others, matmul_tflops)


def main(words: list[str] | None = None) -> None:
    arguments = parse(words)
    if arguments.list:
        for name, row in ROWS.items():
            peers = ", ".join(f"{peer} ({row.wanted[peer]})" if peer in row.wanted else peer for peer in row.peers)
            print(f"{name:22} {row.what}, {' '.join((*row.words, row.memory or ''))}; beside {peers or 'nothing'}")
        return
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    call = Call(arguments.minutes * 60, arguments.out)
    machine = call.measure("machine", "probe", [sys.executable, "-c", PROBE], 60.0)
    if "error" in machine:
        sys.exit(f"the card cannot be used: {machine['error']}")
    card = machine["card"]
    if "H100" not in card:
        card += ", not an H100"
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.rows:
            if name in PARTS:
                call.measure(name, "script", [sys.executable, *(str(ROOT / word) for word in PARTS[name])], 120.0)
                continue
            results[name] = run_row(call, name, arguments, machine["matmul_tflops"], Path(folder))
            memory = ROWS[name].memory or arguments.gpu_memory or "all"
            call.line({"row": name, "card": card, "gpu_memory": memory, **results[name]})
    print("\n" + table(results, card))


if __name__ == "__main__":
    main()
