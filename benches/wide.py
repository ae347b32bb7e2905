"""Writes folders of models with the true widths of large ones and few layers, for `megatrain bench` and `plan`.

    python benches/wide.py OUT [--layers 3] [--vocab 32768]
    megatrain bench --model OUT/qwen2.5-72b …

A layer costs the same whatever the number of layers, so a step of three shows what one of all takes. Embedding and head
of a large vocabulary need more of a small card than the layers do, so another one can be asked for.
"""

import argparse
from pathlib import Path

from transformers import AutoConfig

from megatrain.models.presets import SHAPES


def main() -> None:
    """Writes one folder with a `config.json` for each model, and prints their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocab", type=int, help="tokens of the vocabulary (default: the model's)")
    given = parser.parse_args()
    models = {
        "qwen2.5-72b": SHAPES["qwen2.5-72b"].config() | {"num_hidden_layers": given.layers},
        # the dense model of benches/machines.py
        "dense-120b": {
            "model_type": "llama",
            "hidden_size": 10240,
            "intermediate_size": 35840,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "num_hidden_layers": given.layers,
            "max_position_embeddings": 131072,
        },
        # the class's own sizes are those of the model with 120 billion parameters
        "gpt-oss-120b": {"model_type": "gpt_oss", "num_hidden_layers": given.layers},
    }
    vocab = {} if given.vocab is None else {"vocab_size": given.vocab}
    for name, keys in models.items():
        AutoConfig.for_model(**(keys | vocab)).save_pretrained(given.out / name)
        print(given.out / name)


if __name__ == "__main__":
    main()
