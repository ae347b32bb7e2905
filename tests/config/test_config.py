"""Settings: what YAML may say, what is refused and in which words, and what resuming may change."""

import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.config import Change, Config, Duration, diff, format_size, parse_size, yaml12
from megatrain.config.diff import kind
from megatrain.config.parsing import all_keys
from megatrain.errors import ConfigError, MegatrainError


def config(**sections):
    return Config.from_dict({"model": "owner/name", **sections})


def load(tmp_path, text, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return Config.load(path, overrides)


def refused(message, **sections):
    with pytest.raises(ConfigError, match=message):
        config(**sections)


# YAML


def test_scalars_are_those_of_yaml_1_2():
    values = yaml12.load(
        "[1e-5, 1.0e-5, 2E3, .5, 3., on, yes, off, true, False, 0o17, 0x1F, 1:30, 2026-01-01, ~, null, '', 007, 1_000, "
        ".inf, +5]"
    )
    assert values[:-2] == [
        1e-5, 1e-5, 2000.0, 0.5, 3.0, "on", "yes", "off", True, False, 15, 31, "1:30", "2026-01-01", None, None, "", 7,
        "1_000",
    ]  # fmt: skip
    assert values[-2:] == [float("inf"), 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"x\.yaml:3:1: the key 'a' appears a second time"),
        ("a: {b: 1, b: 2}\n", r"x\.yaml:1:11: the key 'b' appears a second time"),
        ("a: [1\n", r"x\.yaml:2:1: expected ',' or '\]'"),
        ("a: !!python/object:os.system {}\n", r"x\.yaml:1:4: could not determine a constructor"),
        ("a: !!set {b}\n", "the tag .*set' is not supported"),
        ("a: !!bool abc\n", r"x\.yaml:1:4: 'abc' is not true or false"),
        ("a: !!int abc\n", r"x\.yaml:1:4: not a whole number"),
        ("a: !!float abc\n", r"x\.yaml:1:4: not a number"),
        ("a: " + "1" * 5000 + "\n", r"x\.yaml:1:4: not a whole number"),
        ("? [a]\n: 1\n", "a key must be a plain value"),
    ],
)
def test_bad_yaml_is_named_with_line_and_column(text, message):
    with pytest.raises(ValueError, match=message):
        yaml12.load(text, "x.yaml")


def test_what_is_dumped_reads_back_equal():
    value = {
        "a": ["on", "1e-5", "null", "1:30", "~", "", "true", "0x1F", "é\n"],
        "b": [1e-5, None, True, 3, 2.0],
        "c": {},
    }
    assert yaml12.load(yaml12.dump(value)) == value


def test_sizes_and_durations():
    assert [parse_size(text) for text in ("12GiB", "1.5 KiB", "80GB", "512", 7, "1tib")] == [
        12 << 30, 1536, 80 * 10**9, 512, 7, 1 << 40,
    ]  # fmt: skip
    assert [format_size(size) for size in (12 << 30, 1536, 80 * 10**9, 7, 0)] == ["12GiB", 1536, "78125000KiB", 7, 0]
    assert [str(Duration.parse(text)) for text in ("30min", "1.5h", "90s", "86400s", "0.5s")] == [
        "30min", "90min", "90s", "1d", "0.5s",
    ]  # fmt: skip
    for text in ("12G", "GiB", "-1GiB", "1e3GiB", "65537TiB", "9" * 400 + "GiB"):
        with pytest.raises(ValueError, match=text):
            parse_size(text)


# Reading


