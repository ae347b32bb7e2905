"""Ctrl-C inside a user's script: it comes back between steps, at once or after the step, and the numbers go on."""

import contextvars
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW
from megatrain.engine import interrupt_guard
from megatrain.engine.interrupt_guard import GivenUp, InterruptGuard
from megatrain.errors import CheckpointError, ConfigError, EngineBroken
from support.hangs import HANG_SECONDS
from support.interrupts import Interrupted
from support.reference import batches, build, engine

# Steps under a hail of interrupts, each of which may arrive anywhere: in torch, in native code, between two lines.
HAIL = """
import json, os, random, signal, sys, threading, time
import torch
torch.set_num_threads(1)
from support.reference import batches, build, engine

update, interrupts, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def make():
    clip = None if update == "immediate" else 1.0
    model = build("gpt2", resid_pdrop=0.2)
    return engine(model, update=update, max_grad_norm=clip, micro_batch=(2, 32), micro_batches=2)

data = [batches(2, seed=k) for k in range(8)]
ours, wanted = make(), make()
for k in range(3):
    start = time.monotonic()
    wanted.step(data[k])
    whole = time.monotonic() - start
handled, hits = threading.Event(), 0

def hail():
    draw = random.Random(seed)
    for _ in range(interrupts):
        time.sleep(draw.uniform(0, 3 * whole))
        handled.clear()
        os.kill(os.getpid(), signal.SIGINT)
        handled.wait()

sender = threading.Thread(target=hail)
tried = 0
while True:
    try:
        if not sender.is_alive() and not hits:
            sender.start()
        while sender.is_alive():
            tried += 1
            ours.step(data[ours.num_steps % 8])
        break
    except KeyboardInterrupt:
        hits += 1
        handled.set()
sender.join()
while wanted.num_steps < ours.num_steps:
    wanted.step(data[wanted.num_steps % 8])

def same(name):
    one, other = ours.optimizer_state(name), wanted.optimizer_state(name)
    equal = all(torch.equal(one[k], other[k]) for k in ("exp_avg", "exp_avg_sq")) and one["step"] == other["step"]
    return equal and torch.equal(ours.weight(name), wanted.weight(name))

print(json.dumps({
    "hits": hits, "steps": ours.num_steps, "tried": tried,
    "different": [n for n in ours.decoder.tensors if not same(n)],
    "loss": ours.evaluate(data[0]) == wanted.evaluate(data[0]),
}))
"""


@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
def test_whenever_an_interrupt_comes_the_weights_are_those_of_whole_steps(update: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", *sys.path]), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", HAIL, update, "60", "7"],
        capture_output=True,
        check=False,
        text=True,
        timeout=HANG_SECONDS,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hits"] == 60
    assert found["steps"] > 10
    assert found["different"] == []
    assert found["loss"]


def squares(hidden: Any, head: Any, _: Any) -> Any:
    return head(hidden).float().square().sum()


def held_until(answered: threading.Event, begun: Callable[[], None]) -> Callable[..., Any]:
    """A loss function that does not end before an interrupt has been answered in the caller."""

    def loss_fn(hidden: Any, head: Any, _: Any) -> Any:
        begun()
        assert answered.wait(HANG_SECONDS), "the interrupt waits for the step"
        return squares(hidden, head, None)

    return loss_fn


def again_and_again(call: Callable[[], Any]) -> None:
    while True:
        call()


def states(ours: Any) -> list[torch.Tensor]:
    names = sorted(ours.decoder.tensors)
    return [t for n in names for t in (ours.weight(n), ours.optimizer_state(n)["exp_avg_sq"])]


def test_just_in_time_gives_a_step_up_that_goes_on(interrupt_after: Callable[[float], None]) -> None:
    ours, wanted = (engine(build()) for _ in range(2))
    data = batches(1)
    before = states(ours)
    raised = threading.Event()
    with pytest.raises(Interrupted):
        ours.step(data, loss_fn=held_until(raised, lambda: interrupt_after(0.1)))
    raised.set()
    # What was left behind is over before anything else is answered.
    assert ours.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(states(ours), before, strict=True))
    assert ours.step(data) == wanted.step(data)
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(wanted), strict=True))


def test_an_immediate_step_is_finished_before_the_interrupt_is_raised(
    interrupt_after: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, wanted = (engine(build(), update="immediate", max_grad_norm=None) for _ in range(2))
    data = batches(1)
    answered = threading.Event()
    monkeypatch.setattr(interrupt_guard.log, "warning", lambda _: answered.set())
    with pytest.raises(Interrupted):
        ours.step(data, loss_fn=held_until(answered, lambda: interrupt_after(0.1)))
    assert ours.num_steps == 1
    wanted.step(data, loss_fn=squares)
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(wanted), strict=True))
    assert ours.step(data) == wanted.step(data)


