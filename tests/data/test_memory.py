"""A set larger than memory is tokenized piece by piece: what is held does not grow with the file."""

import json

import pytest

from support.private_memory import output_of

MIB = 1 << 20


def peak(path):
    """Most private bytes beyond those before, while a file is tokenized by two threads and cut into windows."""
    said = output_of(
        f"""
        import tempfile, threading
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from megatrain.config import Config
        from megatrain.data import file_formats, prepare, tokenization

        # Smaller portions than usual, so that small files have many of them.
        file_formats.PIECE, tokenization._CHUNK_CHARACTERS = 1 << 16, 1 << 18
        words = {{"<unk>": 0, "</s>": 1, "word": 2}}
        found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>", unk_token="<unk>")
        before, most, stop = private(), [0], threading.Event()

        def watch():
            while not stop.wait(0.002):
                most[0] = max(most[0], private())

        watching = threading.Thread(target=watch)
        watching.start()
        with tempfile.TemporaryDirectory() as cache:
            data = {{"train": {str(path)!r}, "cache": cache, "workers": 2, "seq_len": 4096}}
            prepare(Config.from_dict({{"model": "owner/name", "data": data}}), tokenizer)
        stop.set()
        watching.join()
        print(most[0] - before)
        """
    )
    return int(said)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
def test_what_is_held_while_a_file_is_tokenized_does_not_grow_with_it(tmp_path, kind):
    words = " ".join(["word"] * 400)
    row = {
        "txt": words + "\n",
        "jsonl": json.dumps({"text": words}) + "\n",
        "json": json.dumps({"text": words}) + ",\n",
    }
    peaks = []
    for size in (4, 32):
        path = tmp_path / f"{size}.{kind}"
        with path.open("w") as stream:
            stream.write("[" if kind == "json" else "")
            stream.writelines(row[kind] for _ in range(size * MIB // len(row[kind])))
            stream.write('{"text": "word"}]' if kind == "json" else "")
        peaks.append(peak(path))
    assert peaks[1] - peaks[0] < 24 * MIB, [number // MIB for number in peaks]
