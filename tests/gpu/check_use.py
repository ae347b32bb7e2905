"""The product as people use it, on a CUDA card: the verbs on the quickstart; a model's folder in, trained, and out.

Run: python tests/gpu/check_use.py [--device cuda|cpu] [--layers 28]. Prints one JSON line a check; exits 1 on a miss.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megatrain

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def say(check: str, ok: bool, **facts: Any) -> bool:
    """One line for a check."""
    print("USE " + json.dumps({"check": check, "ok": ok, **facts}), flush=True)
    return ok


def verb(*words: str) -> tuple[int, str, float]:
    """Exit code, output and seconds of `megatrain …`."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "megatrain", *words], check=False, capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr, round(time.perf_counter() - started, 1)


def verbs(device: str, steps: int) -> bool:
    """`doctor`, `probe`, then a run of the quickstart and what is done with a run; each leaves with 0."""
    ok = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = str(folder / "run")
        short = [f"output.dir={run}", f"device={device}"]
        for words in (
            ("doctor",),
            ("probe", "--out", str(folder / "machine.yaml")),
            ("plan", str(QUICKSTART), *short, f"train.steps={steps}"),
            ("train", str(QUICKSTART), *short, f"train.steps={steps}"),
            ("train", str(QUICKSTART), *short, f"train.steps={steps + 50}"),
            ("eval", run),
            ("generate", run, "import os", "--max-new-tokens", "16"),
            ("export", run, str(folder / "fp32"), "--dtype", "fp32"),
            ("report", run),
            ("doctor", run),
        ):
            code, output, seconds = verb(*words)
            ok &= say(words[0], code == 0, exit=code, seconds=seconds, end=output.strip()[-300:])
        model = AutoModelForCausalLM.from_pretrained(folder / "fp32", local_files_only=True)
        numel = sum(p.numel() for p in model.parameters())
    return ok and say("the export loads", numel > 2_000_000, parameters=numel)


def folder(device: str, layers: int) -> bool:
    """A stock folder read, evaluated, trained and written; stock has the same loss before and after."""
    width = 1536 if device == "cuda" else 64
    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 35 // 6,
        num_attention_heads=width // 32,
        num_key_value_heads=2,
        vocab_size=151936 if device == "cuda" else 256,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (4, 512), generator=generator)
    batch = {"input_ids": ids, "labels": ids}

    def stock_loss(path: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).to(device)
        with torch.no_grad():
            logits = model(input_ids=ids.to(device)).logits[:, :-1].float().flatten(0, 1)
            return float(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten().to(device)))

    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "in", Path(name) / "out"
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(source)
        numel = sum(p.numel() for p in model.parameters())
        del model
        before = stock_loss(source)
        if device == "cuda":
            torch.cuda.empty_cache()
        started = time.perf_counter()
        with megatrain.Engine.from_pretrained(
            str(source),
            optimizer=megatrain.AdamW(lr=1e-4),
            precision="bf16" if device == "cuda" else "fp32",
            device=device,
            memory={"gpu": "8GiB"},
        ) as engine:
            opened = time.perf_counter() - started
            ours_before = engine.evaluate([batch])
            for _ in range(3):
                engine.step([batch])
            ours_after = engine.evaluate([batch])
            started = time.perf_counter()
            engine.save_pretrained(str(out), dtype="bf16")
            written = time.perf_counter() - started
        if device == "cuda":
            torch.cuda.empty_cache()
        after = stock_loss(out)
    ok = abs(before - ours_before) < 2e-3 * before and abs(after - ours_after) < 2e-3 * after and after < before
    return say(
        "folder in and out",
        ok,
        parameters=numel,
        stock=[before, after],
        ours=[ours_before, ours_after],
        opened_s=round(opened, 1),
        written_s=round(written, 1),
    )


def main() -> int:
    """0 when everything holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=28, help="of the model that is read and written")
    parser.add_argument("--steps", type=int, default=200, help="of the quickstart")
    arguments = parser.parse_args()
    return 0 if all([verbs(arguments.device, arguments.steps), folder(arguments.device, arguments.layers)]) else 1


if __name__ == "__main__":
    sys.exit(main())
