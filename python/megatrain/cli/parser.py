"""The verbs and their arguments. Only argparse: help and wrong usage answer at once."""

import argparse

_EPILOG = """exit codes: 0 done; 2 wrong request or does not fit; 3 stopped on request, last finished step on disk;
4 the run stopped itself, last good checkpoint named; 130/143 stopped at once by a second signal; 1 a bug of ours"""


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one paragraph and exit code 2, like any other wrong request."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="megatrain",
        description="Full-precision training of language models larger than GPU memory, on one GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    train = _verb(verbs, "train", "train as a configuration says")
    _config(train)
    train.add_argument("--dry-run", action="store_true", help="data, effective config, plan, first batch; no step")

    plan = _verb(verbs, "plan", "what fits, where everything goes, step time and what bounds it; allocates nothing")
    plan.add_argument("target", metavar="CONFIG.yaml|MODEL", help="a configuration, or a model's folder, id or shape")
    plan.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that override the file's"
    )
    plan.add_argument("--machine", metavar="FILE", help="plan for a described machine instead of this one")

    probe = _verb(verbs, "probe", "measure this machine: link, memory, disk, matmul, optimizer; kept per machine")
    probe.add_argument("--out", metavar="FILE", help="also write the description, for plan --machine")

    doctor = _verb(verbs, "doctor", "versions, driver, limits, what is missing; or a run's checksums")
    doctor.add_argument("run", nargs="?", metavar="RUN", help="verify the checkpoints of this run")

    data = _verb(verbs, "data", "rows as the model will see them")
    _config(data)
    data.add_argument(
        "--rows", type=int, default=4, metavar="N", help="rows, or parts of long ones, to show (default 4)"
    )
    data.add_argument("--eval", action="store_true", help="held-out rows instead of training rows")

    _bench(_verb(verbs, "bench", "timed steps on random tokens, one JSON line"))

    evaluate = _verb(verbs, "eval", "held-out loss, no update")
    evaluate.add_argument(
        "target",
        metavar="CONFIG.yaml|RUN",
        help="a run's folder, of which a checkpoint is measured, or a configuration, of which the model that it names",
    )
    evaluate.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that override the file's"
    )
    evaluate.add_argument(
        "--step", default=None, metavar="N|best|last", help="which checkpoint of a run (default last)"
    )

    generate = _verb(verbs, "generate", "sample from a run or a Hugging Face folder")
    generate.add_argument("source", metavar="RUN|DIR")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument(
        "--step",
        default=None,
        metavar="N|best|last",
        help="which checkpoint of a run (default: its export, else the last)",
    )
    generate.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="longest answer, in tokens (default %(default)s)"
    )
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default %(default)s)"
    )
    generate.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="likeliest tokens drawn from (default %(default)s)"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default %(default)s)")
    generate.add_argument("--raw", action="store_true", help="continue the text even when there is a chat template")

    export = _verb(verbs, "export", "write a Hugging Face folder: weights, config, tokenizer, template")
    export.add_argument("run", metavar="RUN")
    export.add_argument("out", metavar="OUT")
    export.add_argument("--step", default=None, metavar="N|best|last", help="which checkpoint (default last)")
    export.add_argument(
        "--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="of the weights (default: the source's)"
    )
    export.add_argument(
        "--layout",
        choices=("source", "library"),
        default="source",
        help="names and shapes of the source's files (default), or transformers' own",
    )

    report = _verb(verbs, "report", "one self-contained HTML page of a run")
    report.add_argument("run", metavar="RUN")
    report.add_argument("--out", metavar="FILE", help="where to write it (default RUN/report.html)")
    return parser


def _verb(verbs: "argparse._SubParsersAction[_Parser]", name: str, purpose: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="answer for programs: JSON on standard output")
    return parser


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that override the file's"
    )


def _bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--model",
        default="qwen2.5-0.5b",
        metavar="NAME|CONFIG",
        help="a public shape (qwen2.5-0.5b … qwen2.5-72b, tiny), a config.json or a model's folder, or a configuration "
        "or a run, of which the model section",
    )
    bench.add_argument("--batch", type=int, default=8, metavar="ROWS", help="rows a step (default 8)")
    bench.add_argument("--seq", type=int, default=1024, metavar="TOKENS", help="tokens a row (default 1024)")
    bench.add_argument("--micro-batch", type=int, default=None, metavar="ROWS", help="rows computed at once")
    bench.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps, as one interval (default 10)")
    bench.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before them (default 2)")
    bench.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    bench.add_argument("--gpu-memory", default=None, metavar="SIZE", help="device budget, like 12GiB")
    bench.add_argument("--host-memory", default=None, metavar="SIZE", help="host budget, like 100GiB")
    bench.add_argument("--update", choices=("just_in_time", "immediate"), default="just_in_time")
    bench.add_argument(
        "--max-grad-norm",
        type=float,
        default=None,
        metavar="NORM",
        help="clip by global norm (default: no clipping here, while train and Engine clip at 1.0)",
    )
    bench.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    bench.add_argument("--keep", type=int, default=None, metavar="N", help="layers whose activations are kept")
    bench.add_argument("--slots", type=int, default=None, metavar="N")
    bench.add_argument("--lr", type=float, default=1e-5)
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument(
        "--set",
        dest="plan",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other key of a configuration's plan section, such as loss_chunk=4096 or activation=offload",
    )
    bench.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace of one more step")
