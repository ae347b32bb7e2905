"""Training loops of other libraries on the engine.

from megatrain.integrations import TrainerMixin
from trl import SFTTrainer


class Trainer(TrainerMixin, SFTTrainer):
    pass
"""

from megatrain.integrations.hf_trainer import TrainerMixin

__all__ = ["TrainerMixin"]
