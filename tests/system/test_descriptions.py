"""Machines in writing: what comes back as it was written, and what no machine can have, refused by its key."""

import dataclasses
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.planning import calibrate, presets
from megatrain.system import descriptions
from megatrain.system.hardware import GIB, Machine
from support.plans import answer, printed


def test_a_description_comes_back_as_it_was_written() -> None:
    document = {
        "name": "one H100",
        "host": {"memory": "1500GiB", "cpus": 64},
        "gpu": {"name": "H100", "memory": "80GiB", "capability": [9, 0]},
        "disk": {"free": "4TiB", "count": 2, "read_gbs": 6, "write_gbs": 5},
        "rates": {"h2d_gbs": 55, "matmul_tflops": 746},
    }
    found = descriptions.from_description(document, "h100.yaml")
    assert found.host_budget() > 1400 * GIB
    assert found.gpu is not None
    assert found.gpu.total_bytes == 80 * GIB
    assert (found.disk_free, found.state_drives) == (8192 * GIB, 2)
    assert found.rates == {"h2d_gbs": 55, "matmul_tflops": 746, "state_read_gbs": 12, "state_write_gbs": 10}
    again = descriptions.from_description(descriptions.describe(found), "again")
    same = {"name": "", "memory_source": ""}
    assert dataclasses.replace(again, **same) == dataclasses.replace(found, **same)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "mapping"),
        ({"hosts": {}}, "hosts"),
        ({"host": {"memory": "1GiB", "ram": 3}}, "host.ram"),
        ({"host": {}}, "host.memory"),
        ({"host": 64}, "host must be a mapping"),
        ({"host": {"memory": "much"}}, "host.memory"),
        ({"host": {"memory": 1 << 70}}, "host.memory"),
        ({"host": {"memory": True}}, "host.memory"),
        ({"host": {"memory": "1GiB", "total": "2"}, "disk": {"free": -1}}, "disk.free"),
        ({"host": {"memory": "1GiB", "cpus": 0}}, "host.cpus"),
        ({"host": {"memory": "1GiB"}, "gpu": {"name": "H100"}}, "gpu.memory"),
        ({"host": {"memory": "1GiB"}, "gpu": {"memory": "1GiB", "capability": 9}}, "gpu.capability"),
        ({"host": {"memory": "1GiB"}, "gpu": {"memory": "1GiB", "count": 1 << 40}}, "gpu.count"),
        ({"host": {"memory": "1GiB"}, "rates": {"h2d_gbs": -1}}, "rates.h2d_gbs"),
        ({"host": {"memory": "1GiB"}, "rates": {"h2d_gbs": float("inf")}}, "rates.h2d_gbs"),
        ({"host": {"memory": "1GiB"}, "rates": {"h2d_gbs": float("nan")}}, "rates.h2d_gbs"),
        ({"host": {"memory": "1GiB"}, "rates": {"h2d_gb": 25}}, "rates.h2d_gb; did you mean rates.h2d_gbs?"),
        ({"host": {"memory": "1GiB"}, "disk": {"count": 2}}, "disk.free is missing"),
        ({"host": {"memory": "1GiB"}, "disk": {"count": 0, "free": "1TB"}}, "disk.count"),
        ({"host": {"memory": "1GiB"}, "disk": {"read_gbs": 0}}, "disk.read_gbs"),
        ({"host": {"memory": "1GiB"}, "disk": {"read_gbs": 6}, "rates": {"state_read_gbs": 6}}, "both given"),
    ],
)
def test_a_wrong_description_is_refused_by_its_key(document: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        descriptions.from_description(document, "machine.yaml")


def by_words(*words: str, base: Machine | None = None) -> Machine:
    return descriptions.from_words(list(words), base, "words")


def test_a_machine_by_its_numbers_is_the_one_that_a_file_with_them_describes() -> None:
    words = by_words(
        "gpu.name=RTX 4090",
        "gpu.memory=24GiB",
        "gpu.capability=8.9",
        "host.memory=256GiB",
        "host.cpus=16",
        "disk.count=2",
        "disk.free=4TB",
        "disk.write_gbs=5.5",
        "rates.h2d_gbs=12",
        "rates.adamw_gparams=2",
    )
    file = descriptions.from_description(
        {
            "host": {"memory": "256GiB", "cpus": 16},
            "gpu": {"name": "RTX 4090", "memory": "24GiB", "capability": [8, 9]},
            "disk": {"count": 2, "free": "4TB", "write_gbs": 5.5},
            "rates": {"h2d_gbs": 12, "adamw_gparams": 2},
        },
        "words",
    )
    assert words == file
    rates, _ = calibrate.rates(words, "cuda")
    assert (rates["h2d_gbs"], rates["d2h_gbs"], rates["state_write_gbs"]) == (12, 25, 11)
    assert rates["state_read_gbs"] == 2 * calibrate.nominal(by_words("host.memory=1GiB"), "cpu")["state_read_gbs"]
    assert by_words("gpu=null", base=file).gpu is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rtx4090,host.memroy=2GiB", "unknown key host.memroy; did you mean host.memory?"),
        ("rtx4090,memory=2GiB", "unknown key 'memory'"),
        ("rtx4090,host.memory", "'host.memory' is no key=value"),
        ("rtx4090,host.memory=", "is no key=value"),
        ("rtx4090,gpu.memory=lots", "gpu.memory: 'lots' is not a size"),
        ("rtx4090,disk.count=two", "disk.count must be a positive whole number"),
        ("rtx4090,gpu.capability=high", "gpu.capability must be two numbers"),
        ("rtx4090,rates.h2d_gbs=1e9", "rates.h2d_gbs must be a positive number"),
        ("gpu.memory=24GiB", "host.memory is missing"),
        ("gpu=24GiB,host.memory=1GiB", "gpu must be a mapping"),
        ("rtx4900,host.memory=1GiB", "did you mean rtx4090?"),
    ],
)
def test_a_wrong_number_on_the_command_line_is_refused_by_its_key(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny", "--machine", given]) == 2
    assert said in capsys.readouterr().err


def test_help_explains_every_key_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = capsys.readouterr().out
    for section, keys in {**descriptions.KEYS, "rates": descriptions.UNITS}.items():
        for key, what in keys.items():
            assert f"{section}.{key}: {what}" in said


def test_what_is_given_is_no_longer_called_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "tiny", "--machine", "rtx4090,host.memory=64GiB")
    assert "assumed are 16 processors and the card's nominal rates" in said
    machine = presets.changed("h100", ["host.memory=64GiB", "host.cpus=8", "rates.h2d_gbs=55"], "h100")
    assert machine.assumed == ""
    assert machine.memory_available == 64 * GIB


def test_drives_of_a_described_machine_hold_state_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen2.5-7b", "train.batch_size=4", "data.seq_len=1024", "--machine")
    machine = "gpu.name=RTX 4090,gpu.memory=24GiB,host.memory=48GiB,disk.free=200GB,disk.read_gbs=5,disk.write_gbs=4"
    assert main(["plan", *words, machine]) == 2, "no drives were described for state"
    capsys.readouterr()
    one, two = (answer(capsys, *words, f"{machine},disk.count={count}") for count in (1, 2))
    for found, count in ((one, 1), (two, 2)):
        disk = found["state_on_disk"]
        assert disk["bytes"] == found["plan"]["totals"]["disk"] > 0
        assert disk["seconds"] == pytest.approx(disk["bytes"] / (count * 4e9))
        assert found["budget"]["disk"] == pytest.approx(0.95 * count * 200e9, rel=1e-6)
    assert two["expected_step_s"] < one["expected_step_s"]
