"""Plans of large models on machines that one does not have, as a table: what fits, where it goes, how long a step
takes, and how to make the others fit.

    python benches/machines.py [--only 70b] [--json FILE]

Nothing is measured and nothing allocated: `megatrain plan` makes each plan from the shape of the model and the numbers
of the machine, with the rates of the card's data sheet. A step has 65,536 tokens in sequences of 4,096 unless the
settings of a way say otherwise. Of a model that does not fit, each way that the refusal names is planned in turn.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from transformers import GptOssConfig, LlamaConfig, Qwen2Config

from megatrain.config import Config, yaml12
from megatrain.models.presets import SHAPES
from megatrain.planning.remedies import Refusal, Way
from megatrain.system import descriptions
from megatrain.system.hardware import Machine, format_bytes
from megatrain.training import forecast, plan_summary

LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": SHAPES["qwen2.5-7b"].config(),
    "Qwen2.5-14B": SHAPES["qwen2.5-14b"].config(),
    "Qwen2.5-72B": Qwen2Config(
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=29568,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=152064,
        max_position_embeddings=131072,
    ).to_dict(),
    "Llama-3-70B": LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, **LLAMA
    ).to_dict(),
    "dense 120B": LlamaConfig(
        num_hidden_layers=88, hidden_size=10240, intermediate_size=35840, num_attention_heads=80, **LLAMA
    ).to_dict(),
    "gpt-oss-120b": GptOssConfig(
        num_hidden_layers=36, num_local_experts=128, num_experts_per_tok=4, hidden_size=2880, intermediate_size=2880
    ).to_dict(),
    "Llama-3.1-405B": LlamaConfig(
        num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128, **LLAMA
    ).to_dict(),
}
DRIVES = "disk.count={},disk.free=2TB,disk.read_gbs=5,disk.write_gbs=4"
"""PCIe 4 drives that are read and written at once."""
RTX4090 = "gpu.name=RTX 4090,gpu.memory=24GiB,gpu.capability=8.9,host.cpus=16,host.memory={}GiB"
RTX4080 = "gpu.name=RTX 4080,gpu.memory=16GiB,gpu.capability=8.9,host.cpus=16,host.memory={}GiB,rates.matmul_tflops=63"
H200 = "gpu.name=H200,gpu.memory=139.8GiB,host.cpus=64,host.memory={}GiB"
CASES: list[tuple[str, str]] = [
    ("Qwen2.5-7B", f"{RTX4090.format(32)},{DRIVES.format(1)}"),
    ("Qwen2.5-14B", f"{RTX4080.format(64)},{DRIVES.format(1)}"),
    ("Qwen2.5-14B", f"{RTX4080.format(128)},{DRIVES.format(1)}"),
    ("Qwen2.5-14B", f"{RTX4090.format(64)},{DRIVES.format(1)}"),
    ("Qwen2.5-14B", f"{RTX4090.format(128)},{DRIVES.format(1)}"),
    ("Llama-3-70B", f"{RTX4090.format(256)},{DRIVES.format(2)}"),
    ("Qwen2.5-72B", f"{RTX4090.format(256)},{DRIVES.format(2)}"),
    ("dense 120B", H200.format(1500)),
    ("gpt-oss-120b", H200.format(1500)),
    ("Llama-3.1-405B", H200.format(8000)),
]


def planned(model: str, machine: Machine, settings: str = "") -> forecast.Forecast:
    """The forecast of a case. Raises Refusal where it does not fit."""
    tree: dict[str, Any] = {"model": {"config": MODELS[model]}, "device": "cuda"}
    for word in settings.split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = yaml12.load(value, key)
    return forecast.without_data(Config.of(tree), machine)


def taken(model: str, machine: Machine, way: Way) -> forecast.Forecast:
    """The forecast of a case on which one of its ways is taken."""
    on = descriptions.from_words(way.machine.split(","), machine, machine.name) if way.machine else machine
    return planned(model, on, way.settings)


def row(report: forecast.Forecast) -> dict[str, Any]:
    """What one line of the table says."""
    totals, disk = report.run_plan.plan["totals"], report.state_on_disk
    items = report.run_plan.plan["items"]
    return {
        "parameters": report.decoder.num_parameters,
        "step_tokens": report.step_tokens,
        "totals": totals,
        "groups": {tier: plan_summary.memory_groups(items, (tier,)) for tier in ("device", "host", "disk")},
        "step_s": report.expected_step_s,
        "tokens_per_s": report.expected_tokens_per_s,
        "bound": report.bound,
        "disk_read_a_step": 0 if disk is None else disk.bytes_read,
        "disk_written_a_step": 0 if disk is None else disk.bytes_written,
        "wear_a_day": 0 if disk is None else disk.bytes_written_a_day,
    }


def case(model: str, words: str) -> dict[str, Any]:
    """A model on a machine: its row, or its ways to fit with a row each."""
    machine, start = descriptions.from_words(words.split(","), None, words), time.perf_counter()
    found: dict[str, Any] = {"model": model, "machine": words, "ways": []}
    try:
        report = planned(model, machine)
        found["plan_s"] = time.perf_counter() - start
        found["fits"] = row(report)
    except Refusal as error:
        found["missing"] = str(error).partition("\n")[0].removeprefix("this does not fit: ")
        found["plan_s"] = time.perf_counter() - start
        found["ways"] = [{"way": str(way), **row(taken(model, machine, way))} for way in error.ways]
    return found


def short(words: str) -> str:
    """A machine in a few words."""
    given = dict(word.split("=") for word in words.split(","))
    drives = f", {given['disk.count']} NVMe" if "disk.count" in given else ""
    return f"{given['gpu.name']} {given['gpu.memory']}, host {given['host.memory']}{drives}"


def line(name: str, found: dict[str, Any]) -> str:
    """A line of the Markdown table."""
    totals = found["totals"]
    largest = "; ".join(
        f"{tier}: " + ", ".join(f"{what} {format_bytes(size)}" for what, size in list(groups.items())[:3])
        for tier, groups in found["groups"].items()
        if groups
    )
    read, written = (format_bytes(found[f"disk_{way}_a_step"]) for way in ("read", "written"))
    traffic = f"{read} each way" if read == written else f"{read} read, {written} written"
    traffic = traffic if found["disk_read_a_step"] else "–"
    wear = f"{format_bytes(found['wear_a_day'])}" if found["wear_a_day"] else "–"
    cells = [
        name,
        *(format_bytes(totals[tier]) if totals[tier] else "–" for tier in ("device", "host", "disk")),
        f"{found['step_tokens']:,}",
        f"{found['step_s']:.3g} s",
        f"{found['tokens_per_s']:,.0f}" if found["tokens_per_s"] >= 10 else f"{found['tokens_per_s']:.1f}",
        found["bound"],
        traffic,
        wear,
        largest,
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| model and machine, or way to fit | card | host | disk | tokens a step | step | tokens/s | bound by | "
    "disk per step | written per day | largest parts |\n" + "|---|" + "---|" * 10
)


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose model or machine has this in its name")
    parser.add_argument("--json", metavar="FILE", help="also write every byte")
    args = parser.parse_args()
    everything = []
    print(HEAD)
    for model, words in CASES:
        if args.only.lower() not in f"{model},{words}".lower():
            continue
        found = case(model, words)
        everything.append(found)
        name = f"**{model}**, {short(words)}"
        if "fits" in found:
            print(line(f"{name}: fits", found["fits"]))
        else:
            print(f"| {name}: does not fit: {found['missing']} |" + " |" * 10)
            for way in found["ways"]:
                print(line(f"– {way['way'].partition('  (')[0]}", way))
        print(f"{model}: planned in {found['plan_s']:.1f} s", file=sys.stderr, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
