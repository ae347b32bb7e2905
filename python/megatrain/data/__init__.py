"""Files to batches: `file_formats`, `rows` and `readers` read rows, `tokenization` and `chat` make tokens, `packing`
makes sequences, `loader` batches.

    train, held_out = prepare(config, tokenizer)
    loader = Loader(train, config, micro_batch=4)
    for step in range(loader.num_steps):
        batch = loader.batch(step)

`cache` keeps tokens on disk, `inspection` shows rows and batches as the model sees them.
"""

from megatrain.data.dataset import Dataset, by_name, prepare
from megatrain.data.loader import Loader, StepBatch
from megatrain.names import IGNORED

__all__ = ["IGNORED", "Dataset", "Loader", "StepBatch", "by_name", "prepare"]
