"""A run whose paths are all local never looks for a network, whatever the environment says of one."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.config import Config
from support.hangs import HANG_SECONDS
from support.reference import build
from support.runs import MODEL, settings
from support.tiny_tokenizer import tiny_tokenizer

RECORDED = """
    import json, socket, sys

    attempts = []

    def seen(name, args):
        # raised below Python's functions, so that nobody's own way to a socket goes past it
        if name in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
            attempts.append(f"{name} {args[1:]}")

    sys.addaudithook(seen)

    def recorded(name, original):
        def call(*args, **kwargs):
            attempts.append(f"{name} {args[1:]}")
            return original(*args, **kwargs)
        return call

    socket.socket.connect = recorded("connect", socket.socket.connect)
    socket.getaddrinfo = recorded("getaddrinfo", socket.getaddrinfo)

    from megatrain.cli import main

    status = [main(words) for words in json.loads(sys.argv[1])]
    network = list(attempts)
    try:
        socket.getaddrinfo("localhost", 1)
    except OSError:
        pass
    print(json.dumps({"status": status, "attempts": network, "recorder works": len(attempts) > len(network)}))
"""


def test_a_run_of_a_local_model_and_local_rows_attempts_no_network_call(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    build(**{k: v for k, v in MODEL.items() if k != "model_type"}, vocab_size=len(tokenizer)).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    plain = settings(tmp_path, output={"dir": str(tmp_path / "run"), "export": "auto"}, eval={"at_start": True})
    config = Config.of(plain | {"model": {"path": str(tmp_path / "model")}})
    file, run = tmp_path / "config.yaml", str(tmp_path / "run")
    file.write_text(config.to_yaml())
    verbs = [
        ["train", str(file), "--dry-run"],
        ["train", str(file), "train.steps=3"],
        ["train", str(file)],
        ["eval", run],
        ["generate", run, "the quick", "--max-new-tokens", "2"],
        ["export", run, str(tmp_path / "out")],
    ]
    told = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in told}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RECORDED), json.dumps(verbs)],
        env=environment | {"HF_HOME": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"status": [0] * len(verbs), "attempts": [], "recorder works": True}, done.stderr


def test_a_plan_of_a_model_on_the_hub_fetches_its_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append((name, revision, allow_patterns))
        (tmp_path / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 300}))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert main(["plan", "OWNER/NAME", "model.revision=older", "device=cpu", "data.seq_len=32"]) == 0
    assert fetched == [("OWNER/NAME", "older", ["config.json", "*.py"])]
    assert "fits: 28," in capsys.readouterr().out
