"""Batches: a pure function of the step, the right rows in each, padding and ends supervised as they should be."""

import json
import threading

import pytest
import torch

from megatrain.config import Config
from megatrain.data import IGNORED, Loader, inspection, prepare
from support.tiny_tokenizer import tiny_tokenizer


def dataset(tmp_path, rows, tokenizer=None, name="rows.jsonl", data=None, **sections):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"train": str(path), "seq_len": 64, "packing": False, "cache": str(tmp_path / "cache"), **(data or {})}
    config = Config.from_dict({"model": "owner/name", "data": settings, **sections})
    return prepare(config, tokenizer or tiny_tokenizer()), config


def numbered(count):
    return [{"text": f"row {number}"} for number in range(count)]


def epochs_of(loader):
    """Row ids of every step, an epoch each."""
    epochs = {}
    for step in range(loader.num_steps):
        batch = loader.batch(step)
        epochs.setdefault(batch.epoch, []).append(batch.row_ids)
    return epochs


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("batch_size", [2, 4, 3])
def test_a_run_that_goes_on_meets_the_rows_it_would_have_met(tmp_path, packing, batch_size):
    (train, _), config = dataset(
        tmp_path, numbered(20), data={"packing": packing, "seq_len": 8}, train={"batch_size": batch_size, "epochs": 3}
    )
    with Loader(train, config, micro_batch=2) as loader:
        whole = [loader.batch(step).row_ids for step in range(loader.num_steps)]
        per_epoch = loader.steps_per_epoch
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 2, 2 * per_epoch + 1):
        with Loader(train, config, micro_batch=1) as loader:
            rest = [loader.batch(step).row_ids for step in range(stop, loader.num_steps)]
        assert [sorted(ids) for ids in whole[stop:]] == [sorted(ids) for ids in rest]
        with Loader(train, config, micro_batch=2) as loader:
            assert [loader.batch(step).row_ids for step in range(stop, loader.num_steps)] == whole[stop:]


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(tmp_path):
    (train, _), config = dataset(tmp_path, numbered(20), train={"batch_size": 3, "epochs": 3, "seed": 5})
    with Loader(train, config) as loader:
        assert (loader.steps_per_epoch, loader.num_steps) == (7, 21)
        epochs = epochs_of(loader)
    for steps in epochs.values():
        assert [len(rows) for rows in steps] == [3] * 6 + [2]
        assert sorted(row for rows in steps for row in rows) == list(range(20))
    assert len({str(steps) for steps in epochs.values()}) == 3
    other = dataset(tmp_path, numbered(20), train={"batch_size": 3, "seed": 6})[1]
    with Loader(train, other) as loader:
        assert epochs_of(loader)[0] != epochs[0]


def test_without_shuffling_rows_come_in_order(tmp_path):
    (train, _), config = dataset(tmp_path, numbered(5), data={"shuffle": False}, train={"batch_size": 1, "epochs": 2})
    with Loader(train, config) as loader:
        assert [loader.batch(step).row_ids for step in range(10)] == [(n % 5,) for n in range(10)]


def test_steps_and_parts_of_epochs_are_counted(tmp_path):
    for settings, steps in [({"epochs": 0.5}, 3), ({"epochs": 1.5}, 8), ({"steps": 23}, 23), ({}, 5)]:
        (train, _), config = dataset(tmp_path, numbered(10), train={"batch_size": 2, **settings})
        with Loader(train, config) as loader:
            assert loader.num_steps == steps
            assert loader.batch(loader.num_steps - 1).step == loader.num_steps - 1
            with pytest.raises(ValueError, match="steps count from 0"):
                loader.batch(-1)


