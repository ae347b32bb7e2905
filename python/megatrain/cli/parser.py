"""The verbs and their arguments. Only argparse is imported: help and wrong usage answer at once."""

import argparse
import re

from megatrain.cli import exit_codes
from megatrain.names import nearest
from megatrain.system import descriptions


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one paragraph with exit code 2, like any other wrong request."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(exit_codes.REFUSED, f"{self.prog}: {message}{self._meant(message)}; see {self.prog} --help\n")

    def _meant(self, message: str) -> str:
        """The verb or option that is most like the one refused in `message`."""
        refused = re.search(r"(?:invalid choice:|unknown argument) '([^'=]*)", message)
        known = [*self._option_string_actions]
        for action in self._actions:
            known += action.choices if isinstance(action, argparse._SubParsersAction) else ()
        meant = nearest(refused[1], known) if refused else None
        return f"; did you mean {meant}?" if meant else ""

    def of_verb(self, verb: str | None) -> "_Parser":
        """The parser of a verb's own arguments; this one for none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and verb in action.choices:
                found: _Parser = action.choices[verb]
                return found
        return self


def build() -> _Parser:
    """The whole command line."""
    parser = _Parser(
        prog="megatrain",
        description="Full-precision training of language models larger than GPU memory, on one GPU.",
        epilog=exit_codes.TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    train = _verb(verbs, "train", "train as a configuration describes")
    _config(train)
    train.add_argument(
        "--dry-run", action="store_true", help="show data, effective configuration, first batch and plan; take no step"
    )
    _verbose(train, "with --dry-run: the plan item by item")

    plan = _verb(verbs, "plan", "whether it fits, what goes where, step time and what bounds it; allocates nothing")
    plan.add_argument(
        "target", metavar="CONFIG.yaml|MODEL", help="a configuration; or a model's folder, hub id or public shape"
    )
    plan.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that override the file's"
    )
    plan.add_argument(
        "--machine",
        metavar="FILE|NAME|KEY=VALUE[,KEY=VALUE…]",
        help="plan for a machine described in a file instead of this one; or for one by the name of its card, such as "
        "rtx4090 or h100; or by its numbers, which may follow a file or a name, such as "
        "rtx4090,host.memory=256GiB,disk.count=2,disk.free=4TB (keys below)",
    )
    plan.epilog = f"{descriptions.key_help()}\n\n{exit_codes.TEXT}"
    plan.add_argument("--picture", metavar="FILE.svg", help="draw the lanes of a step, as predicted")
    _verbose(plan, "every item, the lanes, plans not chosen, the lower bound of the step time, and the numerics key")

    probe = _verb(
        verbs, "probe", "measure this machine (link, memory, disk, matmul, optimizer) so that plans use its rates"
    )
    probe.add_argument("--out", metavar="FILE", help="also write a description of the machine, for plan --machine")
    probe.add_argument(
        "--state",
        action="append",
        metavar="DIR",
        help="measure this folder as a place for optimizer state (memory.nvme.path; may be given several times; "
        "default: the working folder)",
    )

    doctor = _verb(verbs, "doctor", "check the installation and the machine; or the checksums of a run's checkpoints")
    doctor.add_argument("run", nargs="?", metavar="RUN", help="verify the checkpoints of this run, or one checkpoint")

    data = _verb(verbs, "data", "show rows as the model will see them")
    _config(data)
    data.add_argument(
        "--rows", type=int, default=4, metavar="N", help="how many rows, or parts of long rows, to show (default 4)"
    )
    data.add_argument("--eval", action="store_true", help="show held-out rows instead of training rows")

    _bench(_verb(verbs, "bench", "time steps on random tokens; prints one JSON line"))

    evaluate = _verb(verbs, "eval", "measure the held-out loss; updates nothing")
    evaluate.add_argument(
        "target",
        metavar="CONFIG.yaml|RUN",
        help="a run's folder, to measure one of its checkpoints; or a configuration, to measure the model it names",
    )
    evaluate.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that override the file's"
    )
    evaluate.add_argument(
        "--step", default=None, metavar="N|best|last", help="which checkpoint of the run (default last)"
    )

    generate = _verb(verbs, "generate", "generate text with a run or a Hugging Face folder")
    generate.add_argument("source", metavar="RUN|DIR", help="a run, or a Hugging Face folder")
    generate.add_argument("prompt", metavar="PROMPT", help="the text to continue, or to answer with a chat template")
    generate.add_argument(
        "--step",
        default=None,
        metavar="N|best|last",
        help="which checkpoint of the run (default: its export, or the last checkpoint where that is newer)",
    )
    generate.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="longest answer, in tokens (default %(default)s)"
    )
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always takes the likeliest token (default %(default)s)",
    )
    generate.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="probability mass of the likeliest tokens to draw from (default %(default)s)",
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the random draws (default %(default)s)")
    generate.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="where it computes (default: the card, where the model fits there)",
    )
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text even when there is a chat template"
    )

    export = _verb(verbs, "export", "write a Hugging Face folder: weights, config, tokenizer, template")
    export.add_argument("run", metavar="RUN", help="a run's folder, or one checkpoint")
    export.add_argument("out", metavar="OUT", help="the folder to write")
    export.add_argument("--step", default=None, metavar="N|best|last", help="which checkpoint (default last)")
    export.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="number type of the weights (default: that of compute)",
    )
    export.add_argument(
        "--layout",
        choices=("source", "library"),
        default="source",
        help="tensor names and shapes as in the source's files (default), or as transformers has them",
    )

    report = _verb(verbs, "report", "write one self-contained HTML page about a run, or about several side by side")
    report.add_argument("run", metavar="RUN", nargs="+", help="the folder of a run")
    report.add_argument("--out", metavar="FILE", help="where to write it (default: report.html in the first run)")
    report.add_argument(
        "--trace",
        metavar="FILE",
        help="a trace of megatrain bench --trace, for the timeline of a step (default: trace.json in a run, if any)",
    )

    init = _verb(verbs, "init", "write a commented configuration to start from")
    init.add_argument("model", metavar="MODEL", help="a model's folder, a .gguf file or a hub id")
    init.add_argument("data", metavar="DATA", help="training data: a file, a folder or a pattern such as data/*.jsonl")
    init.add_argument("--out", default="train.yaml", metavar="FILE", help="where to write it (default %(default)s)")

    schema = _verb(verbs, "schema", "print a JSON Schema of the configuration, for editors")
    schema.add_argument("--out", metavar="FILE", help="write it to a file instead")
    return parser


def _verb(verbs: "argparse._SubParsersAction[_Parser]", name: str, purpose: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=exit_codes.TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON on standard output, for programs")
    return parser


def _verbose(parser: argparse.ArgumentParser, shows: str) -> None:
    parser.add_argument("--verbose", action="store_true", help=shows)


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", help="the configuration")
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that override the file's"
    )


def _bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--model",
        default="qwen2.5-0.5b",
        metavar="NAME|CONFIG",
        help="a public shape (qwen2.5-0.5b … qwen2.5-72b, tiny), a config.json or a model's folder, or the model "
        "section of a configuration or a run",
    )
    bench.add_argument("--batch", type=int, default=8, metavar="ROWS", help="rows per step (default 8)")
    bench.add_argument("--seq", type=int, default=1024, metavar="TOKENS", help="tokens per row (default 1024)")
    bench.add_argument(
        "--micro-batch",
        type=int,
        default=None,
        metavar="ROWS",
        help="rows computed at a time (default: as the plan decides)",
    )
    bench.add_argument(
        "--steps", type=int, default=10, metavar="N", help="steps that are timed, as one interval (default 10)"
    )
    bench.add_argument(
        "--warmup",
        type=int,
        default=3,
        metavar="N",
        help="untimed steps before those (default %(default)s: the first compiles, the third captures CUDA graphs)",
    )
    bench.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    bench.add_argument("--gpu-memory", default=None, metavar="SIZE", help="most device memory, such as 12GiB")
    bench.add_argument("--host-memory", default=None, metavar="SIZE", help="most host memory, such as 100GiB")
    bench.add_argument("--update", choices=("just_in_time", "immediate"), default="just_in_time")
    bench.add_argument(
        "--max-grad-norm",
        type=float,
        default=None,
        metavar="NORM",
        help="clip by global norm (default: no clipping here, while train and Engine clip at 1.0)",
    )
    bench.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    bench.add_argument(
        "--matmul", choices=("bf16", "fp8"), default="bf16", help="in what linear layers multiply (default %(default)s)"
    )
    bench.add_argument(
        "--keep",
        type=int,
        default=None,
        metavar="N",
        help="units of layers (whole, or halves) that keep their activations instead of recomputing them",
    )
    bench.add_argument(
        "--slots", type=int, default=None, metavar="N", help="device buffers that layers pass through, one unit in each"
    )
    bench.add_argument("--lr", type=float, default=1e-5, metavar="RATE", help="learning rate (default %(default)s)")
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default %(default)s)")
    bench.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other key of a configuration's plan section, such as loss_chunk=4096, or with its section's name "
        "one of train or memory, such as train.moments=8bit or 'memory.nvme={path: /mnt/nvme}'",
    )
    bench.add_argument(
        "--trace", metavar="FILE", help="also run one more step and write its trace, for Chrome or Perfetto"
    )
