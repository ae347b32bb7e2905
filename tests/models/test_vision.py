"""Vision-language models, tiny and random, in our engine against plain PyTorch."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

import megatrain
from megatrain.checkpoint.export import export_checkpoint
from megatrain.errors import ConfigError
from support.reference import assert_equal, batches, check_training, engine, error, loss_sum, run_reference, supervised
from support.runs import settings
from support.vision import CHIEF, IMAGE, SEEING, VIDEO, VOCAB, images, see, seeing_steps


@pytest.mark.parametrize("name", SEEING)
def test_three_steps_with_images_equal_plain_pytorch(name: str) -> None:
    ours, exact = check_training(see(name), seeing_steps(name, 3))
    assert any(part in n for n in exact.gradients for part in SEEING[name].tower)
    trained = {t.name for t in ours.decoder.tensors.values() if t.role == "trainable"}
    assert trained == set(exact.gradients)


@pytest.mark.parametrize("name", SEEING)
def test_three_steps_with_a_frozen_tower_equal_plain_pytorch(name: str) -> None:
    tower = SEEING[name].tower
    ours, _ = check_training(
        see(name),
        seeing_steps(name, 3),
        reference={"frozen": tower},
        freeze=[f"*{part}*" for part in tower],
        plan={"activation": "recompute"},
    )
    frozen = [t for t in ours.decoder.tensors.values() if any(part in t.name for part in tower)]
    assert frozen
    assert {t.role for t in frozen} == {"frozen"}


@pytest.mark.parametrize("name", CHIEF)
def test_a_trained_tower_under_a_frozen_language_model_equals_plain_pytorch(name: str) -> None:
    language = [n for n, _ in see(name).named_parameters() if "language_model" in n or "lm_head" in n]
    # torch has nothing to differentiate in a micro-batch without an image
    steps = [[batch for batch in step if "pixel_values" in batch] for step in seeing_steps(name, 3)]
    check_training(
        see(name),
        steps,
        reference={"frozen": ("language_model", "lm_head")},
        freeze=language,
        plan={"activation": "keep"},
    )


@pytest.mark.parametrize("name", CHIEF)
def test_no_plan_changes_a_number(name: str) -> None:
    found = []
    for plan in (
        {"activation": "keep"},
        {"activation": "recompute"},
        {"activation": "offload", "inputs": "host"},
        {"group": 1, "slots": 2},
    ):
        ours = engine(see(name), plan=plan)
        outputs = [ours.step(step) for step in seeing_steps(name, 2)]
        found.append(([(o.loss, o.grad_norm) for o in outputs], dict(ours.state_dict())))
    (numbers, weights), *others = found
    for other, again in others:
        assert other == numbers
        assert all(torch.equal(again[n], weights[n]) for n in weights)


@pytest.mark.parametrize("name", CHIEF)
def test_every_pixel_that_changes_changes_the_loss(name: str) -> None:
    ours = engine(see(name))
    batch = images(name, [[(2, 2), (1, 3)], [(3, 2)]])
    before = ours.evaluate([batch])
    changed = batch["pixel_values"].clone()
    changed[-1] += 1.0
    assert abs(ours.evaluate([{**batch, "pixel_values": changed}]) - before) > 1e-6 * before
    assert ours.evaluate([batch]) == before


@pytest.mark.parametrize("name", CHIEF)
def test_evaluation_and_log_probabilities_are_those_of_stock(name: str) -> None:
    model = see(name).eval()
    ours = engine(model)
    step = seeing_steps(name, 1)[0]
    with torch.no_grad():
        wanted = sum(float(loss_sum(model, b)) for b in step) / sum(supervised(b) for b in step)
        logits = model(**{k: v for k, v in step[0].items() if k != "labels"}, use_cache=False).logits
    assert abs(ours.evaluate(step) - wanted) < 1e-5 * wanted
    targets = step[0]["labels"][:, 1:]
    of_targets = logits.log_softmax(-1)[:, :-1].gather(2, targets.clamp_min(0)[..., None])[..., 0]
    assert error(ours.logprobs(step)[0], of_targets * (targets != -100)) < 1e-5


def test_the_tokens_of_one_image_of_gemma_3_see_each_other() -> None:
    model = see("gemma3")
    batch = images("gemma3", [[(2, 2), (2, 2)]])
    causal = {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}
    ours = engine(model)
    with torch.no_grad():
        both, alone = (float(loss_sum(model.eval(), b)) / supervised(b) for b in (batch, causal))
    assert abs(both - alone) > 1e-4
    assert abs(ours.evaluate([batch]) - both) < 1e-5 * both


@pytest.mark.parametrize("name", SEEING)
def test_a_stock_folder_is_read_trained_exported_and_read_by_stock_again(name: str, tmp_path: Path) -> None:
    stock = see(name).eval()
    stock.save_pretrained(tmp_path / "in")
    batch = images(name, [[(2, 2), (1, 3)], [(3, 2)]])
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with megatrain.Engine.from_pretrained(
        str(tmp_path / "in"), precision="fp32", device="cpu", memory={"gpu": "1GiB", "host": "1GiB"}
    ) as ours:
        before = ours.logprobs([batch])[0]
        ours.save_pretrained(tmp_path / "same")
        ours.step(seeing_steps(name, 1)[0])
        after = ours.logprobs([batch])[0]
        ours.save_pretrained(tmp_path / "out")
        ours.save_pretrained(tmp_path / "library", layout="library")
        ours.save(tmp_path / "step-1", step=1)
        export_checkpoint(tmp_path / "step-1", tmp_path / "checkpoint")
    source, same, out = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "same", "out"))
    assert {n: tuple(t.shape) for n, t in source.items()} == {n: tuple(t.shape) for n, t in out.items()}
    assert all(torch.equal(source[n], same[n]) for n in source)
    assert set(load_file(tmp_path / "checkpoint" / "model.safetensors")) == set(source)
    targets = batch["labels"][:, 1:]
    for folder, wanted in (
        ("same", before),
        ("out", after),
        ("library", after),
        ("step-1", after),
        ("checkpoint", after),
    ):
        again, info = AutoModelForImageTextToText.from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        with torch.no_grad():
            logits = again.eval()(**inputs, use_cache=False).logits
        found = logits.log_softmax(-1)[:, :-1].gather(2, targets.clamp_min(0)[..., None])[..., 0]
        assert error(found * (targets != -100), wanted) < 1e-5, folder
    assert error(before, after) > 1e-5


def step_without_images(name: str, seed: int) -> list[dict[str, torch.Tensor]]:
    return [images(name, [[], []], seed=seed), images(name, [[]], seed=seed + 1, padded=(3, 0))]


@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
@pytest.mark.parametrize("name", CHIEF)
def test_a_step_without_an_image_leaves_the_tower_as_it_is(name: str, update: str) -> None:
    model = see(name)
    steps = [seeing_steps(name, 1)[0], step_without_images(name, 5), seeing_steps(name, 2)[1]]
    limit = 0.5 if update == "just_in_time" else None
    exact = run_reference(model, steps, dtype=torch.float64, max_grad_norm=limit)
    plain = run_reference(model, steps, max_grad_norm=limit)
    ours = engine(model, update=update, max_grad_norm=limit)
    ours.step(steps[0])
    tower = [n for n in exact.gradients if ours.decoder.is_vision(n)]
    before = {n: (ours.weight(n), ours.optimizer_state(n)) for n in tower}
    ours.step(steps[1])
    for n, (weight, state) in before.items():
        after = ours.optimizer_state(n)
        assert torch.equal(ours.weight(n), weight), n
        assert all(torch.equal(after[m], state[m]) for m in ("exp_avg", "exp_avg_sq")), n
    ours.step(steps[2])
    weights = dict(exact.model.named_parameters())
    assert_equal(dict(ours.state_dict()), weights, [dict(plain.model.named_parameters())], "weight")
    assert tower
    for n in exact.gradients:
        count = 2 if n in tower else 3
        assert ours.optimizer_state(n)["step"] == count == int(exact.optimizer.state[weights[n]]["step"])


def test_passes_that_are_added_up_see_when_one_of_them_does() -> None:
    seen, blind = seeing_steps("llava", 1)[0][:2], step_without_images("llava", 5)
    for passes in ([seen, blind], [blind, seen]):
        ours = engine(see("llava"), plan={"accumulate": True})
        for part in passes:
            ours.forward_backward(part, normalizer=50.0)
        ours.optimizer_step()
        assert {ours.optimizer_state(n)["step"] for n, t in ours.decoder.tensors.items() if t.role == "trainable"} == {
            1
        }


def test_videos_are_merged_as_images_are() -> None:
    model = see("qwen2.5-vl")
    batch = images("qwen2.5-vl", [[(2, 2)], [(3, 2)]], padded=(4, 3))
    ids, types = batch["input_ids"].clone(), batch["mm_token_type_ids"].clone()
    ids[1][ids[1] == IMAGE] = VIDEO
    types[1] *= 2
    pixels, grid = batch.pop("pixel_values"), batch.pop("image_grid_thw")
    video = {
        **batch,
        "input_ids": ids,
        "mm_token_type_ids": types,
        "pixel_values": pixels[:16],
        "image_grid_thw": grid[:1],
        "pixel_values_videos": pixels[16:],
        "video_grid_thw": grid[1:],
    }
    check_training(model, [[video, images("qwen2.5-vl", [[], [(2, 1)]], seed=4)]] * 3)


@pytest.mark.parametrize("name", CHIEF)
def test_a_frozen_tower_keeps_what_its_file_holds(name: str, tmp_path: Path) -> None:
    stock = see(name)
    language = [n for n, _ in stock.named_parameters() if "language_model" in n or "lm_head" in n]
    for n, parameter in stock.named_parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if n in language else torch.float32)
    stock.save_pretrained(tmp_path)
    options = {"precision": "bf16", "device": "cpu", "memory": {"gpu": "1GiB", "host": "1GiB"}}
    with megatrain.Engine.from_pretrained(
        str(tmp_path), freeze=[f"*{p}*" for p in SEEING[name].tower], **options
    ) as ours:
        before = {n: ours.weight(n) for n, t in ours.decoder.tensors.items() if t.role == "frozen"}
        assert before
        own = dict(stock.named_parameters())
        assert all(torch.equal(value, own[n]) and value.dtype == torch.float32 for n, value in before.items())
        losses = [ours.step(seeing_steps(name, 1)[0]).loss for _ in range(3)]
        assert losses[2] < losses[0]
        assert all(torch.equal(value, ours.weight(n)) for n, value in before.items())


@pytest.mark.parametrize("name", CHIEF)
def test_a_plan_knows_what_a_trained_tower_keeps(name: str) -> None:
    tower = [f"*{part}*" for part in SEEING[name].tower]
    tower += ["*projector*"] if any("projector" in n for n, _ in see(name).named_parameters()) else []
    trained, frozen = (
        engine(see(name), freeze=freeze).request((8, 64), 2)["late_workspace_bytes"] for freeze in ([], tower)
    )
    weights = sum(p.numel() for n, p in see(name).named_parameters() if any(part in n for part in SEEING[name].tower))
    assert trained - frozen > 4 * weights


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_a_config_trains_it_on_text_goes_on_and_exports_it(name: str, tmp_path: Path) -> None:
    vocab, config = 320, copy.deepcopy(SEEING[name].config)
    config["text_config"]["vocab_size"] = vocab
    see(name, **config).save_pretrained(tmp_path / "model")
    text = settings(tmp_path, output={"dir": str(tmp_path / "text"), "export": "auto"}, train={"steps": 2})
    megatrain.Trainer(text).fit()
    for path in (tmp_path / "text" / "export").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    ours = settings(tmp_path, output={"dir": str(tmp_path / "run"), "export": "auto"})
    ours["model"] = {"path": str(tmp_path / "model"), "freeze": [f"*{part}*" for part in SEEING[name].tower]}
    assert megatrain.Trainer(ours).fit().step == 6
    ours["train"]["steps"] = 8
    result = megatrain.Trainer(ours).fit()
    assert result.step == 8
    again, info = AutoModelForImageTextToText.from_pretrained(result.export, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    before = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "model").named_parameters())
    for n, parameter in again.named_parameters():
        frozen = any(part in n for part in SEEING[name].tower)
        assert torch.equal(parameter, before[n]) or not frozen, n
    assert not torch.equal(again.get_input_embeddings().weight, before["model.language_model.embed_tokens.weight"])
    assert (result.export / "preprocessor_config.json").exists()


def test_the_routers_loss_is_taken_over_images_too() -> None:
    config = copy.deepcopy(SEEING["qwen3-vl-moe"].config)
    config["text_config"] |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = see("qwen3-vl-moe", **config)
    batch = images("qwen3-vl-moe", [[(2, 2), (1, 3)], [(3, 2)]], padded=(4, 3))
    ours = engine(model)
    found, wanted = ours.step([batch]), model(**batch, use_cache=False)
    wanted.loss.backward()
    assert abs(found.loss - float(wanted.loss.detach())) < 1e-5 * found.loss
    assert found.aux_loss == pytest.approx(float(wanted.aux_loss.detach()), rel=1e-5)
    for n, parameter in model.named_parameters():
        if n.endswith(("mlp.gate.weight", "attn.qkv.weight")):
            assert error(ours.gradient(n), parameter.grad) < 1e-5, n


def refused(ours: megatrain.Engine, batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours.step([batch])


@pytest.mark.parametrize("name", CHIEF)
def test_images_that_do_not_fit_their_places_are_refused(name: str) -> None:
    ours = engine(see(name))
    batch = images(name, [[(2, 2)], [(2, 2)]])
    more = batch["input_ids"].clone()
    more[0, 10] = IMAGE
    refused(
        ours,
        {**batch, "input_ids": more},
        r"micro-batch 0: pixel_values \[.* make 8 features, but input_ids hold token 90, .*, 9 times",
    )
    rest = {k: v for k, v in batch.items() if k not in ("pixel_values", "image_grid_thw")}
    refused(ours, rest, r"input_ids hold token 90, .*, 8 times, but there are no pixel_values")
    key = SEEING[name].types
    if key is not None:
        refused(ours, {**batch, key: batch[key][:, 1:]}, rf"{key} has shape \[2, 23\], but input_ids \[2, 24\]")
    before = dict(ours.state_dict())
    ours.step([batch])
    assert any(not torch.equal(before[n], value) for n, value in ours.state_dict().items())


def test_images_for_a_model_of_text_are_refused() -> None:
    from support.families import build

    batch = {**batches(1, vocab=VOCAB, seq=16)[0], "pixel_values": torch.zeros(1, 3, 16, 16)}
    refused(engine(build("llama2")), batch, "has pixel_values, but LlamaModel takes none")


def test_random_weights_are_drawn_for_every_part() -> None:
    from megatrain.models.decoder import Decoder

    for name, family in SEEING.items():
        decoder = Decoder.from_config(AutoConfig.for_model(family.kind, **family.config))
        with megatrain.Engine(decoder, device="cpu", memory={"gpu": "1GiB", "host": "1GiB"}) as ours:
            losses = [ours.step(step).loss for step in seeing_steps(name, 1)]
            assert all(0 < loss < 10 for loss in losses), name
