"""Rows into sequences: nothing crosses a border, nothing is lost, what teaches nothing is counted."""

import json

import numpy as np
import pytest
import torch

from megatrain.config import Config
from megatrain.data import IGNORED, Loader, packing, prepare, shuffle
from megatrain.data.cache import Tokens
from megatrain.errors import ConfigError
from support.tiny_tokenizer import tiny_tokenizer


def tokens_of(lengths, supervised=None):
    """Rows whose tokens count up from 0 through the whole data set."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    return Tokens(
        tokens=np.arange(total, dtype=np.int32),
        supervised=np.ones(total, np.uint8) if supervised is None else np.concatenate(supervised).astype(np.uint8),
        offsets=offsets,
        places=np.zeros((len(lengths), 2), np.int64),
        largest_id=total - 1,
        endless_turns=0,
        cached=False,
    )


def spans(pieces):
    return list(zip(pieces.row.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True))


def texts(tmp_path, *lengths, **data):
    """A data set of one-token-a-letter rows with the given numbers of tokens, the end token included."""
    path = tmp_path / "rows.jsonl"
    rows = ["".join(chr(ord("A") + (row + at) % 26) for at in range(n - 1)) for row, n in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    seq_len = data.pop("seq_len", 32)
    config = Config.from_dict(
        {
            "model": "owner/name",
            "data": {"train": str(path), "seq_len": seq_len, "cache": str(tmp_path / "cache"), **data},
            "train": {"batch_size": 8},
        }
    )
    return prepare(config, tiny_tokenizer(vocab_size=258))[0], config


def test_long_rows_are_split_with_one_token_of_overlap_so_that_each_is_predicted_once():
    pieces = packing.cut(tokens_of([5, 9, 8, 15, 1]), 8, "split")
    assert spans(pieces) == [(0, 0, 5), (1, 5, 8), (1, 12, 2), (2, 14, 8), (3, 22, 8), (3, 29, 8)]
    predicted = [at for _, start, length in spans(pieces) for at in range(start + 1, start + length)]
    assert sorted(predicted) == [at for at in range(37) if at not in (0, 5, 14, 22)]
    assert [(dropped.reason, dropped.count, dropped.example) for dropped in pieces.dropped] == [
        ("no supervised token", 1, 4)
    ]


def test_long_rows_are_truncated_dropped_or_an_error_as_asked():
    tokens = tokens_of([5, 9, 8])
    assert spans(packing.cut(tokens, 8, "truncate")) == [(0, 0, 5), (1, 5, 8), (2, 14, 8)]
    dropped = packing.cut(tokens, 8, "drop")
    assert spans(dropped) == [(0, 0, 5), (2, 14, 8)]
    assert [(item.reason, item.count, item.example) for item in dropped.dropped] == [("longer than 8 tokens", 1, 1)]
    with pytest.raises(ConfigError, match=r"row 1 has 9 tokens, more than data\.seq_len \(8\)"):
        packing.cut(tokens, 8, "error")


def test_an_error_about_a_long_row_names_its_place(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2 has 40 tokens, more than data\.seq_len \(32\)"):
        texts(tmp_path, 5, 40, long_rows="error")


def test_rows_without_a_supervised_token_are_left_out_and_counted():
    masks = [[1, 0, 0], [0, 0, 1], [0] * 5 + [1], [], [0, 0, 0]]
    tokens = tokens_of([len(mask) for mask in masks], masks)
    pieces = packing.cut(tokens, 4, "truncate")
    # Row 0 supervises only its first token, which nothing predicts; row 2 loses its answer to truncation.
    assert spans(pieces) == [(1, 3, 3)]
    assert [(item.reason, item.count, item.example) for item in pieces.dropped] == [
        ("empty", 1, 3),
        ("no supervised token", 2, 0),
        ("longer than 4 tokens, and none of their first 4 tokens is supervised", 1, 2),
    ]
    # Split, row 2 keeps the part that holds its answer, and only that.
    assert spans(packing.cut(tokens, 4, "split")) == [(1, 3, 3), (2, 9, 3)]


def test_counting_supervised_tokens_does_not_depend_on_blocks():
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 9, 20000)
    supervised = generator.integers(0, 2, lengths.sum()).astype(np.uint8)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    expected = [int(supervised[s + 1 : s + n].sum()) for s, n in zip(starts, lengths, strict=True)]
    assert packing.num_supervised(supervised, starts, lengths).tolist() == expected


def test_best_fit_puts_every_piece_in_one_window_and_wastes_little():
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 65, 3000)
    pieces = packing.cut(tokens_of(lengths), 64, "split")
    sequences = packing.best_fit(pieces, 64, shuffle.order(len(pieces), 1))
    assert sorted(sequences.order.tolist()) == list(range(3000))
    sums = [int(pieces.length[sequences.pieces(at)].sum()) for at in range(len(sequences))]
    assert max(sums) <= 64
    assert sum(sums) / (64 * len(sequences)) > 0.97
    again = packing.best_fit(pieces, 64, shuffle.order(len(pieces), 1))
    assert again.order.tolist() == sequences.order.tolist()
    assert packing.best_fit(pieces, 64, shuffle.order(len(pieces), 2)).order.tolist() != sequences.order.tolist()


def test_without_shuffling_windows_keep_the_order_of_rows():
    pieces = packing.cut(tokens_of([3, 4, 5, 2, 8]), 8, "split")
    sequences = packing.in_order(pieces, 8)
    assert [sequences.pieces(at).tolist() for at in range(len(sequences))] == [[0, 1], [2, 3], [4]]


def test_orders_are_the_same_for_ever():
    assert shuffle.order(8, 0, 1).tolist() == [7, 2, 6, 3, 1, 4, 5, 0]
    assert sorted(shuffle.order(1000, 3).tolist()) == list(range(1000))
    assert shuffle.order(100, 1, 2).tolist() != shuffle.order(100, 2, 1).tolist()
    assert shuffle.order(0, 1).tolist() == []


def test_positions_restart_and_labels_never_cross_rows_in_a_window(tmp_path):
    train, config = texts(tmp_path, 9, 14, 5)
    with Loader(train, config, pad_id=3) as loader:
        batch = loader.batch(0)
    (micro_batch,) = batch.micro_batches
    assert micro_batch.keys() == {"input_ids", "labels", "position_ids"}
    ids, labels, positions = (micro_batch[name][0] for name in ("input_ids", "labels", "position_ids"))
    assert ids.shape == (32,)
    assert positions.tolist() == [*range(14), *range(9), *range(5), *range(4)]
    starts = (positions == 0).nonzero().flatten().tolist()
    assert labels[starts].tolist() == [IGNORED] * 4
    real = torch.arange(32) < 28
    inside = real & (positions > 0)
    assert torch.equal(labels[inside], ids[inside])
    assert (labels[~inside] == IGNORED).all()
    assert (ids[~real] == 3).all()
    assert batch.row_ids == (1, 0, 2)
    assert batch.lengths == (14, 9, 5)
    assert (batch.num_tokens, batch.num_supervised) == (28, 25)
    with Loader(train, config, pad_id=3, mark_padding=True) as loader:
        (marked,) = loader.batch(0).micro_batches
    assert (marked.pop("padding_mask")[0] == 1).tolist() == real.tolist()
    assert all(torch.equal(marked[name], micro_batch[name]) for name in marked)


def test_a_packed_row_gives_the_logits_that_it_gives_alone(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    train, config = texts(tmp_path, 9, 14, 5)
    with Loader(train, config) as loader:
        (micro_batch,) = loader.batch(0).micro_batches
    ids, positions = micro_batch["input_ids"], micro_batch["position_ids"]
    torch.manual_seed(0)
    for attention in ("eager", "sdpa"):
        settings = LlamaConfig(
            vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        model = LlamaForCausalLM._from_config(settings, attn_implementation=attention).eval()
        with torch.no_grad():
            packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            alone = model(input_ids=ids[:, 14:23], use_cache=False).logits
            changed = ids.clone()
            changed[:, :14] = 7
            other = model(input_ids=changed, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed[:, 14:23], alone, rtol=1e-5, atol=1e-5)
        assert torch.equal(packed[:, 14:], other[:, 14:])


def test_short_windows_are_cut_to_a_multiple_of_128(tmp_path):
    train, config = texts(tmp_path, 100, 60, seq_len=512)
    with Loader(train, config) as loader:
        assert loader.batch(0).micro_batches[0]["input_ids"].shape == (1, 256)