def test_all_wrong_settings_are_reported_at_once_each_with_its_file_and_line(tmp_path):
    text = """\
model: owner/name
lora: {r: 8}
data:
  train: [{path: rows.jsonl, wieght: 2}]
  seq_len: long
train:
  lr: -1
  betas: [0.9, 1.5]
output:
  log_evry: 3
"""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text, "train.seed=x", "data.workers=0.5")
    found = str(refused.value).splitlines()
    path = tmp_path / "run.yaml"
    assert found[0] == "6 settings are wrong:"
    expected = {
        f"  {path}:2: lora is not a setting; a configuration has model, data": "did you mean",
        f"  {path}:4: data.train.0.wieght is not a setting; did you mean data.train.0.weight?": "",
        f"  {path}:5: data.seq_len is the string 'long'": "",
        f"  {path}:10: output.log_evry is not a setting; did you mean output.log_every?": "",
        "  train.seed is the string 'x'": str(path),
        "  data.workers is 0.5": str(path),
    }
    for beginning, absent in expected.items():
        line = next(line for line in found if line.startswith(beginning))
        assert not absent or absent not in line, line
    # What a section refuses as a whole comes once its own settings are right.
    with pytest.raises(ConfigError, match=r"run\.yaml:7: train\.lr is -1\.0; it must be at least 0"):
        load(
            tmp_path,
            text[: text.index("output")].replace("lora: {r: 8}", "").replace("wieght", "weight").replace("long", "64"),
        )


def test_a_file_needs_only_a_model_and_data(tmp_path):
    loaded = load(tmp_path, "model: owner/name\ndata: rows.jsonl\n")
    assert loaded.model.path == "owner/name"
    assert loaded.data.train[0].path == str(tmp_path / "rows.jsonl")
    assert (loaded.train.epochs, loaded.train.batch_tokens, loaded.train.max_grad_norm) == (1.0, 65536, 1.0)


def test_the_effective_settings_read_back_equal(tmp_path):
    text = """
model:
  config: {model_type: llama, hidden_size: 64, rope: [1.5e-3]}
  tokenizer: {train: bpe, vocab_size: 4096}
  freeze: ["*.bias"]
data: {train: [{path: a, weight: 2, fields: {text: body}}, python:stdlib], eval: 0.05, seq_len: 512}
train:
  {steps: 10, batch_size: 4, schedule: linear, groups: [{params: ["*.norm"], lr: 1e-4}], update: immediate,
   max_grad_norm: null}
eval: {every: 5, keep_best: true, early_stop: 3, samples: {every: 5, prompts: [on]}}
memory: {gpu: 12GiB, host: auto}
output: {dir: out, save_every: 30min, export: false}
"""
    loaded = load(tmp_path, text)
    assert Config.from_dict(loaded.to_dict()) == loaded
    (tmp_path / "again").mkdir()
    assert load(tmp_path / "again", loaded.to_yaml()) == loaded
    assert loaded.output.export == "never"
    assert loaded.output.save_every == Duration(1800)
    assert loaded.train.schedule.name == "linear"
    assert loaded.model.init == "random"


def test_one_source_may_stand_for_a_list(tmp_path):
    loaded = load(tmp_path, "model: owner/name\ndata:\n  train:\n    path: python:stdlib\n  eval: 0.1\n")
    assert [(source.path, source.split) for source in loaded.data.train] == [("python:stdlib", 0.9)]
    assert [(source.path, source.split) for source in loaded.data.eval] == [("python:stdlib", 0.1)]


def test_paths_are_relative_to_the_file_and_on_the_command_line_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "conf" / "model").mkdir()
    (tmp_path / "work" / "owner").mkdir()
    (tmp_path / "work" / "owner" / "name").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    text = "model: model\ndata: {train: a.jsonl, cache: ../c}\noutput: {dir: ../run, resume: old}\n"
    loaded = load(tmp_path / "conf", text)
    assert loaded.model.path == str(tmp_path / "conf" / "model")
    assert loaded.data.train[0].path == str(tmp_path / "conf" / "a.jsonl")
    assert loaded.data.cache == str(tmp_path / "c")
    assert loaded.output.dir == str(tmp_path / "run")
    assert loaded.output.resume == str(tmp_path / "conf" / "old")
    loaded = load(tmp_path / "conf", text, "output.dir=here", "data.train.path=b.jsonl", "output.resume=never")
    assert loaded.output.dir == str(tmp_path / "work" / "here")
    assert loaded.data.train[0].path == str(tmp_path / "work" / "b.jsonl")
    assert loaded.output.resume == "never"
    # A hub id of the file stays one, whatever lies in the working directory.
    assert load(tmp_path / "conf", "model: owner/name\n", "train.lr=1").model.path == "owner/name"
    with pytest.raises(ConfigError, match=r"model\.path: .*conf/none does not exist"):
        load(tmp_path / "conf", "model: ./none\n")


