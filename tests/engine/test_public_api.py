"""Misspelt arguments, wrapped models, and what an engine says of itself."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import megatrain
from megatrain.errors import ConfigError
from support.reference import build, engine


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: megatrain.Engine(build(), precison="fp32"), r"'precison'; did you mean precision\?"),
        (
            lambda: megatrain.Engine.from_pretrained("x", micro_batchs=1),
            r"'micro_batchs'; did you mean micro_batches\?",
        ),
        (lambda: megatrain.AdamW(weight_decy=0.1), r"'weight_decy'; did you mean weight_decay\?"),
        (
            lambda: engine(build()).step([], loss_function=len),
            r"step has no argument 'loss_function'; did you mean loss_fn",
        ),
        (lambda: engine(build()).forward_backward([], normaliser=1.0), r"'normaliser'; did you mean normalizer\?"),
        (lambda: engine(build()).save_pretrained("x", overwright=True), r"'overwright'; did you mean overwrite\?"),
        (lambda: engine(build()).optimizer_step(lr=1.0), r"optimizer_step has no argument 'lr'; it takes none"),
        (lambda: megatrain.Trainer("x.yaml", dislay=None), r"'dislay'; did you mean display\?"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_nearest_one(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_a_misspelt_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"plan: unknown key 'slotz'; did you mean slots\?"):
        engine(build(), plan={"slotz": 2})
    for name in ("micro_batch", "microbatch"):
        with pytest.raises(ConfigError, match=rf"'{name}'; .* argument of its own, micro_batch=\(rows, tokens\)"):
            engine(build(), plan={name: 2})
    with pytest.raises(ConfigError, match=r"unknown key 'beta'; did you mean betas\?"):
        megatrain.AdamW(groups=[{"params": "*", "beta": (0.9, 0.9)}])


def test_from_pretrained_takes_what_the_constructor_takes_with_the_same_defaults_and_all_is_described() -> None:
    made, opened = (inspect.signature(f).parameters for f in (megatrain.Engine, megatrain.Engine.from_pretrained))
    for name in set(made) - {"model", "load"}:
        assert opened[name].default == made[name].default, name
    text = megatrain.Engine.__init__.__doc__ or ""
    assert all(f"`{name}`" in text for name in made)


def test_an_engine_says_what_it_holds() -> None:
    ours = engine(build(), freeze=["*embed_tokens*"])
    assert repr(ours).startswith("<Engine LlamaForCausalLM, ")
    assert "trained in fp32 on cpu, not planned yet" in repr(ours)


def test_a_wrapped_model_is_not_saved_under_names_that_nothing_loads(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()
            self.config = self.inner.config

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    ours = engine(Wrapper())
    with pytest.raises(ConfigError, match=r"(?s)Wrapper wraps LlamaForCausalLM \(inner\).*state_dict="):
        ours.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
