"""In a notebook: progress below the cell, an interrupt that leaves a usable engine, two engines in one process."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.hangs import HANG_SECONDS

pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'megatrain[dev]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'megatrain[dev]'")

import nbformat
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

pytestmark = pytest.mark.filterwarnings("default")  # those of Jupyter's packages are their own

BEGIN = """
import pathlib, signal, threading, torch
import megatrain
from megatrain.errors import ConfigError
from support.reference import batches, build, weights
torch.set_num_threads(1)
folder = pathlib.Path(FOLDER)
build().save_pretrained(folder / "model")
"""

LOAD = """
engine = megatrain.Engine.from_pretrained(str(folder / "model"), device="cpu")
first = engine.step(batches(2)).loss
"""

INTERRUPT = """
threading.Timer(0.7, signal.raise_signal, [signal.SIGINT]).start()
while True:
    engine.step(batches(2))
"""

GO_ON = """
stopped = engine.num_steps
assert stopped > 1
uninterrupted = megatrain.Engine.from_pretrained(str(folder / "model"), device="cpu")
for _ in range(stopped):
    uninterrupted.step(batches(2))
same = all(torch.equal(weights(engine)[name], weight) for name, weight in weights(uninterrupted).items())
pair = [one.step(batches(2)).loss for one in (engine, uninterrupted)]
print(same, pair[0] == pair[1] < first)
"""

FIT = """
(folder / "data.txt").write_text("the quick brown fox jumps over the lazy dog " * 400)
sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128}
result = megatrain.Trainer({
    "model": {"init": "random", "config": sizes, "tokenizer": {"train": "bpe", "vocab_size": 290}},
    "data": {"train": str(folder / "data.txt"), "seq_len": 64},
    "train": {"steps": 5, "batch_tokens": 256},
    "device": "cpu",
    "output": {"dir": str(folder / "run")},
}).fit()
print(result.step)
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells of a notebook that was run in this interpreter."""
    folder = tmp_path_factory.mktemp("notebook")
    write_kernel_spec(str(folder / "kernels" / "python3"))
    sources = [BEGIN.replace("FOLDER", repr(str(folder))), LOAD, INTERRUPT, GO_ON, FIT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(notebook, timeout=HANG_SECONDS, allow_errors=True, kernel_name="python3")
    client.create_kernel_manager()
    client.km.kernel_spec_manager.kernel_dirs = [str(folder / "kernels")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]))
        client.execute()
    return list(notebook.cells)


def text(cell: Any, kind: str) -> str:
    """What a cell has shown, of one kind: stdout, stderr, display_data or error."""
    found = []
    for output in cell.outputs:
        if output.get("name") == kind:
            found.append(output.text)
        elif output.output_type == kind == "display_data":
            found.append(output.data["text/plain"])
        elif output.output_type == kind == "error":
            found.append(f"{output.ename}: {output.evalue}")
    return "\n".join(found)


def test_reading_weights_shows_one_line_that_ends_at_all_of_them(cells: list[Any]) -> None:
    assert not text(cells[0], "error")
    assert not text(cells[1], "error")
    assert text(cells[1], "display_data") == "reading weights 100 %"


def test_an_interrupt_leaves_the_weights_of_a_finished_step_and_two_engines_go_on(cells: list[Any]) -> None:
    assert text(cells[2], "error").startswith("KeyboardInterrupt")
    assert not text(cells[3], "error")
    assert text(cells[3], "stdout").split() == ["True", "True"]


def test_a_run_shows_its_steps_in_one_line(cells: list[Any]) -> None:
    assert not text(cells[4], "error")
    shown = text(cells[4], "display_data").splitlines()
    assert sum(line.startswith("step ") for line in shown) == 1
    assert shown[-1].startswith("step 5/5 ████████████████████████ loss ")
    assert text(cells[4], "stdout").split() == ["5"]
    assert "step 1/5" not in text(cells[4], "stderr")
