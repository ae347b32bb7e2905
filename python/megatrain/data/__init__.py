"""Files to batches: `sources` reads rows, `encode` and `chat` make tokens, `pack` makes sequences, `loader` batches.

    train, held_out = prepare(config, tokenizer)
    loader = Loader(train, config, micro_batch=4)
    for step in range(loader.num_steps):
        batch = loader.batch(step)

`cache` keeps tokens on disk, `view` shows rows and batches as the model sees them.
"""

from megatrain.data.dataset import Dataset, prepare
from megatrain.data.loader import IGNORED, Loader, StepBatch

__all__ = ["IGNORED", "Dataset", "Loader", "StepBatch", "prepare"]
