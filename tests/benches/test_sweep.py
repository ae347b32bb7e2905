"""`benches/sweep.py`: which plans are tried, in which order, and how the automatic one compares with the best found."""

import json
from typing import Any

import pytest

WORDS = ["--model", "tiny", "--batch", "4", "--seq", "16", "--device", "cpu", "--steps", "2", "--warmup", "1"]


def plan(seconds: float, group: int = 1, state: int = 0) -> dict[str, Any]:
    unit = {"activation": "keep", "update": "host"}
    units = [unit | {"state": "device" if number < state else "host"} for number in range(3)]
    return {"estimate": {"expected_step_s": seconds}, "group": group, "units": units, "items": [seconds]}


def test_sizes_divide_the_step_and_keep_to_the_tokens_of_a_micro_batch() -> None:
    from sweep import sizes

    assert sizes(32, 1024) == [2, 4, 8, 16, 32]
    assert sizes(64, 1024) == [2, 4, 8, 16, 32]
    assert sizes(24, 1024) == [2, 4, 8, 24]
    assert sizes(2, 64) == [2], "a step of few tokens is one micro-batch"


def test_candidates_are_all_combinations_of_what_is_not_fixed() -> None:
    from sweep import Candidate, candidates

    found = candidates(8, 4, [4, 8], [], [0, 4], [0], {})
    assert len(found) == len(set(found)) == (2 + 1) * 3 * 2
    assert Candidate(4, 2, None, 0) in found
    assert all(one.group == 1 for one in found if one.micro_batch == 8), "one micro-batch is one group"
    assert found[0].keys() == {"micro_batch": 4, "group": 1}
    fixed = candidates(8, 4, [2, 8], [1, 2, 4], [0, 9], [], {"micro_batch": 4, "state_on_device": 2})
    assert fixed == [Candidate(None, group, keep) for group in (1, 2) for keep in (None, 0)], "9 exceeds the layers"


def test_the_automatic_plan_is_first_then_each_kind_in_rounds_by_predicted_time() -> None:
    from sweep import AUTOMATIC, Candidate, Planned, ordered

    automatic = Planned(AUTOMATIC, 8, plan(1.0))
    same = Planned(Candidate(8, 1), 8, plan(1.0))
    fast, slower = Planned(Candidate(4, 1), 4, plan(0.9)), Planned(Candidate(4, 1, None, 1), 4, plan(0.95, state=1))
    also = Planned(Candidate(4, 1, None, 0), 4, plan(0.9))
    other, hopeless = Planned(Candidate(4, 2), 4, plan(1.05, group=2)), Planned(Candidate(2, 1), 2, plan(1.1))
    found = ordered([hopeless, same, slower, other, also, fast], automatic)
    assert found == [automatic, fast, other, slower], "of two that are the same plan, the one that asks for less"


def test_the_result_compares_means_and_counts_what_was_not_measured() -> None:
    from sweep import AUTOMATIC, Candidate, Planned, result, table

    automatic = Planned(AUTOMATIC, 8, plan(1.0), measured=[1.0, 1.1])
    best = Planned(Candidate(4, 2), 4, plan(1.05, group=2), measured=[0.9, 1.0])
    failed = Planned(Candidate(4, 1), 4, plan(0.9), error="out of memory")
    found = result([automatic, best, failed, Planned(Candidate(2, 1), 2, plan(1.2))])
    assert found["automatic_of_best"] == pytest.approx(0.95 / 1.05, abs=1e-4)
    assert found["reached"] is False
    assert found["best"]["asked"] == {"micro_batch": 4, "group": 2}
    assert (found["candidates"], found["measured"], found["failed"]) == (4, 2, 1)
    assert found["prediction_error"]["worst"] == pytest.approx(1.05 / 0.9 - 1, abs=1e-3)
    assert found["within_10_percent"] == "3 of 4"
    lines = list(table([automatic, best, failed]))
    assert lines[2].startswith("| 4, 2 |"), "the fastest first"
    assert "**automatic**" in lines[3]
    assert "out of memory" in lines[4]
    nothing = result([Planned(AUTOMATIC, 8, plan(1.0), error="it broke"), failed])
    assert nothing == {"error": "it broke", "candidates": 2}


def test_a_small_model_is_swept_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    from sweep import main

    main([*WORDS, "--micro-batches", "2,4", "--groups", "1", "--keeps", "0", "--states", "3", "--minutes", "5"])
    text = capsys.readouterr().out
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    head, automatic, *others, last = lines
    assert (head["tried"], head["step_tokens"], head["card"]) == (8, 64, "cpu")
    assert automatic["asked"] == {}
    measured = [line for line in (automatic, *others) if "measured_s" in line]
    assert len({json.dumps(line["asked"]) for line in measured}) == last["measured"] == last["candidates"]
    for line in measured:
        assert line["predicted_of_measured"] == pytest.approx(line["predicted_s"] / line["measured_s"], rel=0.05)
        for key, value in line["asked"].items():
            assert line[key] == (value + 2 if key == "keep" else value), "embedding and head are kept as well"
        assert set(line["lanes_s"]) >= {"compute", "host"}
    assert last["automatic_of_best"] <= 1.0
    assert len(last["best"]["measured_s"]) == 2 or last["best"]["asked"] == {}
    assert "**automatic**" in text


def test_plans_of_a_described_machine_are_predicted_and_a_fixed_key_is_not_varied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from sweep import main

    machine = "gpu.name=RTX 4090,gpu.memory=24GiB,gpu.capability=8.9,host.cpus=8,host.memory=64GiB"
    words = ["--model", "tiny", "--batch", "16", "--seq", "1024", "--plan-only", "--machine", machine]
    main([*words, "--set", "group=1"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[0]["card"] == "RTX 4090"
    assert len(lines) == lines[0]["different"] + 1 > 3
    assert all(line["group"] == 1 and "group" not in line["asked"] for line in lines[1:])
    assert all("measured_s" not in line for line in lines[1:])


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from sweep import main

    with pytest.raises(SystemExit):
        main([*WORDS, "--machine", "gpu.name=H100"])
    assert "--machine describes a machine that is not this one" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--model is 'nope'"):
        main(["--model", "nope"])
    with pytest.raises(SystemExit, match=r"host\.memory is missing"):
        main(["--model", "tiny", "--plan-only", "--machine", "gpu.name=H100"])


def test_what_is_planned_by_several_threads_is_what_the_planner_plans() -> None:
    from sweep import Sweep, candidates, parse

    from megatrain.planning.planner import SplitPlanner, engine_plan
    from megatrain.system import descriptions

    words = "gpu.name=RTX 4090,gpu.memory=24GiB,gpu.capability=8.9,host.cpus=8,host.memory=64GiB"
    _, request = parse(["--model", "tiny", "--batch", "4", "--seq", "1024", "--plan-only", "--machine", words])
    machine = descriptions.from_words(words.split(","), None, words)
    sweep = Sweep(request, machine, 0.0)
    found = sweep.all_planned(candidates(4, 4, [1, 2, 4], [1, 2], [0, 2], [0, 6], {}))
    assert len(found) > 20
    assert all(one.plan["units"][1]["activation"] == "recompute" for one in found if one.candidate.keep == 0)
    for one in found:
        options = engine_plan(sweep.config, "cuda", machine) | one.candidate.keys()
        del options["micro_batch"]
        alone = SplitPlanner(sweep.config, sweep.setup.decoder, "cuda", machine, sweep.rates, options)
        assert alone.plan(one.micro_batch, 4 // one.micro_batch) == one.plan
