"""`megatrain plan`: what fits and what does not, without weights, data or a card; its totals are what is allocated."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config import Config
from megatrain.errors import DoesNotFit
from megatrain.models.presets import SHAPES
from megatrain.planning import planner
from megatrain.system import descriptions, hardware
from megatrain.system.hardware import GIB, SystemProbe, format_bytes
from megatrain.training import forecast
from megatrain.training.metrics import duration
from megatrain.training.setup import build_engine, prepare_model
from megatrain.units import parse_size
from support.plans import H100, answer, printed, written
from support.runs import MODEL, settings


def test_a_model_that_no_machine_here_could_hold_is_planned_for_a_described_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "qwen2.5-32b", "--machine", written(tmp_path, "h100.yaml", H100))
    plan = found["plan"]
    for tier in ("device", "host"):
        assert plan["totals"][tier] == sum(item["bytes"] for item in plan["items"] if item["tier"] == tier)
        assert plan["totals"][tier] <= found["budget"][tier]
    assert 32e9 < found["parameters"] < 34e9
    assert found["precision"] == "bf16"
    # 12 bytes a parameter of state, 2 more while gradients wait, less what the card holds, plus activations
    assert plan["totals"]["host"] < 15 * found["parameters"]
    assert found["step_s"] > 0
    assert found["bound"] in found["plan"]["estimate"]["lanes"]
    assert found["numerics"]["device"] == "H100"
    assert found["disk"]["checkpoint"] == pytest.approx(12 * found["parameters"], rel=1e-3)
    assert found["largest_micro_batch"] >= found["micro_batch"][0]


def test_the_summary_says_in_twelve_lines_what_goes_where_how_long_and_what_bounds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("qwen2.5-7b", "train.steps=1000", "--machine", written(tmp_path, "h100.yaml", H100))
    found, said = answer(capsys, *words), printed(capsys, *words)
    assert len(said.splitlines()) <= 12
    assert said.startswith("fits: 7,615,616,512 parameters, all trained, bf16 on H100\n")
    for tier in ("device", "host"):
        sizes = f"{format_bytes(found['plan']['totals'][tier])} of {format_bytes(found['budget'][tier])}"
        assert f"{tier} memory: {sizes}: " in said
    assert "exp_avg and exp_avg_sq" in said
    seconds, tokens = found["expected_step_s"], 65536
    assert f"time: about {seconds:.3g} s per step, {tokens / seconds:,.0f} tokens/s; bound by compute\n" in said
    assert f"run: 1,000 steps, about {1000 * seconds / 3600:.1f} h" in said
    assert said.count(" s per step") == 1, "one predicted step time"


def test_the_sizes_of_a_summary_add_up_to_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen2.5-7b", "--machine", written(tmp_path, "h100.yaml", H100))
    plan = answer(capsys, *words)["plan"]
    for tier in ("device", "host"):
        (line,) = [line for line in printed(capsys, *words).splitlines() if line.startswith(f"{tier} memory:")]
        parts = [parse_size(f"{number}{unit}") for number, unit in re.findall(r"([\d.]+) ([KMGT]iB)", line)]
        assert sum(parts[2:]) == pytest.approx(plan["totals"][tier], rel=1e-3)


def test_a_run_counted_in_epochs_is_timed_by_the_size_of_its_data_or_by_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a" * 1000}) * 1 + "\n")
    rows.write_text(rows.read_text() * 1000)
    words = ("tiny", "device=cpu", "data.seq_len=128", "train.epochs=2", "train.batch_size=1")
    found = answer(capsys, *words)
    seconds = 2 * rows.stat().st_size / 4 / 128 * found["expected_step_s"]
    said = printed(capsys, *words, f"data.train={rows}", "model.tokenizer={train: bpe, vocab_size: 300}")
    hours = f"{seconds / 3600:,.1f} h" if seconds >= 3600 else duration(round(seconds))
    assert f"run: roughly {hours} for 2 epochs of {format_bytes(rows.stat().st_size)} of data" in said
    assert " per billion tokens" in printed(capsys, *words)


def test_a_plan_says_where_a_step_is_too_large_for_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"text": "a" * 1000}) + "\n") * 70)  # about 17,800 tokens
    words = (
        "tiny",
        "device=cpu",
        "data.seq_len=128",
        f"data.train={rows}",
        "model.tokenizer={train: bpe, vocab_size: 300}",
    )
    said = printed(capsys, *words)
    assert "fewer tokens per step (train.batch_tokens): by the size of its data the run has only about 1 step" in said
    assert "more tokens per step" not in said
    assert "fewer tokens per step" not in printed(capsys, *words, "train.batch_tokens=1024")


def test_verbose_names_every_item_the_lanes_and_the_numerics_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("qwen2.5-7b", "--machine", written(tmp_path, "h100.yaml", H100))
    said = printed(capsys, *words, "--verbose")
    for item in answer(capsys, *words)["plan"]["items"]:
        assert item["what"] in said
    for word in (
        "would fit",
        "numerics key",
        "clipping costs no time from",
        "not bit for bit",
        "no step can take less",
    ):
        assert word in said, word


def test_a_plan_says_what_would_make_a_step_faster_only_where_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_link = H100 | {"rates": H100["rates"] | {"h2d_gbs": 0.5}}
    small = ("qwen2.5-7b", "memory.gpu=20GiB", "train.batch_size=1", "plan.updates_on_device=0", "--machine")
    said = printed(capsys, *small, written(tmp_path, "slow.yaml", slow_link))
    assert "bound by upload\nrun:" in said
    assert "to change: more tokens per step (train.batch_tokens)" in said
    slow_host = H100 | {"rates": H100["rates"] | {"adamw_gparams": 0.5}}
    said = printed(capsys, *small, written(tmp_path, "host.yaml", slow_host))
    assert "bound by host\nrun:" in said
    free = answer(capsys, *small, str(tmp_path / "host.yaml"))["free_clipping_tokens"]
    assert f"to change: from {free:,} tokens per step on" in said
    unmeasured = {key: value for key, value in H100.items() if key != "rates"}
    assert "run `megatrain probe`" in printed(
        capsys, "qwen2.5-0.5b", "--machine", written(tmp_path, "unmeasured.yaml", unmeasured)
    )


@pytest.mark.parametrize(("rate", "every"), [(0.5, None), (0.5, "10"), (0.5, "60min"), (1000.0, "10")])
def test_a_checkpoint_holds_up_what_does_not_fit_beside_a_step_and_wears_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: float, every: str | None
) -> None:
    machine = written(tmp_path, "machine.yaml", H100 | {"rates": H100["rates"] | {"disk_write_gbs": rate}})
    setting = ["qwen2.5-0.5b", "--machine", machine, *([f"output.save_every={every}"] if every else [])]
    found = answer(capsys, *setting)
    step, size = found["expected_step_s"], found["disk"]["checkpoint"]
    stall = found["checkpoint_stall_s"]
    assert stall == pytest.approx(max(0, size / (rate * 1e9) - step))
    assert (stall > 0) == (rate < 1)
    per_day = found["checkpoint_bytes_per_day"]
    if every is None:
        assert per_day is None, "a run that saves once, at its end"
    else:
        assert per_day == pytest.approx(size * 86400 / (3600 if every == "60min" else 10 * step + stall))


def test_a_checkpoints_time_is_given_where_a_disk_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = written(tmp_path, "measured.yaml", H100 | {"rates": H100["rates"] | {"disk_write_gbs": 2.5}})
    found = answer(capsys, "qwen2.5-7b", "--machine", measured)
    assert found["checkpoint_s"] == found["disk"]["checkpoint"] / 2.5e9
    assert f" per checkpoint (about {found['checkpoint_s']:.3g} s to write), " in printed(
        capsys, "qwen2.5-7b", "--machine", measured
    )
    unmeasured = written(tmp_path, "h100.yaml", H100)
    assert answer(capsys, "qwen2.5-7b", "--machine", unmeasured)["checkpoint_s"] is None
    assert "to write" not in printed(capsys, "qwen2.5-7b", "--machine", unmeasured)


def test_a_plan_of_immediate_updates_says_what_they_give_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny", "device=cpu", "train.batch_size=1", "data.seq_len=128"]
    immediate = [*words, "train.update=immediate", "train.max_grad_norm=null"]
    assert answer(capsys, *words)["given_up"] is None
    found = answer(capsys, *immediate)
    assert found["update"] == "immediate"
    assert "non-finite gradient or an interrupt" in found["given_up"]
    assert "exit code 4" in found["given_up"]
    assert main(["plan", *words]) == 0
    assert "gives up" not in capsys.readouterr().out
    assert main(["plan", *immediate]) == 0
    assert f"train.update: immediate gives up: {found['given_up']}\n" in capsys.readouterr().out


def test_of_the_one_memory_of_a_cpu_a_refusal_says_what_all_of_it_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "tiny", "device=cpu", "train.batch_size=1", "data.seq_len=128"]
    assert main([*words, "memory.host=1MiB"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert "of host memory are needed and 1.00 MiB allowed" in first
    assert first.count("are needed") == 1, "two sums, of which each might have all, would be read as alternatives"
    needed = re.search(r"fit: ([0-9.]+) MiB", first)
    assert needed is not None
    assert main([*words, f"memory.host={math.ceil(float(needed[1]))}MiB"]) == 0
    capsys.readouterr()
    assert main([*words, "memory.gpu=1MiB"]) == 2
    assert "memory that stands in for a device's are needed and 1.00 MiB allowed" in capsys.readouterr().err


def test_on_the_cpu_one_memory_is_shown_as_one_and_the_bound_names_its_rates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["tiny", "device=cpu", "train.batch_size=1", "data.seq_len=128"]
    said = printed(capsys, *words, "--verbose")
    table = said[said.index(" where") : said.index("sizes are rounded")]
    for word in ("pinned", "device", "host "):
        assert word not in table, word
    assert "RAM, to compute" in table
    assert table.count("allowed") == 1, "one budget"
    assert "no step can take less than" in said
    assert "at rates above any processor's" in said
    assert "sum, of 64.00 MiB allowed" in printed(capsys, *words, "memory.gpu=64MiB", "--verbose")


def test_the_bound_on_a_card_says_whether_the_rates_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("qwen2.5-0.5b", "train.batch_size=1", "--verbose", "--machine")
    assert ", at 1.25 times the measured rates" in printed(capsys, *words, written(tmp_path, "h100.yaml", H100))
    unmeasured = {key: value for key, value in H100.items() if key != "rates"}
    said = printed(capsys, *words, written(tmp_path, "unmeasured.yaml", unmeasured))
    assert ", at rates above any card's" in said


def test_what_does_not_fit_is_refused_with_the_whole_sum_and_where_the_limit_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = H100 | {"host": {"memory": "64GiB", "cpus": 16}}
    assert main(["plan", "qwen2.5-32b", "--machine", written(tmp_path, "small.yaml", small)]) == 2
    said = capsys.readouterr().err
    for word in ("does not fit", "weights", "residual", "exp_avg", "exp_avg_sq", "slabs", "64.00 GiB", "small.yaml"):
        assert word in said, word
    assert "Traceback" not in said


class Limited(SystemProbe):
    """This machine inside a control group of 4 GiB."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        group = root / "sys/fs/cgroup"
        (root / "proc/self").mkdir(parents=True)
        group.mkdir(parents=True)
        (root / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n")
        (root / "proc/self/cgroup").write_text("0::/\n")
        (root / "proc/self/mountinfo").write_text("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        (group / "memory.max").write_text(f"{4 * GIB}\n")
        (group / "memory.current").write_text("0\n")
        (group / "memory.stat").write_text("anon 0\n")

    def cuda_status(self) -> dict[str, Any]:
        return {"available": False, "reason": "no driver", "devices": []}


def test_the_control_groups_limit_is_what_is_available_and_not_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Limited(tmp_path / "root"))
    assert main(["plan", "qwen2.5-0.5b", "train.batch_size=1", "data.seq_len=512"]) == 2
    said = capsys.readouterr().err
    for word in ("weights", "exp_avg", "exp_avg_sq", "slabs", "4.00 GiB", "control group"):
        assert word in said, word
    assert main(["plan", "tiny", "train.batch_size=1", "data.seq_len=512"]) == 0


def test_device_and_host_of_a_cpu_run_share_one_memory(tmp_path: Path) -> None:
    config = Config.of(settings(tmp_path) | {"memory": {"host": "4MiB"}})
    model_setup = prepare_model(config, hardware.read(), plan_only=True)
    run_plan = planner.plan_run(config, model_setup.decoder, device="cpu", machine=hardware.read(), rows=4)
    totals = run_plan.plan["totals"]
    assert totals["device"] + totals["host"] <= 4 << 20
    config = Config.of(settings(tmp_path) | {"memory": {"host": "100KiB"}})
    with pytest.raises(DoesNotFit, match="memory"):
        planner.plan_run(config, model_setup.decoder, device="cpu", machine=hardware.read(), rows=4)


def test_what_the_plan_says_is_what_the_engine_allocates(tmp_path: Path) -> None:
    config = Config.of(settings(tmp_path))
    model_setup = prepare_model(config, hardware.read(), plan_only=True)
    run_plan = planner.plan_run(config, model_setup.decoder, device="cpu", machine=hardware.read(), rows=4)
    with build_engine(model_setup, run_plan) as engine:
        assert engine.plan == run_plan.plan
        own = [item for item in run_plan.plan["items"] if "(torch)" not in item["what"]]
        assert json.loads(engine.core.allocated()) == own


@pytest.fixture(autouse=True)
def no_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was once measured on this machine stays out of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def test_rates_that_were_measured_are_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatrain.planning import calibrate

    words = ("tiny", "device=cpu", "train.batch_size=1", "data.seq_len=128")
    assumed = answer(capsys, *words)
    assert assumed["rates_measured"] is False
    measured = dict.fromkeys(descriptions.UNITS, 2.0) | {"matmul_tflops": 1e-3}
    assert calibrate.keep(hardware.read(), "cpu", measured) is not None
    found = answer(capsys, *words)
    assert found["rates_measured"] is True
    assert found["expected_step_s"] > 10 * assumed["expected_step_s"]
    assert found["step_s"] == assumed["step_s"], "a probe of shared processors bounds nothing"
    calibrate.write_description(hardware.read(), measured, tmp_path / "me.yaml")
    described = answer(capsys, *words, "--machine", str(tmp_path / "me.yaml"))
    assert described["expected_step_s"] == found["expected_step_s"]


def test_no_step_of_a_real_run_is_faster_than_the_bound(tmp_path: Path) -> None:
    from megatrain.training.run_dir import read_metrics
    from megatrain.training.trainer import Trainer

    config = Config.of(settings(tmp_path))
    bound = forecast.without_data(config, hardware.read()).step_s
    Trainer(config).fit()
    assert 0 < bound <= min(record["step_s"] for record in read_metrics(tmp_path / "run"))


def test_the_split_into_micro_batches_follows_a_fixed_rule_and_shrinks_only_to_fit(tmp_path: Path) -> None:
    base = settings(tmp_path, train={"steps": 2, "batch_size": 12}, plan={"micro_batch": None}, data={"seq_len": 64})
    config = Config.of(base)
    decoder = prepare_model(config, hardware.read(), plan_only=True).decoder

    def rows(config: Config, saved: dict[str, Any] | None = None) -> tuple[int, int]:
        run_plan = planner.plan_run(config, decoder, device="cpu", machine=hardware.read(), rows=12, saved=saved)
        return run_plan.micro_batch[0], run_plan.micro_batches

    assert rows(config) == (12, 1)
    assert rows(config, {"micro_batch": [5, 64]}) == (5, 3), "a resumed run keeps its split"
    assert rows(Config.of(base | {"plan": {"micro_batch": 7}})) == (7, 2)
    whole = planner.plan_run(config, decoder, device="cpu", machine=hardware.read(), rows=12).plan["totals"]
    tight = (whole["device"] + whole["host"]) * 6 // 10
    shrunk = rows(Config.of(base | {"memory": {"host": tight}}))
    assert 1 <= shrunk[0] <= 12
    with pytest.raises(DoesNotFit):
        rows(Config.of(base | {"memory": {"host": tight // 8}}))


def test_a_card_without_native_bf16_and_a_missing_card_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = H100 | {"gpu": {"name": "Tesla T4", "memory": "16GiB", "capability": [7, 5]}}
    assert main(["plan", "tiny", "--machine", written(tmp_path, "t4.yaml", old)]) == 2
    said = capsys.readouterr().err
    assert "Tesla T4" in said
    assert "fp32" in said
    assert main(["plan", "tiny", "--machine", written(tmp_path, "t4.yaml", old), "train.precision=fp32"]) == 0
    none = {"host": {"memory": "8GiB"}}
    assert main(["plan", "tiny", "device=cuda", "--machine", written(tmp_path, "cpu.yaml", none)]) == 2
    assert "no gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-model"], "no-such-model"),
        (["tiny", "data.seq_len=200000"], "data.seq_len"),
        (["tiny", "model.freeze=[nothing.*]"], "freeze"),
        (["tiny", "train.no_decay=[nothing.*]"], "no_decay"),
        (["tiny", "plan.slots=0"], "slots"),
        (["tiny", "memory.gpu=lots"], "memory.gpu"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_its_key(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_of_a_deterministic_run_says_what_computes_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("tiny", "--machine", written(tmp_path, "h100.yaml", H100), "train.batch_size=1", "data.seq_len=128")
    for more, key, told in (
        ([], "sdpa", None),
        (["train.deterministic=true"], "sdpa: flash or math", "attention: flash, and torch's math kernel for"),
        (
            ["train.deterministic=true", "train.precision=fp32"],
            "sdpa: math",
            "attention: torch's math kernel, which is slow",
        ),
    ):
        assert answer(capsys, *words, *more)["numerics"]["attention"] == key
        lines = printed(capsys, *words, *more, "--verbose").splitlines()
        said = [line for line in lines if line.startswith("attention:")]
        assert len(said) == (told is not None)
        assert not said or said[0].startswith(told)


def test_a_plan_with_compile_off_says_so_in_its_numerics_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("tiny", "--machine", written(tmp_path, "h100.yaml", H100), "train.batch_size=4", "data.seq_len=128")
    assert answer(capsys, *words)["numerics"]["compiled"] is True
    assert answer(capsys, *words, "plan.compile=false")["numerics"]["compiled"] is False
    grouped = answer(capsys, *words, "plan.micro_batch=1", "plan.group=2")
    assert grouped["plan"]["group"] == 2
    assert grouped["largest_micro_batch"] > 1


def test_every_public_shape_has_the_parameters_that_its_name_says() -> None:
    for name, shape in SHAPES.items():
        if name == "tiny":
            continue
        config = Config.of({"model": {"config": shape.config()}, "device": "cpu", "train": {"precision": "bf16"}})
        decoder = prepare_model(config, hardware.read(), plan_only=True).decoder
        billions = float(name.removeprefix("qwen2.5-").removesuffix("b"))
        assert decoder.num_parameters == pytest.approx(billions * 1e9, rel=0.1)


def test_a_model_of_few_positions_is_planned_with_them_and_a_stated_length_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 300}))
    found = answer(capsys, str(tmp_path), "device=cpu", "train.batch_size=2")
    assert found["micro_batch"] == [2, 64]
    assert main(["plan", str(tmp_path), "device=cpu", "data.seq_len=4096"]) == 2
    assert "data.seq_len is 4096 and the model has positions for 64 tokens" in capsys.readouterr().err


CODEGEN = {"model_type": "codegen", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64, "rotary_dim": 64}
"""Rotates more dimensions than a head has."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hiden_size": 32}, "model.config.hiden_size is not a key of llama; did you mean model.config.hidden_size?"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide the 4 attention heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"max_position_embeddings": -3}, "max_position_embeddings is -3; it must be at least 1"),
        ({"attention_dropout": 2}, "attention_dropout is 2; it is a probability, from 0 to below 1"),
        ({"hidden_act": "foo"}, "llama cannot be built: a value of its configuration is unknown: 'foo'"),
        ({"hidden_size": 30}, "(30) is not a multiple of the number of attention heads (4)"),
        ({"model_type": "lama"}, "did you mean llama?"),
        ({"model_type": "mamba"}, "mamba has no attention heads"),
        (CODEGEN, "CodeGenBlock cannot be computed with the numbers of this configuration: Attempting to broadcast"),
    ],
)
def test_a_model_that_cannot_be_is_a_wrong_request(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changes if changes.get("model_type") in ("mamba", "codegen") else MODEL | changes
    wanted = {"model": {"config": model}, "data": {"seq_len": 32}, "device": "cpu"}
    assert main(["plan", written(tmp_path, "run.yaml", wanted)]) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_description_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "odd.yaml", H100 | {"gpus": 2})
    assert main(["plan", "tiny", "--machine", path]) == 2
    assert "gpus" in capsys.readouterr().err


def test_a_name_that_is_no_shape_is_answered_with_those_that_are_and_without_the_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "llama-3-70b"]) == 2
    said = capsys.readouterr().err
    assert "nor a known shape" in said
    assert "qwen2.5-72b" in said
    assert "OWNER/NAME" in said


def test_a_refusal_says_each_sum_once_in_readable_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "device=cpu", "memory.gpu=3MiB"]) == 2
    said = capsys.readouterr().err
    assert said.count("does not fit") == 1
    assert "3.00 MiB allowed" in said
    assert "in all" in said


def test_a_host_that_is_too_small_is_planned_with_state_on_disk_and_its_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = H100 | {"host": {"memory": "96GiB", "cpus": 16}, "disk": {"free": "1TiB"}}
    machine = written(tmp_path, "small.yaml", small)
    words = ("qwen2.5-14b", "memory.gpu=20GiB", "train.batch_size=8", "--machine", machine)
    assert main(["plan", *words]) == 2
    assert "memory.nvme.path" in capsys.readouterr().err
    found = answer(capsys, *words, "memory.nvme.path=/nvme")
    plan, disk = found["plan"], found["state_on_disk"]
    assert plan["totals"]["host"] <= found["budget"]["host"]
    assert 0 < disk["bytes"] == plan["totals"]["disk"] <= found["budget"]["disk"]
    # 10 bytes of each parameter: residual and both moments
    states = [unit["state"] for unit in plan["units"]]
    assert states.index("disk") > states.count("device")
    assert disk["seconds"] == pytest.approx(disk["bytes"] / 2.0e9)
    assert disk["bytes_written_a_day"] == pytest.approx(disk["bytes"] * 86400 / found["expected_step_s"])
    # No step is shorter than its reading and writing.
    assert found["expected_step_s"] >= disk["seconds"] * 0.999
    roomier = answer(capsys, *words[:-2], "--machine", written(tmp_path, "large.yaml", H100), "memory.nvme.path=/nvme")
    assert roomier["state_on_disk"] is None
    assert main(["plan", *words, "memory.nvme.path=/nvme"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 13
    told = next(line for line in lines if line.startswith("state on disk: "))
    assert format_bytes(disk["bytes"]) in told
    assert "written per day" in told
    too_small = disk["bytes"] - (1 << 30)
    assert main(["plan", *words, f"memory.nvme={{path: /nvme, size: {too_small}}}", "--json"]) == 2
    said = capsys.readouterr()
    assert "this does not fit" in said.err
    refusal = json.loads(said.out)
    assert refusal["exit_code"] == 2
    assert "this does not fit" in refusal["error"]
    assert {item["tier"] for item in refusal["needs"] if item["bytes"] > 0} == {"device", "host", "disk"}


def test_weights_follow_the_state_to_disk_and_the_plan_says_what_a_step_reads_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = H100 | {"host": {"memory": "20GiB", "cpus": 16}, "disk": {"free": "1TiB"}}
    machine = written(tmp_path, "small.yaml", small)
    words = ("qwen2.5-7b", "memory.gpu=16GiB", "train.batch_size=4", "data.seq_len=512", "memory.nvme.path=/nvme")
    found = answer(capsys, *words, "--machine", machine)
    plan, disk = found["plan"], found["state_on_disk"]
    assert plan["totals"]["host"] <= found["budget"]["host"]
    on_disk = [unit for unit in plan["units"] if unit.get("weights_on_disk")]
    assert len(on_disk) > 2
    assert all(unit["state"] != "host" for unit in plan["units"])
    weights = sum(item["bytes"] for item in plan["items"] if item["tier"] == "disk" and item["what"] == "weights")
    assert 0 < disk["weights"] == weights < disk["bytes"] == plan["totals"]["disk"]
    # Everything once to be updated; weights once more for each time that they are sent.
    assert disk["bytes_written"] == pytest.approx(disk["bytes"], rel=1e-3)
    assert disk["bytes"] + weights <= disk["bytes_read"] <= disk["bytes"] + 2 * weights * found["micro_batches"]
    assert disk["seconds"] == pytest.approx(max(disk["bytes_read"] / 2.5e9, disk["bytes_written"] / 2.0e9))
    assert disk["bytes_written_a_day"] == pytest.approx(disk["bytes_written"] * 86400 / found["expected_step_s"])
    assert found["expected_step_s"] >= disk["seconds"] * 0.999
    assert main(["plan", *words, "--machine", machine]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("state on disk: "))
    for size in (disk["weights"], disk["bytes_read"], disk["bytes_written"]):
        assert format_bytes(size) in told
    assert f"of it weights, of {len(on_disk)} units" in told
    fewer = answer(capsys, *words, f"plan.weights_on_disk={len(on_disk) + 2}", "--machine", machine)
    assert sum(unit.get("weights_on_disk", False) for unit in fewer["plan"]["units"]) == len(on_disk) + 2


def test_inputs_of_long_rows_go_to_disk_where_the_host_is_too_small_and_the_plan_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = H100 | {"host": {"memory": "128GiB", "cpus": 16}, "disk": {"free": "1TiB"}}
    machine = written(tmp_path, "small.yaml", small)
    # One row of 131,072 tokens: 0.94 GB of the input of each half of a layer.
    words = ("qwen2.5-7b", "data.seq_len=131072", "train.batch_size=1", "plan.fragments=halves", "plan.mlp_tiles=16")
    words += ("plan.state_on_device=0", "plan.updates_on_device=0", "plan.state_on_disk=0", "plan.activation=recompute")
    words += ("memory.host=120GiB", "memory.nvme.path=/nvme")
    found = answer(capsys, *words, "plan.inputs=host", "--machine", machine)
    plan, disk = found["plan"], found["state_on_disk"]
    waiting = [unit["name"] for unit in plan["units"] if unit["input"] == "disk"]
    assert 0 < len(waiting) < 56
    row = 131_072 * 3584 * 2
    assert disk["inputs"] == disk["bytes"] == plan["totals"]["disk"] == row * len(waiting)
    assert disk["bytes_read"] == disk["bytes_written"] == disk["inputs"]
    assert disk["bytes_written_a_day"] == pytest.approx(disk["inputs"] * 86400 / found["expected_step_s"])
    assert plan["totals"]["host"] <= found["budget"]["host"]
    # One input fewer would not leave two buffers' room.
    assert plan["totals"]["host"] + row > found["budget"]["host"]
    assert main(["plan", *words, "plan.inputs=host", "--machine", machine]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("layer inputs on disk: "))
    assert f"of {len(waiting)} of 58 units" in told
    assert format_bytes(disk["inputs"]) in told
    assert "written per day" in told
    more = answer(capsys, *words, f"plan.inputs_on_disk={len(waiting) + 3}", "--machine", machine)
    assert sum(unit["input"] == "disk" for unit in more["plan"]["units"]) == len(waiting) + 3


def test_layers_are_captured_where_a_card_has_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen2.5-0.5b", "--machine", "h100", "data.seq_len=256", "train.batch_size=2"]
    assert main(words) == 0
    assert "captured layers" in capsys.readouterr().out
    for more in ("plan.graphs=false", "memory.gpu=7GiB"):
        assert main([*words, more]) == 0, more
        assert "captured layers" not in capsys.readouterr().out, more