def test_words_on_the_command_line_replace_the_file(tmp_path):
    text = "model: owner/name\ndata: {train: [{path: a}, {path: b}]}\n"
    text += "train: {epochs: 3, batch_tokens: 8192, schedule: linear}\n"
    loaded = load(
        tmp_path, text, "train.steps=7", "train.batch_size=2", "train.lr=2e-5", "train.schedule.warmup=0",
        "data.seq_len=128",
        "data.train.1.weight=0.5", "model.freeze=['*.bias']", "memory.gpu=1GiB",
    )  # fmt: skip
    assert (loaded.train.steps, loaded.train.epochs) == (7, None)
    assert (loaded.train.batch_size, loaded.train.batch_tokens) == (2, None)
    assert (loaded.train.lr, loaded.train.schedule.warmup, loaded.train.schedule.name) == (2e-5, 0, "linear")
    assert [source.weight for source in loaded.data.train] == [1.0, 0.5]
    assert loaded.model.freeze == ("*.bias",)
    assert loaded.memory.gpu == 1 << 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.lr"], "'train.lr' is not an override; write section.key=value"),
        (["train.lr=1", "train.lr=2"], "train.lr is given twice on the command line: 1 and 2"),
        (["train.steps=1", "train.epochs=2"], r"train.steps \(1\) and train.epochs \(2.0\) are both given"),
        (["train.lr=[1"], "the value of an override is not YAML"),
        (["data.train.path=c"], r"data.train has 2 entries; write data.train.0.path"),
        (["data.train.5.path=c"], "there are only 2 entries"),
        (["train.lr.x=1"], r"train.lr"),
        (["train.lrr=1"], r"train.lrr is not a setting; did you mean train.lr\?"),
    ],
)
def test_bad_words_on_the_command_line_are_named(tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "model: owner/name\ndata: [a, b]\ntrain: {lr: 1}\n", *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"run\.yaml: there is no such file"),
        ("", r"run\.yaml is empty"),
        ("- a\n", r"run\.yaml holds a list; expected sections"),
        ("train: {lr: 1}\n", "model is missing"),
        ("model: a\nmodel: b\n", r"run\.yaml:2:1: the key 'model' appears a second time"),
        ("model: {revision: x}\n", "model names nothing to train"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Config.load(path)
    with pytest.raises(ConfigError, match="is a folder"):
        Config.load(tmp_path)


# Keys and types


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"lrr": 1}}, r"train\.lrr is not a setting; did you mean train\.lr\?"),
        ({"trian": {}}, r"trian is not a setting; did you mean train\?"),
        (
            {"train": {"seq_len": 1}},
            r"train\.seq_len is not a setting; seq_len belongs to another section: data\.seq_len",
        ),
        ({"lr": 1}, r"lr belongs to another section: train\.lr"),
        ({"train": {"learning_rate": 1}}, r"train\.learning_rate is not a setting; did you mean train\.lr\?"),
        ({"train": {"leraning_rate": 1}}, r"train\.leraning_rate is not a setting; did you mean train\.lr\?"),
        ({"train": {"seqlen": 1}}, r"did you mean data\.seq_len\?"),
        ({"train": {"max_gradnorm": 1}}, r"did you mean train\.max_grad_norm\?"),
        ({"train": {"group": 1}}, r"did you mean train\.groups\? Else group belongs to another section: plan\.group"),
        ({"output": {"max_steps": 1}}, r"did you mean train\.steps\?"),
        ({"output": {"max_stesp": 1}}, r"did you mean train\.steps\?"),
        (
            {"data": {"train": [{"pth": "a"}]}},
            r"data\.train\.0\.pth is not a setting; did you mean data\.train\.0\.path\?",
        ),
        ({"eval": {"samples": {"promts": []}}}, r"did you mean eval\.samples\.prompts\?"),
        ({"train": {"qqqqqq": 1}}, r"train\.qqqqqq is not a setting; train has steps, epochs"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(sections, message):
    refused(message, **sections)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"lr": "fast"}}, r"train\.lr is the string 'fast'; expected a number"),
        ({"train": {"steps": 1.5}}, r"train\.steps is 1\.5; expected a whole number or null"),
        ({"train": {"steps": "1_000"}}, r"train\.steps is the string '1_000'; .*Write digits without"),
        ({"train": {"deterministic": "yes"}}, r"train\.deterministic is the string 'yes'; expected true or false"),
        ({"train": {"deterministic": 1}}, r"train\.deterministic is 1; expected true or false"),
        ({"train": {"lr": True}}, r"train\.lr is true; expected a number"),
        ({"train": {"betas": [0.9]}}, r"train\.betas is the list \[0\.9\]; expected a list of 2, each a number"),
        ({"train": {"no_decay": "bias"}}, r"train\.no_decay is the string 'bias'; expected a list, each a string"),
        ({"train": {"update": "imediate"}}, r"expected just_in_time or immediate; did you mean immediate\?"),
        ({"train": 3}, r"train is 3; expected a mapping with keys from"),
        ({"train": {"groups": [{"lr": 1}]}}, r"train\.groups\.0\.params is missing"),
        ({"memory": {"gpu": "12G"}}, r"memory\.gpu: '12G': unknown unit 'G'; .*\(or auto\)"),
        ({"train": {"batch_tokens": 2**50}}, r"train\.batch_tokens is 1125899906842624; a step has at most"),
        ({"train": {"seed": 2**64}}, r"train\.seed is 18446744073709551616; it must be below 2\*\*64"),
        ({"memory": {"gpu": 20}}, r"memory\.gpu is 20 bytes; write a unit, such as 20GiB"),
        ({"memory": {"gpu": True}}, r"memory\.gpu is true; expected a size such as 12GiB or auto"),
        ({"output": {"save_every": "30 parsecs"}}, r"output\.save_every: '30 parsecs' is not a duration"),
        ({"device": "gpu"}, r"device is the string 'gpu'; expected auto or cuda or cpu"),
        ({"data": {"train": 3}}, r"data\.train is 3; expected a list"),
        ({"data": {"train": "a", "eval": 2}}, r"data\.eval is 2; a fraction between 0 and 1"),
        ({"data": {"train": "a", "eval": 0}}, r"data\.eval is 0; .*null turns it off"),
        ({"data": {"train": "a", "eval": 0.0}}, r"data\.eval is 0\.0; .*null turns it off"),
        ({"data": {"train": "a", "eval": False}}, r"data\.eval is false; .*null turns it off"),
        ({"data": {"train": "a", "fields": {}}}, r"fields belongs to another section: data\.train\.fields"),
    ],
)
def test_a_wrong_type_names_key_value_and_what_was_expected(sections, message):
    refused(message, **sections)


