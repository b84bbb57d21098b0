"""ToMA, Token Merge with Attention (ICML 2025, arXiv 2509.10918), in PyTorch, with Triton kernels for NVIDIA GPUs.

Start with `reduce` and `restore` in `pipeline`. `UserSettings` (in `presets`) holds what the user chose. `ToMAConfig`
(in `config`) holds the settings that follow from this choice for one model. `RunState` (in `run`) holds the state of
one sampling run.
"""

from __future__ import annotations

from .config import ConfigError, ToMAConfig
from .decision import Facts, decide
from .merge import MergePlan, merge, unmerge
from .pipeline import Evaluation, reduce, restore
from .presets import PRESETS, ModelKind, UserSettings
from .run import RunState
from .schedule import Schedule, StepMode, StepPlan

__all__ = [
    "PRESETS",
    "ConfigError",
    "Evaluation",
    "Facts",
    "MergePlan",
    "ModelKind",
    "RunState",
    "Schedule",
    "StepMode",
    "StepPlan",
    "ToMAConfig",
    "UserSettings",
    "decide",
    "merge",
    "reduce",
    "restore",
    "unmerge",
]