def test_the_batch_made_ahead_is_the_batch(tmp_path):
    (train, _), config = dataset(tmp_path, numbered(20), train={"batch_size": 4, "epochs": 2})
    before = threading.active_count()
    with Loader(train, config) as ahead:
        straight = [ahead.batch(step) for step in range(10)]
    for batch in reversed(straight):
        with Loader(train, config) as fresh:
            again = fresh.batch(batch.step)
        assert again.row_ids == batch.row_ids
        for one, other in zip(again.micro_batches, batch.micro_batches, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert threading.active_count() == before


def test_batch_tokens_counts_windows_and_the_last_step_takes_what_is_left(tmp_path):
    (train, _), config = dataset(
        tmp_path, numbered(40), data={"packing": True, "seq_len": 16}, train={"batch_tokens": 64, "epochs": 2}
    )
    with Loader(train, config, micro_batch=3) as loader:
        steps = [loader.batch(step) for step in range(loader.num_steps)]
    windows = [sum(len(micro["input_ids"]) for micro in batch.micro_batches) for batch in steps[: len(steps) // 2]]
    assert windows[:-1] == [4] * (len(windows) - 1)
    assert sum(windows) == train.num_sequences
    assert [len(micro["input_ids"]) for micro in steps[0].micro_batches] == [3, 1]
    assert sum(batch.num_tokens for batch in steps) == 2 * train.num_tokens


def test_without_packing_batch_tokens_bounds_the_tokens_of_a_step(tmp_path):
    rows = [{"text": "hello there " * (1 + number % 7)} for number in range(50)]
    (train, _), config = dataset(tmp_path, rows, train={"batch_tokens": 60, "epochs": 2})
    with Loader(train, config) as loader:
        epochs = epochs_of(loader)
        for step in range(loader.num_steps):
            batch = loader.batch(step)
            assert batch.num_tokens <= 60 or len(batch.row_ids) == 1
            assert batch.num_tokens == sum(batch.lengths)
    assert [sorted(row for rows in steps for row in rows) for steps in epochs.values()] == [list(range(50))] * 2
    stop = loader.num_steps - 2
    with Loader(train, config) as late:
        assert late.batch(stop).row_ids == loader.batch(stop).row_ids
    loader.close()


def test_padding_is_neither_supervised_nor_attended_to_and_like_lengths_go_together(tmp_path):
    rows = [{"text": "hello " * count} for count in (1, 9, 2, 8)]
    (train, _), config = dataset(tmp_path, rows, train={"batch_size": 4})
    with Loader(train, config, micro_batch=2, pad_id=1) as loader:
        batch = loader.batch(0)
    assert batch.row_ids == (1, 3, 2, 0)
    for micro in batch.micro_batches:
        assert micro.keys() == {"input_ids", "labels", "attention_mask"}
        padding = micro["attention_mask"] == 0
        assert (micro["labels"][padding] == IGNORED).all()
        assert (micro["input_ids"][padding] == 1).all()
        assert (micro["labels"][:, 0] == IGNORED).all()
        assert not padding.all(dim=1).any()
    assert batch.micro_batches[1]["input_ids"].shape[1] < batch.micro_batches[0]["input_ids"].shape[1]
    assert batch.num_supervised == batch.num_tokens - 4


def test_the_end_token_is_learnt_although_it_pads(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    )
    tokenizer = tiny_tokenizer(eos="</s>", pad="</s>", template=template)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    answers = ["paris", "paris is the capital of france."]
    rows = [
        {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    (train, _), config = dataset(tmp_path, rows, tokenizer, train={"batch_size": 2})
    with Loader(train, config, pad_id=tokenizer.pad_token_id) as loader:
        batch = loader.batch(0)
    (micro,) = batch.micro_batches
    assert (micro["labels"] == tokenizer.eos_token_id).sum(dim=1).tolist() == [1, 1]
    for line, answer in enumerate(reversed(answers)):
        labels = micro["labels"][line]
        assert tokenizer.decode(labels[labels != IGNORED]).strip() == answer + "</s>"
    assert ((micro["input_ids"] == tokenizer.pad_token_id) & (micro["attention_mask"] == 0)).sum() > 0
    assert batch.num_supervised == sum(
        sum(token.supervised for token in row.tokens) for row in inspection.rows(train, tokenizer)
    )
    assert ["".join(token.text for token in line) for line in inspection.batch(batch, tokenizer)] == [
        tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in reversed(rows)
    ]


def test_characters_of_several_tokens_are_shown_as_they_are(tmp_path):
    text = "a friend 🚲 in 東京, to Łódź: é"
    (train, _), _ = dataset(tmp_path, [{"text": text}])
    (row,) = inspection.rows(train, tiny_tokenizer())
    assert len(row.tokens) > len(text), "bytes are tokens here"
    assert "".join(token.text for token in row.tokens).startswith(text)
    spell = inspection._Speller(tiny_tokenizer())
    ids = tiny_tokenizer().encode("🚲a")
    assert spell(ids[1:])[-len(ids[4:]) :] == spell(ids[4:])
    assert "\ufffd" not in "".join(spell(ids[1:])), "bytes that make no character"


def test_weights_say_how_often_an_epoch_takes_a_source(tmp_path):
    for name, letter in (("a.jsonl", "a"), ("b.jsonl", "b")):
        (tmp_path / name).write_text("".join(json.dumps({"text": f"{letter} {n}"}) + "\n" for n in range(10)))
    sources = [{"path": str(tmp_path / "a.jsonl"), "weight": 2.0}, {"path": str(tmp_path / "b.jsonl"), "weight": 0.5}]
    (train, _), config = dataset(tmp_path, [], data={"train": sources}, train={"batch_size": 5, "epochs": 2})
    with Loader(train, config) as loader:
        assert loader.steps_per_epoch == 5
        epochs = [[row for rows in steps for row in rows] for steps in epochs_of(loader).values()]
    for rows in epochs:
        assert sorted(row for row in rows if row < 10) == sorted([*range(10)] * 2)
        assert sum(row >= 10 for row in rows) == 5
    assert sorted(row for rows in epochs for row in rows if row >= 10) == list(range(10, 20))
    # Both sources are met all through the epoch.
    assert any(row >= 10 for row in epochs[0][:13])


def test_evaluation_goes_over_the_data_once_in_order(tmp_path):
    (train, held_out), config = dataset(
        tmp_path, numbered(100), data={"eval": 0.3}, train={"batch_size": 8}, eval={"every": 5}
    )
    assert held_out is not None
    with Loader(held_out, config, micro_batch=4) as loader:
        batches = list(loader.eval_batches())
        assert sorted(row for batch in batches for row in batch.row_ids) == list(range(held_out.num_rows))
        assert [batch.row_ids for batch in loader.eval_batches()] == [batch.row_ids for batch in batches]
    assert sum(batch.num_tokens for batch in batches) == held_out.num_tokens
    config = dataset(
        tmp_path, numbered(100), data={"eval": 0.3}, train={"batch_size": 8}, eval={"every": 5, "max_batches": 100}
    )[1]
    with Loader(held_out, config) as loader:
        assert [batch.row_ids for batch in loader.eval_batches()] == [batch.row_ids for batch in batches]
    del train


@pytest.mark.parametrize("packing", [True, False])
def test_a_part_of_an_evaluation_is_drawn_from_all_rows_and_stays_the_same(tmp_path, packing):
    long, short = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    for path, times in ((long, 9), (short, 4)):
        path.write_text("".join(json.dumps({"text": f"{number} " * times}) + "\n" for number in range(200)))

    def measured(seed=0, **batch):
        (_, held_out), config = dataset(
            tmp_path,
            numbered(1),
            data={"eval": [str(long), str(short)], "packing": packing},
            train={"seed": seed} | (batch or {"batch_size": 8}),
            eval={"max_batches": 5},
        )
        with Loader(held_out, config) as loader:
            batches = list(loader.eval_batches())
            assert [batch.row_ids for batch in loader.eval_batches()] == [batch.row_ids for batch in batches]
        assert [batch.step for batch in batches] == [*range(5)]
        return [row for batch in batches for row in batch.row_ids]

    chosen = measured()
    assert len(set(chosen)) == len(chosen) < 400
    assert measured() == chosen
    for rows in (chosen, measured(batch_tokens=320)):
        assert sum(row < 200 for row in rows) > 4, "of the first source"
        assert sum(row >= 200 for row in rows) > 4, "and of the second"
    if not packing:  # else the seed also decides which rows share a window
        assert measured(seed=1) == chosen