def test_a_mapping_from_another_reader_may_hold_numbers_as_strings():
    read = yaml.safe_load("lr: 2e-3\nsteps: '20'\nbetas: [9e-1, 0.95]\nmax_grad_norm: null\n")
    assert read["lr"] == "2e-3", "what that reader makes of it"
    train = config(train=read, output={"save_every": "200"}).train
    assert (train.lr, train.steps, train.betas, train.max_grad_norm) == (2e-3, 20, (0.9, 0.95), None)
    named = config(data={"train": [{"path": "a", "split": "2024"}]}).data.train[0]
    assert named.split == "2024", "where a string fits, it stays one"
    refused(r"train\.lr is the string '1_0\.5'", train={"lr": "1_0.5"})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"lr": -1}}, r"train\.lr is -1\.0; it must be at least 0"),
        ({"train": {"lr": float("nan")}}, r"train\.lr is nan; it must be a finite number"),
        ({"train": {"lr": 10**400}}, r"train\.lr: a whole number of 1329 bits; it must have at most 128"),
        ({"train": {"steps": 10**400}}, r"train\.steps: a whole number of 1329 bits"),
        ({"train": {"lr": 1e300}}, r"train\.lr is 1e\+300; updates are computed in fp32"),
        ({"train": {"groups": [{"params": ["a"], "weight_decay": 1e39}]}}, r"train\.groups\.weight_decay is 1e\+39"),
        ({"train": {"batch_size": 2**70}}, r"train\.batch_size is \d+; it must be at most 2147483647"),
        ({"memory": {"host": 10**30}}, r"memory\.host: 10+ is more than any machine has; write at most 65536TiB"),
        ({"train": {"betas": [0.9, 1]}}, r"train\.betas holds 1\.0; each must be at least 0 and below 1"),
        ({"train": {"epochs": 0}}, r"train\.epochs is 0\.0; it must be above 0"),
        ({"train": {"max_grad_norm": 0}}, r"train\.max_grad_norm is 0\.0; .*For no clipping write null"),
        ({"data": {"seq_len": 1}}, r"data\.seq_len is 1; it must be at least 2"),
        ({"data": {"train": [{"path": "a", "weight": 0}]}}, r"weight of .*a is 0\.0; it must be above 0"),
        ({"data": {"train": [{"path": "a", "split": 1.5}]}}, r"split of .*a is 1\.5; it must be between 0 and 1"),
        ({"data": {"train": [{"path": "a", "fields": {"txt": "b"}}]}}, r"fields of .*: 'txt' is not one of text"),
        ({"plan": {"slots": 0}}, r"plan\.slots is 0; it must be at least 1"),
        ({"plan": {"keep": -1}}, r"plan\.keep is -1; it must be at least 0"),
        ({"plan": {"mlp_tiles": 0}}, r"plan\.mlp_tiles is 0; it must be auto or at least 1"),
        (
            {"plan": {"mlp_tiles": 4, "fragments": "whole"}},
            r"plan\.mlp_tiles is 4, .* plan\.fragments is whole; leave one of them out",
        ),
        ({"plan": {"keep": 2, "activation": "recompute"}}, r"plan\.keep is 2, .* plan\.activation is recompute"),
        ({"plan": {"offload": 2, "activation": "recompute"}}, r"plan\.offload is 2, and plan\.activation is recompute"),
        ({"plan": {"offload": -1}}, r"plan\.offload is -1; it must be at least 0"),
        (
            {"plan": {"sent_experts": "routed", "fragments": "halves"}},
            r"plan\.sent_experts is routed, .* plan\.fragments is halves",
        ),
        ({"plan": {"sent_experts": "all"}}, r"plan\.sent_experts is all, .*; write plan\.fragments: experts"),
        ({"plan": {"slabs": 2}}, r"plan\.slabs is 2, .*; leave it out, or write train\.update: immediate"),
        ({"plan": {"group": 0}}, r"plan\.group is 0; it must be at least 1"),
        ({"plan": {"large_group": 0}}, r"plan\.large_group is 0; it must be at least 1"),
        (
            {"plan": {"group": 4, "large_group": 2}},
            r"plan\.group is 4, and plan\.large_group is 2, which must be at least",
        ),
        ({"plan": {"keep": 1, "large_keep": 2}}, r"plan\.large_keep is 2, and plan\.keep is 1, which must be at least"),
        ({"plan": {"large_keep": -1}}, r"plan\.large_keep is -1; it must be at least 0"),
        ({"plan": {"threads": 0}}, r"plan\.threads is 0; it must be at least 1"),
        ({"plan": {"stage_buffers": 1}}, r"plan\.stage_buffers is 1; it must be at least 2"),
        ({"plan": {"inputs": "disk"}}, r"plan\.inputs is the string 'disk'; expected device or host"),
        ({"output": {"keep": 0}}, r"output\.keep is 0; it must be at least 1"),
    ],
)
def test_a_value_out_of_range_is_named(sections, message):
    refused(message, **sections)


