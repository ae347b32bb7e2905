"""What is asked for: one YAML file, checked before anything starts.

    config = Config.load("run.yaml", ["train.lr=2e-5"])
    print(config.to_yaml())                     # the effective settings
    identity, course, place = diff(old, config) # may the old run go on with it?

`sections` holds the settings and their defaults, `check` their contradictions, `build` the errors about keys and types.
"""

from megatrain.config.config import Config
from megatrain.config.diff import Change, diff
from megatrain.config.schema import (
    DataConfig,
    EvalConfig,
    GroupConfig,
    MemoryConfig,
    ModelConfig,
    NvmeConfig,
    OutputConfig,
    PlanConfig,
    SamplesConfig,
    ScheduleConfig,
    SourceConfig,
    TokenizerTraining,
    TrainConfig,
)
from megatrain.units import Duration, format_size, parse_size

__all__ = [
    "Change",
    "Config",
    "DataConfig",
    "Duration",
    "EvalConfig",
    "GroupConfig",
    "MemoryConfig",
    "ModelConfig",
    "NvmeConfig",
    "OutputConfig",
    "PlanConfig",
    "SamplesConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TokenizerTraining",
    "TrainConfig",
    "diff",
    "format_size",
    "parse_size",
]
