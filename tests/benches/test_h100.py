"""`benches/h100.py`: rows by name, ratios of what ran in the same call, and the reason for what did not run."""

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


def test_rows_are_chosen_by_name_in_the_order_given() -> None:
    from rows import LEFT_OUT, PARTS, ROWS, select

    assert select("7b-64k, 3b-32k,") == ["7b-64k", "3b-32k"]
    assert select("tiny,loss") == ["tiny", "loss"]
    assert set(select("")) == {*ROWS, *PARTS} - set(LEFT_OUT)
    with pytest.raises(ValueError, match=r"no row 9b, 3b; there are 3b-32k, "):
        select("9b,3b-32k,3b")


def test_every_row_is_a_request_of_bench_and_a_ratio_is_wanted_of_peers_that_it_has() -> None:
    from rows import GIVEN_PLAN, MATMUL, ROWS, WHOLE_CARD

    from megatrain.cli import parser
    from megatrain.cli.bench_request import bench_request

    for name, row in ROWS.items():
        request = bench_request(parser.build().parse_args(row.ours(row.model, row.memory, "auto")))
        assert (request.batch, request.steps, request.warmup) == (row.batch, row.steps, row.warmup), name
        assert request.settings["memory"]["gpu"] == (row.memory or "auto")
        planned = request.settings["plan"].keys()
        assert planned <= {"state_on_device", "slabs"}, f"{name} is not the automatic plan"
        assert set(row.wanted) <= {*row.peers, MATMUL, GIVEN_PLAN, WHOLE_CARD}
        if "llmq" in row.peers:
            micro_batch = int(row.llmq[row.llmq.index("--micro-batch") + 1])
            assert row.batch % micro_batch == 0


def test_a_budget_is_given_to_rows_without_one_and_plan_keys_to_the_peer_given_plan() -> None:
    from h100 import parse, peers_of
    from rows import ROWS

    row = ROWS["14b-64k"]
    given = parse(["--only", "14b-64k", "--gpu-memory", "78GiB", "--against", "micro_batch=32,group=2"])
    assert peers_of(row, given) == ["llmq", "roundpipe", "given-plan"]
    words = row.ours(row.model, given.gpu_memory, "auto", given.against)
    assert words[-6:] == ["--gpu-memory", "78GiB", "--set", "micro_batch=32", "--set", "group=2"]
    assert peers_of(row, parse(["--peers", "", "--against", "group=1"])) == []
    assert peers_of(row, parse(["--peers", "roundpipe,resident", "--also", "resident"])) == ["roundpipe", "resident"]
    assert parse(["--command", "llmq=env A=1 python3"]).command == {"llmq": ["env", "A=1", "python3"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "3b"], "--only: no row 3b; there are 3b-32k"),
        (["--peers", "lmq"], "--peers: no peer lmq; there are llmq"),
        (["--also", "torch"], "--also: no peer torch"),
        (["--against", "group"], "--against: 'group' is not KEY=VALUE"),
        (["--command", "llmq"], "--command: 'llmq' is not PEER=WORDS"),
        (["--trace"], "--trace needs --out"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from h100 import parse

    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_row_is_compared_with_what_was_measured_and_names_what_was_not() -> None:
    from h100 import compared, table
    from rows import ROWS

    plan = {"estimate": {"step_s": 1.0, "expected_step_s": 1.1}}
    ours = {"tokens_s": 980.0, "step_s": 1.2, "model_tflops": 400.0, "host_anonymous_gib": 12.0, "parameters": 2**30}
    row = ROWS["3b-32k"]
    others = {"llmq": {"tokens_s": 1000.0}, "resident-checkpoint": {"error": "out of memory"}}
    found = compared(row, ours | {"plan": plan}, others, 800.0)
    assert found["ratios"] == {"llmq": 0.98, "matmul": 0.5}
    assert found["reached"] is True
    assert found["unmeasured"] == {"resident-checkpoint": "out of memory"}
    assert (found["predicted_s"], found["host_bytes_a_parameter"]) == (1.1, 12.0)
    slower = compared(row, ours | {"plan": plan}, {"llmq": {"tokens_s": 1001.0}}, 800.0)
    assert slower["reached"] is False
    unknown = compared(row, ours | {"plan": plan}, {"llmq": {"error": "not installed"}}, 800.0)
    assert unknown["reached"] is None, "a ratio that was not measured is not reached"
    failed = compared(row, {"error": "it does not fit"}, others, 800.0)
    assert failed["error"] == "it does not fit"
    shown = table({"3b-32k": found, "7b-64k": failed}, "NVIDIA H200, not an H100")
    assert "NVIDIA H200, not an H100" in shown
    assert "0.980 x llmq" in shown
    assert "resident-checkpoint: out of memory" in shown
    assert "it does not fit" in shown


def test_a_measurement_ends_in_its_time_with_all_that_it_started(tmp_path: Path) -> None:
    from h100 import Call

    call = Call(600.0, tmp_path)
    alive = tmp_path / "alive"
    inner = f"import time, pathlib; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert call.measure("row", "slow", [sys.executable, "-c", outer], 1.0) == {"error": "not done after 1 s"}
    failed = [sys.executable, "-c", "import sys; print('no JSON'); sys.exit('no card here')"]
    assert call.measure("row", "failed", failed, 30.0) == {"error": "no card here"}
    refused = [sys.executable, "-c", 'import sys; print(\'{"error": "not installed"}\'); sys.exit(1)']
    assert call.measure("row", "refused", refused, 30.0) == {"error": "not installed"}
    works = [sys.executable, "-c", "print('a line'); print('{\"tokens_s\": 7}'); print('another')"]
    assert call.measure("row", "works", works, 30.0) == {"tokens_s": 7}
    call.end = 0.0
    assert call.measure("row", "works", works, 30.0) == {"tokens_s": 7}, "measured once a call"
    assert call.measure("row", "late", [*works, "late"], 30.0)["error"].startswith("not begun: 0 s of the call")
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["system"] for line in lines] == ["slow", "failed", "refused", "works", "late"]
    assert not alive.exists()