# Contradictions


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"steps": 1, "epochs": 1}}, r"train\.steps \(1\) and train\.epochs \(1\.0\) are both given"),
        ({"train": {"batch_tokens": 1, "batch_size": 1}}, r"train\.batch_tokens \(1\) and train\.batch_size \(1\)"),
        ({"train": {"update": "immediate"}}, r"train\.update: immediate .*train\.max_grad_norm is 1\.0"),
        ({"train": {"batch_tokens": 5000}}, r"train\.batch_tokens \(5000\) .*data\.seq_len \(4096\).* 4096 or 8192"),
        ({"train": {"batch_tokens": 100}}, r"train\.batch_tokens \(100\) is less than data\.seq_len \(4096\)"),
        (
            {"train": {"batch_size": 2}, "plan": {"micro_batch": 3}},
            r"plan\.micro_batch \(3\) .*train\.batch_size \(2\)",
        ),
        ({"plan": {"micro_batch": 17}}, r"plan\.micro_batch \(17\) is more than the 16 windows of a step"),
        ({"train": {"precision": "fp32", "grad_precision": "bf16"}}, r"train\.precision: fp32 .*train\.grad_precision"),
        (
            {"train": {"lr": 1e-5, "schedule": {"min_lr": 1e-4}}},
            r"train\.schedule\.min_lr \(0\.0001\) is above train\.lr",
        ),
        (
            {"train": {"steps": 5, "schedule": {"warmup": 10}}},
            r"train\.schedule\.warmup \(10 steps\) .*train\.steps \(5\)",
        ),
        (
            {"train": {"steps": 1000, "schedule": {"name": "wsd", "warmup": 800, "decay": 0.5}}},
            r"decay \(500 steps\) after a warm-up of 800 .*\(1000\); .*shorten the warm-up",
        ),
        (
            {"train": {"steps": 1000, "schedule": {"name": "wsd", "warmup": 0.6, "decay": 500}}},
            r"decay \(500 steps\) after a warm-up of 600 .*train\.steps \(1000\)",
        ),
        (
            {"train": {"steps": 10, "schedule": {"name": "wsd", "warmup": 0.6, "decay": 0.5}}},
            r"decay \(5 steps\) after a warm-up of 6 .*train\.steps \(10\)",
        ),
        ({"eval": {"early_stop": 2}}, r"eval\.early_stop has no effect without data\.eval"),
        (
            {"data": {"train": "a", "eval": [{"path": "b", "weight": 0.5}]}},
            r"weight of .*b in data\.eval is 0\.5 and has no effect",
        ),
        (
            {"data": {"train": "a", "eval": {"first": 0.1, "second": 0.2}}},
            r"data\.eval\.first and data\.eval\.second are fractions of the training data",
        ),
        ({"train": {"epochs": 1e9}}, r"train\.epochs is 1e\+09; it must be at most 1,000,000"),
        ({"output": {"dir": "run\ud800"}}, r"output\.dir: '.*run.ud800' holds half a surrogate pair at character"),
        ({"plan": {"slots": 2**33}}, r"plan\.slots is 8589934592; it must be at most 2147483647"),
        ({"plan": {"threads": 10**6}}, r"plan\.threads is 1000000; it must be at most 4096"),
        ({"eval": {"every": 2}}, r"eval\.every has no effect without data\.eval"),
        ({"eval": {"keep_best": True}}, r"eval\.keep_best needs data\.eval"),
        ({"data": {"train": "a", "eval": "b"}, "eval": {"early_stop": 2}}, r"eval\.early_stop .*without eval\.every"),
        ({"eval": {"samples": {"every": 5}}}, r"eval\.samples\.every has no effect without eval\.samples\.prompts"),
        ({"eval": {"samples": {"prompts": ["a"]}}}, r"eval\.samples\.prompts has no effect without"),
        (
            {"data": {"train": [{"path": "a", "split": 0.97}], "eval": [{"path": "a", "split": 0.05}]}},
            r"data\.train and data\.eval share rows of .*split 0\.97 and split 0\.05",
        ),
        (
            {"data": {"train": [{"path": "a", "split": "train"}], "eval": 0.05}},
            r"data\.eval: 0\.05 cannot .*split 'train'",
        ),
        ({"plan": {"state_on_disk": 2}}, r"plan\.state_on_disk is 2, and no disk is named"),
        ({"plan": {"weights_on_disk": 2}}, r"plan\.weights_on_disk is 2, and no disk is named"),
        ({"plan": {"inputs_on_disk": 2}}, r"plan\.inputs_on_disk is 2, and no disk is named"),
        (
            {"plan": {"inputs_on_disk": 2, "inputs": "device"}, "memory": {"nvme": {"path": "d"}}},
            r"plan\.inputs_on_disk \(2\) and plan\.inputs \(device\)",
        ),
        (
            {"plan": {"state_on_disk": 2, "weights_on_disk": 3}, "memory": {"nvme": {"path": "d"}}},
            r"plan\.weights_on_disk \(3\) is more than plan\.state_on_disk \(2\)",
        ),
        (
            {"plan": {"state_on_disk": 2, "updates_on_device": 1}, "memory": {"nvme": {"path": "d"}}},
            r"plan\.state_on_disk \(2\) and plan\.updates_on_device \(1\)",
        ),
        ({"memory": {"nvme": {"path": ["d", "d"]}}}, r"memory\.nvme\.path names .* twice"),
        ({"train": {"moments": "4bit"}}, r"train\.moments"),
        ({"train": {"master": "24bit", "precision": "fp32"}}, r"train\.precision: fp32 .*train\.master: 24bit"),
        (
            {"train": {"check_every": 10, "update": "immediate", "max_grad_norm": None}},
            r"train\.check_every compares .*write train\.update: just_in_time",
        ),
        (
            {"train": {"check_every": 10}, "device": "cuda"},
            r"train\.check_every compares .*train\.deterministic: true; set it",
        ),
        ({"model": {"path": "a", "config": {"model_type": "llama"}}}, r"model\.path and model\.config are both given"),
        ({"model": {"config": {"hidden_size": 4}}}, r"model\.config has no model_type"),
        ({"model": {"config": {"model_type": "llama"}, "revision": "x"}}, r"model\.revision has no effect"),
        ({"model": {"path": "/", "revision": "x"}}, r"model\.revision has no effect on model\.path /"),
    ],
)
def test_a_contradiction_names_both_settings(sections, message):
    refused(message, **sections)