def test_a_second_interrupt_is_raised_at_once_and_leaves_an_immediate_engine_broken(
    interrupt_after: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = engine(build(), update="immediate", max_grad_norm=None)
    # The first one is answered with a warning, and then there is a second.
    monkeypatch.setattr(interrupt_guard.log, "warning", lambda _: interrupt_after(0.1))
    raised = threading.Event()
    with pytest.raises(Interrupted):
        ours.step(batches(1), loss_fn=held_until(raised, lambda: interrupt_after(0.1)))
    raised.set()
    for call in (lambda: ours.step(batches(1)), lambda: ours.num_steps, lambda: ours.set_lr(1.0)):
        with pytest.raises(EngineBroken, match="second interrupt"):
            call()
    ours.close()


def test_an_update_that_runs_long_does_not_keep_an_interrupt(interrupt_after: Callable[[float], None]) -> None:
    big = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    ours = engine(build(**big), optimizer=AdamW(lr=1e-3), plan={"threads": 1, "isa": "scalar"}, micro_batch=(1, 4))
    batch = {key: value[:1, :4] for key, value in batches(1)[0].items()}

    def interrupted_while_updating() -> bool:
        ours.step([batch])
        interrupt_after(0.01)
        with pytest.raises(Interrupted):
            again_and_again(ours.drain)
        return any(lane["lane"] == "host" for lane in ours.lanes()["lanes"])

    # On a busy machine an interrupt may come too late to find the update under way, but not each time.
    assert any(interrupted_while_updating() for _ in range(50))
    steps = ours.num_steps
    assert ours.optimizer_state(next(iter(ours.decoder.tensors)))["step"] == steps


def test_an_evaluation_gives_way_and_gradients_that_wait_stay(interrupt_after: Callable[[float], None]) -> None:
    ours, wanted = (engine(build(), micro_batch=(2, 32), micro_batches=2) for _ in range(2))
    data = batches(2)
    ours.forward_backward(data)
    interrupt_after(0.05)
    with pytest.raises(Interrupted):
        again_and_again(lambda: ours.evaluate(data))
    ours.optimizer_step()
    wanted.step(data)
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(wanted), strict=True))


def test_work_that_was_cut_off_before_it_began_never_begins() -> None:
    guard = InterruptGuard(torch.device("cpu"))
    ran: list[int] = []

    class Full:
        """A queue that an interrupt meets right after the work was put in."""

        def __init__(self, jobs: Any) -> None:
            self.jobs = jobs

        def put(self, job: Any) -> None:
            assert job.withdraw()
            self.jobs.put(job)
            raise KeyboardInterrupt

    jobs, guard._jobs = guard._jobs, Full(guard._jobs)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        guard.run(lambda: ran.append(1), finish=True)
    guard._jobs = jobs
    assert guard.run(lambda: ran.append(2), finish=True) is None
    assert ran == [2]


def test_what_the_work_sees_is_the_callers() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
    variable.set("the caller's")
    guard = InterruptGuard(torch.device("cpu"))
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            seen = guard.run(lambda: (variable.get(), torch.get_num_threads()), finish=True)
            assert seen == ("the caller's", threads)
    finally:
        torch.set_num_threads(before)
    with torch.device("meta"):
        assert guard.run(lambda: torch.empty(1).device.type, finish=True) == "meta"


def test_an_error_of_the_work_is_raised_where_it_was_asked_for() -> None:
    guard = InterruptGuard(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        guard.run(lambda: 1 // 0, finish=False)
    with pytest.raises(GivenUp):  # ours alone; nobody raises it without an interrupt
        guard.run(lambda: (_ for _ in ()).throw(GivenUp()), finish=False)


def test_the_thread_ends_with_its_engine() -> None:
    ours = engine(build())
    ours.step(batches(1))
    thread = ours._passes.guard._thread
    assert thread.is_alive()
    ours.close()
    del ours
    gc.collect()
    thread.join(timeout=HANG_SECONDS)
    assert not thread.is_alive()


def test_a_load_that_is_cut_off_leaves_an_engine_that_takes_nothing_but_another_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = engine(build())
    ours.step(batches(1))
    ours.save(tmp_path / "one")
    saved = states(ours)
    ours.step(batches(1))

    def cut(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("megatrain.system.safetensors_io.read_checked", cut)
        with pytest.raises(KeyboardInterrupt):
            ours.load(tmp_path / "one")
    for call in (lambda: ours.step(batches(1)), lambda: ours.save(tmp_path / "two")):
        with pytest.raises(EngineBroken, match="was cut off"):
            call()
    with pytest.raises(CheckpointError):
        ours.load(tmp_path / "none")
    with pytest.raises(EngineBroken, match="was cut off"):
        ours.drain()
    ours.load(tmp_path / "one")
    assert ours.num_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(states(ours), saved, strict=True))


def test_threads_that_look_at_an_engine_wait_for_its_step_and_no_longer() -> None:
    ours = engine(build())
    data, seen = batches(1), []
    watchers = [threading.Thread(target=lambda: seen.append(ours.num_steps), daemon=True) for _ in range(4)]

    def watched(hidden: Any, head: Any, _: Any) -> Any:
        for watcher in watchers:
            watcher.start()
        time.sleep(0.3)
        assert not seen
        return head(hidden).float().square().sum()

    ours.step(data, loss_fn=watched)
    for watcher in watchers:
        watcher.join(timeout=HANG_SECONDS)
    assert seen == [1, 1, 1, 1]


def test_a_second_pass_is_refused_and_leaves_the_first_alone() -> None:
    ours, wanted = (engine(build()) for _ in range(2))
    data, refused = batches(1), []

    def evaluates(hidden: Any, head: Any, _: Any) -> Any:
        try:
            ours.evaluate(data)
        except ConfigError as error:
            refused.append(str(error))
        return head(hidden).float().square().sum()

    out = ours.step(data, loss_fn=evaluates)
    assert out == wanted.step(data, loss_fn=squares)
    assert refused
    assert all("another pass of this engine is under way" in text for text in refused)
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(wanted), strict=True))


