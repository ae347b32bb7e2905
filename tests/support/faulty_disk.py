"""Runs statements in a process whose disk is watched, and fails on request (`faulty_disk.c`)."""

import subprocess
import sys
import textwrap
from pathlib import Path

from support.hangs import HANG_SECONDS

SOURCE = Path(__file__).with_suffix(".c")

_HEAD = """
import ctypes, os, shutil, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from megatrain.checkpoint import checkpoint
from megatrain.errors import CheckpointError, StorageError
from support.resume import batches, same, started, state
folder = Path({folder!r})
place = folder / "run" / "checkpoints"
disk = ctypes.CDLL(None)
disk.disk_operations.restype = disk.disk_reads.restype = ctypes.c_long

def arm(kill_after=-1, room=-1, delay=0, fsync=0):
    disk.disk_arm(*map(ctypes.c_long, (kill_after, room, delay, fsync)))

def fail(number, error):
    disk.disk_fail(ctypes.c_long(number), ctypes.c_long(error))

def spoil_read(number, how):
    disk.disk_spoil_read(ctypes.c_long(number), ctypes.c_long(how))

def record(file, watched):
    disk.disk_watch(str(watched).encode())
    disk.disk_record(str(file).encode())

def hold(on):
    disk.disk_hold(ctypes.c_long(on))

def kill_at(call, path):
    disk.disk_kill_at(call.encode(), path.encode())

def mark(text):
    disk.disk_mark(text.encode())
"""


def build(folder: Path) -> Path:
    """The library that stands between a process and its disk."""
    library = folder / "faulty_disk.so"
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O2"]
    subprocess.run(["gcc", *options, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def run(library: Path, folder: Path, body: str, *, timeout: int = HANG_SECONDS) -> str:
    """Runs statements and returns what they print. They find `folder`, `place` (the checkpoints of a run in it) and the
    functions above."""
    paths = ":".join([str(Path(__file__).parents[1]), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", _HEAD.format(folder=str(folder)) + textwrap.dedent(body)],
        env={"PYTHONPATH": paths, "PATH": "", "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
