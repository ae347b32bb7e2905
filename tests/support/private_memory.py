"""How much private memory it takes to read a folder's weights into a store that is there already."""

import subprocess
import sys
import textwrap
from pathlib import Path

_PRIVATE = """
def private():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024
"""


def output_of(program: str) -> str:
    """What a program prints in a process of its own, where `private()` is its private memory in bytes."""
    result = subprocess.run(
        [sys.executable, "-c", _PRIVATE + textwrap.dedent(program)],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def while_loading(folder: Path) -> tuple[int, int, set[str]]:
    """Most bytes that a process had beyond what it had before, bytes of the largest tensor of the model, and the names
    of what was read; in a process of its own, of two threads."""
    said = output_of(
        f"""
        import threading
        import torch
        from megatrain.models.decoder import Decoder
        from megatrain.weights.loader import load
        from megatrain.weights.source import open_weights, resolve

        torch.set_num_threads(1)

        class Core:
            peak, lock = 0, threading.Lock()

            def write(self, unit, tensor, plane, source, start=0):
                with self.lock:
                    self.peak = max(self.peak, private())

        files = resolve({str(folder)!r})
        source = open_weights(files)
        decoder = Decoder.from_config(files.folder, precision="fp32")
        largest = max(t.dtype.itemsize * torch.Size(t.shape).numel() for t in decoder.tensors.values())
        before = private()
        core = Core()
        found = load(source, decoder, core, threads=2)
        print(core.peak - before, largest, *found)
        """
    )
    peak, largest, *names = said.split()
    return int(peak), int(largest), set(names)
