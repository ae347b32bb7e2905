"""Text from a run: which weights, on which device, and which prompts are refused."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.system import hardware
from megatrain.system.hardware import GIB
from megatrain.training import sampling
from megatrain.training.trainer import Trainer
from support.reference import build
from support.runs import settings
from support.tiny_tokenizer import tiny_tokenizer


def weights_of(folder: Path, size: int) -> Path:
    """A folder with a file of weights of this size, of which the disk holds nothing."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return folder


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB of host memory are available, and 2 GiB of a card's."""
    machine = dataclasses.replace(hardware.read(gpus=False), memory_available=8 * GIB)
    monkeypatch.setattr(hardware, "read", lambda **_: machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * GIB, 8 * GIB))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("size", "asked", "found"),
    [
        (GIB, "auto", "cuda"),
        (GIB, "cuda", "cuda"),
        (GIB, "cpu", "cpu"),
        (2 * GIB, "auto", "cpu"),
        (2 * GIB, "cpu", "cpu"),
    ],
)
def test_a_model_is_loaded_to_the_card_where_it_fits_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, asked: str, found: str
) -> None:
    with caplog.at_level(logging.WARNING, "megatrain"):
        assert sampling._device_for(weights_of(tmp_path / "model", size), asked) == found
    assert ("it generates on the CPU" in caplog.text) == (found != asked == "auto" and found == "cpu")


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("size", "device", "said"),
    [
        (2 * GIB, "cuda", r"holds 2\.00 GiB of weights, and 2\.00 GiB of the card's memory are free; give cpu"),
        (
            8 * GIB,
            "auto",
            r"holds 8\.00 GiB of weights, .* and 8\.00 GiB of host memory are available; .*eval\.samples",
        ),
        (8 * GIB, "cpu", r"8\.00 GiB of host memory are available"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tmp_path: Path, size: int, device: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        sampling.generate(weights_of(tmp_path / "model", size), "x", device=device).__next__()


def test_a_checkpoint_that_is_newer_than_the_export_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    asked = settings(tmp_path, train={"steps": 2}, output={"dir": str(run), "export": "auto"})
    Trainer(asked).fit()
    assert sampling.find_model(run) == run / "export"
    newest = run / "checkpoints/step-2"
    later = (run / "export/config.json").stat().st_mtime + 60
    os.utime(newest / "manifest.json", (later, later))
    with caplog.at_level(logging.WARNING, "megatrain"):
        assert sampling.find_model(run) == newest
    assert f"{run / 'export'} is older than {newest}" in caplog.text


class Words:
    """A tokenizer of one token a letter, whose template refuses questions."""

    chat_template = "…"
    eos_token_id = 0

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        if turns[0]["content"].endswith("?"):
            raise ValueError("no questions")
        return turns[0]["content"]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        return "".join(map(chr, ids.tolist()))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("why?", r"eval\.samples\.prompts\[1\]: the chat template cannot render it: no questions"),
        ("a" * 8, r"eval\.samples\.prompts\[1\] has 8 tokens, and data\.seq_len is 8"),
    ],
)
def test_a_prompt_after_which_nothing_can_follow_is_refused(prompt: str, said: str) -> None:
    tokenizer: Any = Words()
    with pytest.raises(ConfigError, match=said):
        sampling.check_prompts(tokenizer, ["fine", prompt], 2, 8)


def test_a_prompt_that_leaves_less_room_than_asked_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer: Any = Words()
    with caplog.at_level(logging.WARNING, "megatrain"):
        sampling.check_prompts(tokenizer, ["abcd", "abcdef"], 4, 8)
    (record,) = caplog.records
    told = "at most 2 of eval.samples.max_new_tokens = 4 follow, up to data.seq_len = 8"
    assert record.message == f"eval.samples.prompts[1] has 6 tokens: {told}"


def test_any_of_a_models_end_tokens_ends_a_sample() -> None:
    class Counts:
        """The next letter of the alphabet."""

        def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(input_ids[0, -1] + 1, 256).float()

    tokenizer: Any = Words()
    assert sampling.sample(Counts(), tokenizer, "a", 9) == "bcdefghij"
    assert sampling.sample(Counts(), tokenizer, "a", 9, ends=(ord("d"),)) == "bc"


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 0.8}, {"do_sample": False}])
def test_logits_that_are_not_finite_are_said_to_be_so(options: dict[str, Any]) -> None:
    made = tiny_tokenizer()
    model = build("llama").eval()
    ids = torch.tensor([[1, 2, 3]])
    list(sampling._stream(model, made, ids, {"max_new_tokens": 2, **options}))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="logits are not finite"):
        list(sampling._stream(model, made, ids, {"max_new_tokens": 2, **options}))
