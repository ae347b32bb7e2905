"""The examples as people run them, to their end: what they say, what they leave behind, and how long they take.

    python tests/check_examples.py [quickstart] [finetune]

The quickstart is interrupted by Ctrl-C on its way and gone on with by the same command; its loss must end below 0.65 of
the first one. The fine-tuning takes fewer steps than the file says, and its held-out loss must fall. Stock transformers
then loads and continues what each exported. Prints one JSON line an example; exits 1 on a miss.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatrain.training.run_dir import read_metrics
from support.runs import last_step

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICKSTART_RATIO = 0.65
FEWER_STEPS = ("train.steps=12", "eval.every=6", "eval.max_batches=4", "eval.samples.every=6", "output.save_every=6")


def start(config: str, run: Path, *words: str) -> subprocess.Popen[str]:
    """`megatrain train` of an example, with as many threads as there are processors; what it says goes to a file."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".said").open("a") as said:
        command = [sys.executable, "-m", "megatrain", "train", str(EXAMPLES / config), f"output.dir={run}", *words]
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True, env=environment)


def end(process: subprocess.Popen[str], run: Path, code: int) -> None:
    """Waits for it; an exit code other than `code` ends this check with what it said."""
    if process.wait() != code:
        raise SystemExit(f"exit code {process.returncode}, not {code}:\n{run.with_suffix('.said').read_text()[-3000:]}")


def interrupt_after(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Ctrl-C once the run has come to `step`."""
    while last_step(run) < step:
        if process.poll() is not None:
            end(process, run, signal.SIGINT)  # says what went wrong
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)


def continued(folder: Path, prompt: str) -> str:
    """What stock transformers makes of the exported model and a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise SystemExit(f"{folder}: {info}")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(written))


def quickstart(folder: Path) -> dict[str, Any]:
    """From scratch, with an interrupt after 300 steps."""
    run = folder / "quickstart"
    first = start("quickstart.yaml", run)
    interrupt_after(first, run, 300)
    end(first, run, 3)
    stopped = last_step(run)
    end(start("quickstart.yaml", run), run, 0)
    rows = read_metrics(run)
    last = statistics.fmean(row["loss"] for row in rows[-20:])
    held_out = [rows[0]["eval_loss_before"], *(row["eval_loss"] for row in rows if "eval_loss" in row)]
    facts = {
        "stopped_at": stopped,
        "steps": len(rows),
        "loss": [rows[0]["loss"], last],
        "held_out": held_out,
        "of_the_first": last / rows[0]["loss"],
        "held_out_of_the_first": held_out[-1] / held_out[0],
        "wrote": continued(run / "export", "import os\n\ndef "),
    }
    ok = len(rows) == 1000 and [row["step"] for row in rows] == list(range(1, 1001))
    ok &= max(facts["of_the_first"], facts["held_out_of_the_first"]) < QUICKSTART_RATIO
    return {"ok": ok and bool(facts["wrote"]), **facts}


def finetune(folder: Path) -> dict[str, Any]:
    """The real model, for a few steps."""
    run = folder / "finetune"
    end(start("finetune.yaml", run, *FEWER_STEPS), run, 0)
    rows = read_metrics(run)
    held_out = [rows[0]["eval_loss_before"], *(row["eval_loss"] for row in rows if "eval_loss" in row)]
    wrote = continued(run / "export", "What does the documentation say about json.dumps?")
    return {"ok": held_out[-1] < held_out[0] and bool(wrote), "steps": len(rows), "held_out": held_out, "wrote": wrote}


CHECKS = {"quickstart": quickstart, "finetune": finetune}


def main() -> int:
    """0 when both do what they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", choices=[[], *CHECKS])
    ok = True
    with tempfile.TemporaryDirectory() as name:
        for example in parser.parse_args().examples or list(CHECKS):
            started = time.perf_counter()
            facts = CHECKS[example](Path(name))
            ok &= facts["ok"]
            print(
                json.dumps({"example": example, "seconds": round(time.perf_counter() - started), **facts}), flush=True
            )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
