"""Tokens per second of `megatrain data` beside `datasets.map` with the same tokenizer and as many workers: a JSON line.

    pip install 'megatrain[datasets]'
    python benches/tokenization.py [--chat chatml|header|marked] [--rows 20000] [--workers 2] [--tokenizer FOLDER]

Both start from the same JSONL file and end with token ids on disk; neither has a cache. `datasets.map` tokenizes in
batches of 1,000 rows, once with `num_proc` processes and once in one process whose tokenizer uses all its threads, as
the library does by default; the faster of the two is what counts. Rounds alternate, so that a busy machine is as busy
for both, and each round's ratio is printed; the last key is their median.

With `--chat` rows are conversations of four messages. `datasets.map` then makes the stock template call for each row,
with its mask of the assistant's tokens where the template marks them (`marked`), and without a mask where it does not:
megatrain finds the assistant's tokens in both cases.
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


TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "header": (
        "{{ '<|system|>\nToday is ' + strftime_now('%d %b %Y') + '.<|im_end|>' }}{%- for message in messages %}"
        "{{ '<|' + message.role + '|>\n' + message.content | trim + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
    ),
    "marked": (
        "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{%- else %}"
        "{{ message.content + '<|im_end|>' }}{%- endif %}{{ '\n' }}{%- endfor %}"
    ),
}
"""Chat templates by the names of `--chat`."""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def rows(count: int) -> list[dict[str, str]]:
    """Paragraphs of the standard library's sources and documentation, over and over."""
    from megatrain.data.stdlib import documents

    parts = [part for _, text in documents("python:stdlib") for part in text.split("\n\n") if len(part) > 200]
    return [{"text": f"{index} {parts[index % len(parts)]}"} for index in range(count)]


def conversations(texts: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Rows of four texts each, as two questions with their answers."""
    roles = ("user", "assistant", "user", "assistant")
    groups = zip(*(texts[start::4] for start in range(4)), strict=True)
    return [
        {"messages": [{"role": role, "content": row["text"]} for role, row in zip(roles, group, strict=True)]}
        for group in groups
    ]


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

    marked = "{% generation" in (tokenizer.chat_template or "")

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        if "text" in batch:
            ids = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
            return {"input_ids": [[*one, end] for one in ids]}
        made = [
            tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
            for messages in batch["messages"]
        ]
        return {key: [one[key] for one in made] for key in ("input_ids", "assistant_masks") if key in made[0]}

    os.environ["TOKENIZERS_PARALLELISM"] = "true" if processes is None else "false"
    begin = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder))
    done = loaded.map(
        encode, batched=True, remove_columns=loaded.column_names, num_proc=processes, load_from_cache_file=False
    )
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
    parser.add_argument("--chat", choices=TEMPLATES, help="rows are conversations, rendered by this template")
    asked = parser.parse_args()
    texts = rows(asked.rows)
    tokenizer = (
        load_tokenizer(asked.tokenizer) if asked.tokenizer else train_bpe((row["text"] for row in texts[:4000]), 8192)
    )
    lines: list[Any] = texts
    if asked.chat:
        tokenizer.chat_template = TEMPLATES[asked.chat]
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        lines = conversations(texts)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
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