SECOND_CALLS: dict[str, Callable[[Any], Any]] = {
    "step": lambda ours: ours.step(batches(1)),
    "larger step": lambda ours: ours.step(batches(2, rows=4)),
    "forward_backward": lambda ours: ours.forward_backward(batches(1)),
    "evaluate": lambda ours: ours.evaluate(batches(1, rows=4)),
    "weight": lambda ours: ours.weight("model.norm.weight"),
    "change_plan": lambda ours: ours.change_plan({}, {}),
}


@pytest.mark.parametrize("call", SECOND_CALLS.values(), ids=SECOND_CALLS.keys())
def test_a_call_that_comes_while_another_thread_plans_is_refused(
    call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, wanted = (engine(build()) for _ in range(2))
    data, planning, answered, found = batches(1), threading.Event(), threading.Event(), []
    make = ours._runtime._make

    def slow(*given: Any) -> Any:
        if not planning.is_set():
            planning.set()
            assert answered.wait(HANG_SECONDS)
        return make(*given)

    monkeypatch.setattr(ours._runtime, "_make", slow)
    first = threading.Thread(target=lambda: found.append(ours.step(data)), daemon=True)
    first.start()
    assert planning.wait(HANG_SECONDS)
    with pytest.raises(ConfigError, match="another pass of this engine is under way"):
        call(ours)
    answered.set()
    first.join(timeout=HANG_SECONDS)
    assert found == [wanted.step(data)]
    assert ours.step(data) == wanted.step(data)
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(wanted), strict=True))


def test_gradients_are_not_dropped_while_another_thread_adds_to_them() -> None:
    ours, wanted = (engine(build(), plan={"accumulate": True}) for _ in range(2))
    first, second = batches(2)
    refused = []

    def drops(hidden: Any, head: Any, _: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:  # it has looked whether it may just before this pass began
            patch.setattr(ours._passes, "check", lambda: None)
            patch.setattr(ours._passes.guard, "settle", lambda: None)
            for call in (ours.zero_grad, ours.optimizer_step):
                with pytest.raises(ConfigError) as error:
                    call()
                refused.append(str(error.value))
        return squares(hidden, head, None)

    for one in (ours, wanted):
        one.forward_backward([first], normalizer=9.0)
        one.forward_backward([second], loss_fn=drops if one is ours else squares, normalizer=9.0)
    assert len(refused) == 2
    assert all("another pass of this engine is under way" in text for text in refused)
    assert ours.optimizer_step() == wanted.optimizer_step()
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(wanted), strict=True))


@pytest.mark.parametrize("call", ["larger step", "evaluate", "change_plan"])
def test_nothing_is_planned_while_another_thread_computes(call: str) -> None:
    ours, wanted = (engine(build()) for _ in range(2))
    data, refused = batches(1), []

    def called(hidden: Any, head: Any, _: Any) -> Any:
        def other() -> None:
            try:
                SECOND_CALLS[call](ours)
            except ConfigError as error:
                refused.append(str(error))

        # a thread that has looked whether the engine can be used just before the step began
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours._passes, "check", lambda: None)
            patch.setattr(ours._passes.guard, "settle", lambda: None)
            thread = threading.Thread(target=other, daemon=True)
            thread.start()
            thread.join(timeout=HANG_SECONDS)
        return squares(hidden, head, None)

    assert ours.step(data, loss_fn=called) == wanted.step(data, loss_fn=squares)
    assert len(refused) == 1
    assert "another pass of this engine is under way" in refused[0]
    assert ours.step(data) == wanted.step(data)
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(wanted), strict=True))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_process_cannot_use_the_engine() -> None:
    ours, data = engine(build()), batches(1)
    ours.step(data)
    inlet, outlet = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            ours.step(data)
        except BaseException as error:
            os.write(outlet, f"{type(error).__name__}: {error}".encode())
        ours.close()
        os._exit(0)
    os.close(outlet)
    _, status = os.waitpid(child, 0)
    with os.fdopen(inlet) as file:
        told = file.read()
    assert status == 0
    assert told.startswith(f"EngineBroken: this engine belongs to process {os.getpid()}, of which this one is a fork")
    assert ours.num_steps == 1
    ours.step(data)
