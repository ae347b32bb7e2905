"""The command line: help and refusals at once and without torch, one paragraph each, exit codes as documented."""

import errno
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatrain import errors
from megatrain.cli import commands, main
from megatrain.training.stop import RunStopped, StopRequested
from support.hangs import HANG_SECONDS

VERBS = ("train", "plan", "probe", "doctor", "data", "bench", "eval", "generate", "export", "report", "init", "schema")

GOOD = """
model:
  config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
           intermediate_size: 128, vocab_size: 512, max_position_embeddings: 128, tie_word_embeddings: true}
  tokenizer: {train: bpe, vocab_size: 512}
data: {train: rows.jsonl, seq_len: 32}
train: {steps: 2, batch_size: 2}
output: {dir: run}
"""


def in_a_process(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a shell would; the process fails when torch or transformers was loaded."""
    program = textwrap.dedent("""
        import sys
        from megatrain.cli import main
        code = 1
        try:
            code = main(sys.argv[1:])
        except SystemExit as leave:
            code = leave.code
        heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
        if heavy:
            print("loaded:", heavy, file=sys.stderr)
            code = 99
        sys.exit(code)
    """)
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=HANG_SECONDS,
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_of_every_verb_answers_without_torch(words: list[str]) -> None:
    done = in_a_process(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if words[0] != "--version":
        assert "exit codes: 0 done" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage"),
        (["trian"], "trian"),
        (["train"], "CONFIG.yaml"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["train", "good.yaml", "train.lrr=1"], "train.lr"),
        (["train", "good.yaml", "--fast"], "--fast"),
        (["train", "good.yaml", "--verbose"], "add --dry-run"),
        (["train", "good.yaml", "device=cuda"], "device"),
        (["plan", "missing.yaml"], "missing.yaml"),
        (["plan", "qwen2.5-0.5b", "--machine", "nowhere.yaml"], "nowhere.yaml"),
        (["data", "good.yaml", "--eval"], "data.eval"),
        (["eval", "good.yaml"], "data.eval"),
        (["eval", "."], "run"),
        (["report", "."], "metrics.jsonl"),
        (["bench", "--set", "chunk"], "KEY=VALUE"),
        (["bench", "--model", "nosuch"], "neither a public shape"),
        (["bench", "--model", "hollow"], "neither a public shape"),
        (["bench", "--steps", "0"], "time at least one step"),
        (["bench", "--set", "train.lrr=1"], "train.lr"),
        (["bench", "--device", "cuda"], "device"),
        (["bench", "--set", "train.check_every=1"], "no step is computed twice; leave it out"),
        (["bench", "--set", "data.seq_len=8"], "sections train, memory and plan"),
        (["train", "good.yaml", "data.train=gone.jsonl"], "gone.jsonl: there is no such file or folder"),
        (["train", "good.yaml", "data.train=empty.jsonl"], "empty.jsonl is empty"),
        (["train", "good.yaml", "data.eval=gone.txt"], "gone.txt: there is no such file or folder"),
        (["train", "good.yaml", "data.train=gone*.parquet"], "no file matches"),
        (["train", "good.yaml", "model.tokenizer=hollow"], "holds no tokenizer"),
        (["train", "good.yaml", "model.path=hollow"], "holds no model"),
        (["train", "good.yaml", "model.path=good.yaml"], "name the folder that it is in"),
        (["train", "good.yaml", "model.chat_template=gone.jinja"], "gone.jinja cannot be read"),
        (["train", "good.yaml", "output.resume=gone"], "output.resume: there is no folder"),
        (["train", "good.yaml", "output.dir=good.yaml/run"], "good.yaml is a file"),
        (["train", "good.yaml", "output.dir=own"], "config.yaml' in it is not a run's"),
        (["train", "good.yaml", "--dry-run", "data.train=gone.jsonl"], "gone.jsonl"),
        (["data", "good.yaml", "data.train=gone.jsonl"], "gone.jsonl"),
        (["eval", "good.yaml", "data.train=gone.jsonl", "data.eval=0.1"], "gone.jsonl"),
        (["probe", "--out", "gone/machine.yaml"], "there is no folder"),
        (["probe", "--out", "hollow"], "is a folder"),
        (["bench", "--trace", "gone/trace.json"], "there is no folder"),
        (["generate", "gone", "x"], "there is no folder 'gone'"),
        (["generate", "hollow", "x", "--top-p", "2"], "top_p in (0, 1]"),
        (["export", "gone", "out"], "there is no folder gone"),
        (["export", "hollow", "own"], "is not empty"),
        (["export", "hollow", "good.yaml/out"], "good.yaml is a file"),
        (["doctor", "gone"], "there is no folder gone"),
        (["report", "hollow", "--out", "gone/page.html"], "there is no folder"),
        (["init", "hollow", "rows.jsonl"], "holds no model"),
        (["init", "OWNER/NAME", "gone.jsonl"], "gone.jsonl: there is no such file or folder"),
        (["init", "OWNER/NAME", "rows.jsonl", "--out", "good.yaml"], "--out good.yaml exists already"),
        (["init", "OWNER/NAME", "rows.jsonl", "--out", "gone/new.yaml"], "there is no folder"),
        (["schema", "--out", "hollow"], "is a folder"),
    ],
)
def test_a_wrong_request_is_refused_at_once_with_exit_code_2(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.yaml").write_text("mine: all mine\n")
    if {"device=cuda", "cuda"} & set(words) and _has_a_card():
        pytest.skip("this machine has a card, so asking for it is right")
    before = sorted(tmp_path.rglob("*"))
    done = in_a_process(*words, cwd=tmp_path)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert said in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before, "a refusal leaves nothing behind"


@pytest.mark.parametrize("words", [["train", "gone.yaml"], ["plan", "gone"], ["bench", "--model", "gone"]])
def test_with_json_a_refusal_is_the_answer(tmp_path: Path, words: list[str]) -> None:
    done = in_a_process(*words, "--json", cwd=tmp_path)
    assert done.returncode == 2, (done.returncode, done.stderr)
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == 2
    assert "gone" in answer["error"]
    assert answer["error"] in done.stderr


def _has_a_card() -> bool:
    from megatrain.system import hardware

    return hardware.read().gpu is not None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("train:", "trian:"), "train"),
        (("steps: 2", "stpes: 2"), "train.steps"),
        (("data: {", "data: {lr: 1.0, "), "train.lr"),
        (("steps: 2", "steps: two"), "train.steps"),
        (("steps: 2", "steps: 2, steps: 3"), "steps"),
        (("train: {", "memory: {nvme: {paht: x, size: 1GiB}}\ntrain: {"), "memory.nvme.path"),
        (("steps: 2", "moments: 4bit, steps: 2"), "train.moments"),
        (("steps: 2", "update: immediate, steps: 2"), "max_grad_norm"),
    ],
)
def test_a_typo_or_contradiction_names_key_section_and_the_nearest_name(
    tmp_path: Path, changed: tuple[str, str], said: str
) -> None:
    assert changed[0] in GOOD
    (tmp_path / "bad.yaml").write_text(GOOD.replace(*changed))
    done = in_a_process("train", "bad.yaml", cwd=tmp_path)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert said in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 or "settings are wrong" in lines[0], "one sentence, or one line for each setting"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_more_than_one_process_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    monkeypatch.setenv(variable, "2")
    assert main(["train", str(tmp_path / "good.yaml")]) == 2
    assert f"{variable} is 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (errors.ConfigError("no"), 2),
        (errors.DoesNotFit("no"), 2),
        (errors.CheckpointError("no"), 2),
        (errors.DeviceError("no"), 2),
        (errors.StorageError("no"), 2),
        (errors.EngineBroken("no"), 4),
        (RunStopped("no"), 4),
        (StopRequested("SIGTERM"), 3),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
        (OSError(errno.ENOSPC, "No space left on device", "/data/file"), 4),
        (OSError(errno.ENOSPC, "No space left on device"), 4),
        (OSError(errno.EACCES, "Permission denied", "/data/file"), 2),
        (MemoryError(), 4),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"), 4),
    ],
)
def test_every_kind_of_failure_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int
) -> None:
    def fail(_: object) -> int:
        raise raised

    monkeypatch.setattr(commands, "_report", fail)
    if not isinstance(raised, BrokenPipeError):
        assert main(["report", "anything"]) == code
        assert "Traceback" not in capsys.readouterr().err


def test_an_unexpected_exception_is_called_a_bug_of_ours_and_its_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(commands, "_report", fail)
    assert main(["report", "anything"]) == 1
    said = capsys.readouterr().err
    assert "a bug of ours" in said
    assert "by accident" in said
    path = Path(said.split("The traceback is in ")[1].split(";")[0])
    assert "fail" in path.read_text()
    path.unlink()


def test_a_json_answer_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert {finding["what"] for finding in json.loads(out)["findings"]} >= {"Python", "torch", "native core"}


def test_settings_may_follow_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    assert main(["train", str(tmp_path / "good.yaml"), "--dry-run", "train.lrr=1"]) == 2
    assert "train.lr" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan", "tiny"], ["plan", "tiny", "--json"], ["doctor"]])
def test_an_answer_that_cannot_be_written_is_no_bug_of_ours(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megatrain", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (
        2,
        f"megatrain {words[0]}: standard output cannot be written: No space left on device\n",
    )


def test_outputs_that_are_closed_get_nothing() -> None:
    program = "import sys; from megatrain.cli import main; sys.exit(main())"
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        command = f"exec {sys.executable} -c '{program}' plan tiny {closed}"
        assert subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == 0, closed


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian", "x.yaml"], "train"),
        (["train", "x.yaml", "--dryrun"], "--dry-run"),
        (["bench", "--sequence=3"], "--seq"),
    ],
)
def test_a_typo_in_a_verb_or_an_option_names_the_nearest(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err
