"""Tokens per second of `megatrain data` beside `datasets.map` with the same tokenizer and as many workers: a JSON line.

    pip install 'megatrain[datasets]'
    python benches/tokenization.py [--rows 20000] [--workers 2] [--tokenizer FOLDER]

Both start from the same JSONL file and end with token ids on disk; neither has a cache. `datasets.map` tokenizes in
batches of 1,000 rows, once with `num_proc` processes and once in one process whose tokenizer uses all its threads, as
the library does by default; the faster of the two is what counts. Rounds alternate, so that a busy machine is as busy
for both, and each round's ratio is printed; the last key is their median.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"


def rows(count: int) -> list[dict[str, str]]:
    """Paragraphs of the standard library's sources and documentation, over and over."""
    from megatrain.data.stdlib import documents

    parts = [part for _, text in documents("python:stdlib") for part in text.split("\n\n") if len(part) > 200]
    return [{"text": f"{index} {parts[index % len(parts)]}"} for index in range(count)]


def ours(file: Path, folder: Path, tokenizer: Any, workers: int) -> tuple[float, int]:
    """(seconds, tokens)"""
    from megatrain.config import Config
    from megatrain.data import prepare

    data = {"train": str(file), "cache": str(folder), "workers": workers}
    config = Config.from_dict({"model": "owner/name", "data": data})
    begin = time.perf_counter()
    train, _ = prepare(config, tokenizer)
    return time.perf_counter() - begin, sum(len(part.tokens.tokens) for part in train.parts)


def theirs(file: Path, folder: Path, tokenizer: Any, processes: int | None) -> tuple[float, int]:
    """(seconds, tokens)"""
    import datasets

    datasets.disable_progress_bars()
    end = tokenizer.eos_token_id

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*ids, end] for ids in tokenizer(batch["text"], add_special_tokens=False)["input_ids"]]}

    os.environ["TOKENIZERS_PARALLELISM"] = "true" if processes is None else "false"
    begin = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder))
    done = loaded.map(encode, batched=True, remove_columns=["text"], num_proc=processes, load_from_cache_file=False)
    seconds = time.perf_counter() - begin
    return seconds, sum(len(ids) for ids in done["input_ids"])


def main() -> None:
    """Measures and prints."""
    from megatrain.data.train_tokenizer import load_tokenizer, train_bpe

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, help="a folder; default: a BPE of 8,192 tokens trained on the rows")
    asked = parser.parse_args()
    texts = rows(asked.rows)
    tokenizer = (
        load_tokenizer(asked.tokenizer) if asked.tokenizer else train_bpe((row["text"] for row in texts[:4000]), 8192)
    )
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
        rates: dict[str, list[float]] = {"megatrain": [], "map_processes": [], "map_threads": []}
        for number in range(asked.rounds):
            folder = Path(place) / str(number)
            found = {
                "megatrain": ours(file, folder / "ours", tokenizer, asked.workers),
                "map_processes": theirs(file, folder / "processes", tokenizer, asked.workers),
                "map_threads": theirs(file, folder / "threads", tokenizer, None),
            }
            assert len({tokens for _, tokens in found.values()}) == 1, found
            for name, (seconds, tokens) in found.items():
                rates[name].append(tokens / seconds)
    ratios = [
        one / max(two, three)
        for one, two, three in zip(rates["megatrain"], rates["map_processes"], rates["map_threads"], strict=True)
    ]
    line: dict[str, Any] = {name: [round(rate) for rate in found] for name, found in rates.items()}
    print(json.dumps({**line, "workers": asked.workers, "ratio": round(statistics.median(ratios), 3)}))


if __name__ == "__main__":
    main()