@pytest.mark.parametrize(("warmup", "decay"), [(0.7, 0.3), (0.03, 0.97), (800, 0.2), (0.9, 100), (0, 1000)])
def test_a_warm_up_and_a_decay_may_be_the_whole_run(warmup, decay):
    schedule = {"name": "wsd", "warmup": warmup, "decay": decay}
    assert config(train={"steps": 1000, "schedule": schedule}).train.schedule.decay == decay
    assert config(train={"steps": 1, "schedule": "wsd"}).train.schedule.decay == 0.2


def test_a_default_counts_as_not_given():
    assert config(train={"steps": 3}).train.epochs is None
    assert config(train={"batch_size": 3}).train.batch_tokens is None
    assert config(data={"seq_len": 3000}).train.batch_tokens == 63000
    assert config(data={"seq_len": 100_000}).train.batch_tokens == 100_000
    assert config(train={"precision": "fp32"}).train.grad_precision == "fp32"
    assert config().run_plan("bf16").train.grad_precision == "bf16"
    assert config().run_plan("fp32").train.grad_precision == "fp32"
    assert config(train={"grad_precision": "fp32"}).run_plan("bf16").train.grad_precision == "fp32"
    parted = config(data={"train": "a", "eval": 0.1})
    assert parted.run_plan("bf16").data == parted.data
    assert config(train={"update": "immediate", "max_grad_norm": None}).train.max_grad_norm is None