def test_the_smallest_row_runs_without_a_card(tmp_path: Path) -> None:
    words = ["--only", "tiny", "--device", "cpu", "--against", "micro_batch=2", "--out", str(tmp_path), "--trace"]
    done = subprocess.run(
        [sys.executable, str(BENCHES / "h100.py"), *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    machine, ours, given, row = lines
    assert machine["matmul_tflops"] > 0
    assert (ours["micro_batch"], given["micro_batch"]) == (4, 2)
    assert row["ratios"]["given-plan"] == pytest.approx(ours["tokens_s"] / given["tokens_s"], abs=1e-3)
    assert row["card"] == f"{machine['card']}, not an H100"
    assert (tmp_path / "tiny-megatrain.trace.json").is_file()
    assert f"| tiny: {row['what']} |" in done.stdout


@pytest.mark.parametrize("script", ["llmq.py", "round_pipe.py", "zero3.py"])
def test_a_peer_that_cannot_run_here_says_why(script: str) -> None:
    command = [sys.executable, str(BENCHES / "peers" / script), "--model", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode == 0:
        pytest.skip("it runs here")
    found = json.loads(done.stdout.splitlines()[-1])
    assert "cannot be imported" in found["error"] or "needs a CUDA device" in found["error"]


def test_a_model_is_written_as_every_peer_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rows import ROWS, write_model

    monkeypatch.syspath_prepend(str(BENCHES / "peers"))
    from common import model_config

    for name in {row.model for row in ROWS.values()}:
        keys = model_config(str(write_model(name, tmp_path)))
        assert keys["vocab_size"] > 0
        assert keys["num_hidden_layers"] > 0
    quickstart = model_config(str(tmp_path / "quickstart"))
    assert (quickstart["model_type"], quickstart["hidden_size"], quickstart["vocab_size"]) == ("llama", 192, 4096)
    assert model_config("tiny") == model_config(str(tmp_path / "tiny"))
    shutil.rmtree(tmp_path / "tiny")
    with pytest.raises(SystemExit):
        model_config(str(tmp_path / "tiny"))


def test_the_sequence_that_roundpipe_runs_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(BENCHES / "peers"))
    from round_pipe import Embedding, Layer, Loss

    from megatrain.models.presets import SHAPES

    def loss_fn(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor, num_items_in_batch: int) -> object:
        logits = head(hidden)[:, :-1].flatten(0, 1)
        return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    function = types.ModuleType("roundpipe.models.function")
    function.__dict__["ChunkedCompileLinearForCausalLMLoss"] = loss_fn
    for name in ("roundpipe", "roundpipe.models", "roundpipe.models.function"):
        monkeypatch.setitem(sys.modules, name, function)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES["tiny"].config()))
    ids = torch.randint(0, SHAPES["tiny"].vocab, (4, 32))
    state = Embedding(model.model)(ids, ids)
    for layer in model.model.layers:
        state = Layer(layer)(state)
    loss = Loss(model.model.norm, model.lm_head, 4 * 31)(state)
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)
