"""`megatrain probe`: what it measures, and how it tells a machine that did something else from an idle one."""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import pytest

from megatrain import _core
from megatrain.cli import main
from megatrain.planning import calibrate
from megatrain.system import descriptions, hardware
from megatrain.system.hardware import SystemProbe

HOST = {"touch_gbs": 4.0, "copy_gbs": 10.0, "adamw_params_per_s": 2e9}


class Loaded(SystemProbe):
    """This machine with a load average."""

    def __init__(self, load: str) -> None:
        super().__init__()
        self.load = load

    def text(self, path: str) -> str | None:
        return self.load if path == "/proc/loadavg" else super().text(path)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matrix products are measured, and nothing is kept in the user's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_core, "probe_host", lambda *_: json.dumps(HOST))
    monkeypatch.setattr(calibrate, "_disk", lambda _: {})
    monkeypatch.setattr(calibrate.os, "cpu_count", lambda: 2)


@pytest.mark.parametrize(
    ("load", "spread", "said"),
    [
        ("0.20 0.10 0.10 1/90 1", 0.02, None),
        ("1.40 9.00 9.00 1/90 1", 0.25, None),
        ("3.51 0.10 0.10 1/90 1", 0.02, "the load average was 3.5 on 2 processors"),
        ("0.20 0.10 0.10 1/90 1", 0.61, "half of the matrix products took 61% longer than the fastest"),
        ("", 0.02, None),
    ],
)
def test_a_busy_machine_is_told_in_one_line_and_in_json(
    load: str, spread: float, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Loaded(load))
    monkeypatch.setattr(calibrate, "_arithmetic", lambda _: ({"matmul_tflops": 0.1}, spread))
    assert main(["probe"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("busy: ")]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]
    assert main(["probe", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["machine"]["rates"]["matmul_tflops"] == 0.1
    assert (said is None) == (answer["busy"] is None)
    assert said is None or said in answer["busy"]
    assert main(["plan", "tiny", "device=cpu", "train.batch_size=1", "data.seq_len=64"]) == 0
    planned = capsys.readouterr().out
    assert "not measured" not in planned
    assert ("measured on a busy machine" in planned) == (said is not None)


def test_a_probe_says_by_what_state_on_disk_was_read_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates, by = calibrate._state_disk([tmp_path], 128 << 20)
    assert set(rates) == {"state_read_gbs", "state_write_gbs"}
    assert by in {"io_uring with registered buffers", "io_uring", "threads"}
    monkeypatch.setattr(calibrate, "_arithmetic", lambda _: ({"matmul_tflops": 0.1}, 0.0))
    monkeypatch.setattr(calibrate, "_state_disk", lambda _: (rates, by))
    assert main(["probe"]) == 0
    assert f"optimizer state on disk was read and written by {by}" in capsys.readouterr().out.splitlines()
    assert main(["probe", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["state_io"] == by
    assert "state_io" not in answer["machine"]["rates"]
    monkeypatch.setattr(calibrate, "_state_disk", lambda _: ({}, None))
    assert main(["probe"]) == 0
    assert "optimizer state on disk" not in capsys.readouterr().out
    assert main(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_io"] is None


def test_equal_runs_that_take_unequal_time_lie_apart() -> None:
    pauses = itertools.cycle([0.004, 0.016, 0.016])
    seconds, spread = calibrate._repeat(lambda: time.sleep(next(pauses)), "cpu")
    assert 0.004 <= seconds < 0.016
    assert spread > 0.25


def test_the_matrix_product_is_measured() -> None:
    rates, spread = calibrate._arithmetic("cpu")
    assert rates["matmul_tflops"] > 0
    assert spread >= 0


@pytest.mark.parametrize(
    ("card", "tflops", "link"),
    [("NVIDIA H100 80GB HBM3", 732, 55), ("NVIDIA GeForce RTX 4090", 122, 25), ("NVIDIA A100-SXM4-80GB", 231, 25)],
)
def test_unmeasured_rates_are_those_of_the_card(card: str, tflops: float, link: float) -> None:
    machine = descriptions.from_description(
        {"host": {"memory": "64GiB", "cpus": 8}, "gpu": {"name": card, "memory": "24GiB"}}, "machine.yaml"
    )
    rates, measured = calibrate.rates(machine, "cuda")
    assert not measured
    assert rates["matmul_tflops"] == pytest.approx(tflops, rel=0.01)
    assert rates["h2d_gbs"] == link
    unknown = dataclasses.replace(machine, gpus=(dataclasses.replace(machine.gpus[0], name="GPU"),))
    assert calibrate.rates(unknown, "cuda")[0]["matmul_tflops"] < rates["matmul_tflops"]


def described(cpus: int, **rates: float) -> hardware.Machine:
    words = [f"host.cpus={cpus}", *(f"rates.{name}={rate}" for name, rate in rates.items())]
    return descriptions.from_words(
        ["gpu.name=RTX 4090", "gpu.memory=24GiB", "host.memory=64GiB", *words], None, "words"
    )


def test_the_hosts_update_has_a_rate_for_each_format_of_moments() -> None:
    few, _ = calibrate.rates(described(4), "cuda")
    # Of few processors memory bounds what is wide and arithmetic what is packed; of many memory bounds everything.
    assert few["adamw_gparams"] == pytest.approx(1.6)
    assert few["adamw_bf16_gparams"] == pytest.approx(1.6 * 26 / 18)
    assert few["adamw_8bit_gparams"] == pytest.approx(0.6)
    many, _ = calibrate.rates(described(64), "cuda")
    assert many["adamw_bf16_gparams"] == pytest.approx(4.8 * 26 / 18)
    assert many["adamw_8bit_gparams"] == pytest.approx(4.8 * 26 / 14.1)


def test_what_was_measured_stands_and_one_measured_format_scales_the_others() -> None:
    known, _ = calibrate.rates(described(4, adamw_gparams=3.2), "cuda")
    assert known["adamw_gparams"] == 3.2
    assert known["adamw_8bit_gparams"] == pytest.approx(1.2)
    known, _ = calibrate.rates(described(4, adamw_gparams=3.2, adamw_8bit_gparams=0.9), "cuda")
    assert (known["adamw_gparams"], known["adamw_8bit_gparams"]) == (3.2, 0.9)
    assert known["adamw_bf16_gparams"] == pytest.approx(3.2 * 26 / 18)


@pytest.mark.parametrize(("moments", "rate"), [("fp32", "2"), ("bf16", "3"), ("8bit", "0.5")])
def test_a_plan_is_made_with_the_rate_of_its_moments_and_says_it(
    moments: str, rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = "rates.adamw_gparams=2,rates.adamw_bf16_gparams=3,rates.adamw_8bit_gparams=0.5"
    machine = f"rtx4090,gpu.memory=8GiB,host.memory=64GiB,{rates}"
    asked = ["plan", "tiny", "--machine", machine, f"train.moments={moments}"]
    asked += ["plan.state_on_device=0", "plan.updates_on_device=0"]
    assert main([*asked, "train.batch_size=2", "data.seq_len=256"]) == 0
    name = {"8bit": "8-bit"}.get(moments, moments)
    assert f"6 units updated on the host ({rate}e9 parameters/s, {name} moments)" in capsys.readouterr().out
    assert main([*asked, "train.batch_size=2", "data.seq_len=256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"]["adamw_gparams"] == float(rate)


def test_what_the_link_costs_the_optimizer_is_planned_with_where_it_was_measured() -> None:
    measured = {"adamw_gparams": 5.0, "adamw_beside_link_gparams": 3.0, "link_beside_adamw_gbs": 80.0}
    machine = dataclasses.replace(hardware.read(), described=True)
    known, _ = calibrate.rates(dataclasses.replace(machine, rates=measured), "cuda")
    assert known["link_cost"] == pytest.approx(2.0 * 26 / 80)
    measured["adamw_beside_link_gparams"] = 5.5
    known, _ = calibrate.rates(dataclasses.replace(machine, rates=measured), "cuda")
    assert known["link_cost"] == 0.0
    del measured["link_beside_adamw_gbs"]
    known, _ = calibrate.rates(dataclasses.replace(machine, rates=measured), "cuda")
    assert "link_cost" not in known