def test_what_a_verb_needs_is_asked_for_by_that_verb():
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        config().require("data")
    with pytest.raises(ConfigError, match=r"output\.dir is not set"):
        config().require("output")
    bare = Config.from_dict({"model": {"config": {"model_type": "llama"}}, "data": "python:stdlib"})
    with pytest.raises(ConfigError, match=r"model\.tokenizer is not set"):
        bare.require("data")
    config(data="python:stdlib", output={"dir": "out"}).require("data", "output")


# Resume


def test_changes_are_told_apart_by_what_they_change():
    old = config(data={"train": "a", "eval": 0.1}, output={"dir": "x"})
    new = config(
        model="owner/other", data={"train": "a", "eval": 0.2, "workers": 3, "unused": "error"},
        train={"seed": 1, "lr": 2e-5, "steps": 10}, plan={"slots": 3}, output={"dir": "y"},
    )  # fmt: skip
    identity, course, place = diff(old, new)
    assert [change.key for change in identity] == ["data.train.0.split", "model.path", "train.seed"]
    assert [change.key for change in course] == ["data.eval.0.split", "train.epochs", "train.lr", "train.steps"]
    assert [change.key for change in place] == ["data.unused", "data.workers", "output.dir", "plan.slots"]
    assert Change("train.lr", 1e-05, 2e-05) in course
    assert str(Change("train.max_grad_norm", 1.0, None)) == "train.max_grad_norm: 1.0 → null"
    assert diff(old, old) == ([], [], [])


