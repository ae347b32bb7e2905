"""Dropout and the noise of routers are drawn from the engine's generator: other threads change nothing."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megatrain.engine.keyed_random import KeyedRandom
from support import families
from support.reference import batches, build, engine

CPU = torch.device("cpu")
GPT2 = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def elsewhere(draw: Callable[[], Any]) -> None:
    """Draws from torch's default generator on another thread, now."""
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()


def results(kind: str, disturbed: bool, monkeypatch: pytest.MonkeyPatch, **plan: Any) -> list[Any]:
    """Losses, norms and weights of two steps, with or without another thread that draws before every matmul."""
    model = build(kind, **GPT2) if kind == "gpt2" else families.build(kind, experts="eager")
    ours = engine(model, micro_batch=(2, 32), micro_batches=2, plan=plan)
    with monkeypatch.context() as patch:
        if disturbed:
            for owner, name in ((torch.nn.Module, "_call_impl"), (F, "scaled_dot_product_attention")):
                plain = getattr(owner, name)

                @functools.wraps(plain)
                def beside(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
                    elsewhere(lambda: torch.rand(3))
                    return plain(*args, **kwargs)

                patch.setattr(owner, name, beside)
            patch.setattr(torch.nn.Module, "__call__", torch.nn.Module._call_impl)
        outs = [ours.step(batches(2, seed=seed, vocab=96)) for seed in range(2)]
    return [*((out.loss, out.grad_norm) for out in outs), *(ours.weight(name) for name in ours.decoder.tensors)]


@pytest.mark.parametrize("kind", ["gpt2", "phimoe"])
@pytest.mark.parametrize("activation", ["keep", "offload", "recompute"])
def test_a_thread_that_draws_from_torchs_generator_changes_no_bit(
    kind: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = results(kind, False, monkeypatch, activation="keep")
    found = results(kind, True, monkeypatch, activation=activation)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_masks_are_those_that_torch_draws_with_the_same_seed() -> None:
    random, values = KeyedRandom(CPU), torch.randn(64, 32)
    random.seed(7)
    elsewhere(lambda: torch.rand(100))
    with random:
        ours = F.dropout(values, 0.3)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        assert torch.equal(ours, F.dropout(values, 0.3))


@pytest.mark.parametrize(
    "draw",
    [
        lambda _: torch.rand(3), lambda _: torch.randn(2, 2), lambda _: torch.randint(9, (4,)), torch.rand_like,
        torch.randn_like, lambda _: torch.randint(5, 9, (4,)), lambda _: torch.randperm(9), torch.bernoulli,
        lambda x: torch.empty_like(x).uniform_(), lambda x: torch.multinomial(x, 2), lambda x: F.dropout(x, 0.5),
        lambda x: torch.normal(x, 1.0), lambda x: F.rrelu(x - 0.5, training=True),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: F.gumbel_softmax(x), lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
        lambda x: torch.randint_like(x, 9),
    ],
)  # fmt: skip
def test_every_operation_that_draws_follows_our_generator_alone(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    random, values, found = KeyedRandom(CPU), torch.rand(8, 8, generator=torch.Generator().manual_seed(1)), []
    for disturb in (False, True):
        random.seed(5)
        random.drew = False
        if disturb:
            elsewhere(lambda: torch.rand(100))
        with random:
            found.append(draw(values))
        assert random.drew
    assert torch.equal(*found)


def test_dropout_without_a_generator_of_its_own_scales_what_stays() -> None:
    random, values = KeyedRandom(CPU), torch.randn(100, 100)
    random.seed(3)
    with random:
        dropped, kept = torch.ops.aten.native_dropout(values, 0.25, True)
    assert torch.equal(dropped, torch.where(kept, values * (1 / 0.75), 0.0))
    assert 0.70 < float(kept.float().mean()) < 0.80


def test_a_layer_that_draws_nothing_is_called_without_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = engine(build(), micro_batch=(2, 32), micro_batches=1)
    ours.step(batches(1))
    entered: list[bool] = []
    monkeypatch.setattr(KeyedRandom, "__enter__", lambda _: entered.append(True))
    ours.step(batches(1))
    assert not entered