def test_every_setting_has_a_kind():
    assert {kind(key) for key in all_keys(Config)} == {"identity", "course", "place"}


# Shape of the module


def test_every_setting_is_documented_and_every_class_frozen():
    import inspect

    from megatrain.config import schema

    for _, section in inspect.getmembers(schema, dataclasses.is_dataclass):
        if section is Duration:
            continue
        assert section.__dataclass_params__.frozen
        assert hasattr(section, "__slots__")
        lines = [line.strip() for line in inspect.getsource(section).splitlines()]
        for field in dataclasses.fields(section):
            assert field.kw_only, field.name
            at = next(at for at, line in enumerate(lines) if line.startswith(f"{field.name}:"))
            assert lines[at + 1].startswith('"""'), f"{section.__name__}.{field.name} has no docstring"


def test_every_error_class_is_one_of_ours():
    from megatrain import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), MegatrainError)
    assert typing.get_type_hints(ConfigError) is not None


def test_reading_a_configuration_imports_no_torch():
    script = "import sys, megatrain.config; print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("described", "seq_len"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 1 << 17}, 4096),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", "factor": 32.0}}, 4096),
        ({"max_position_embeddings": "many"}, 4096),
        ({}, 4096),
    ],
)
def test_the_default_length_is_the_models_where_it_has_fewer_positions(
    described: dict[str, Any], seq_len: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **described}))
    written: list[dict[str, Any]] = [{"config": {"model_type": "llama", **described}}, {"path": str(tmp_path)}]
    for model in written:
        caplog.clear()
        config = Config.from_dict({"model": model})
        assert config.data.seq_len == seq_len
        assert ("data.seq_len is not given" in caplog.text) == (seq_len < 4096)
        assert Config.from_dict(config.to_dict()) == config
        assert Config.from_dict({"model": model, "data": {"seq_len": 4096}}).data.seq_len == 4096
        assert Config.from_dict({"model": model}, ["data.seq_len=256"]).data.seq_len == 256
