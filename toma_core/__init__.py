"""ToMA, Token Merge with Attention (ICML 2025, arXiv 2509.10918), in PyTorch, with Triton kernels for NVIDIA GPUs.

Start with `reduce` and `restore` in `pipeline`. `UserSettings` (user_settings) holds what the user chose, `ToMAConfig`
(config) the settings that follow from it for one model, and `RunState` (run) the state of one sampling run.
"""

from __future__ import annotations

from .config import ToMAConfig
from .decision import Facts, decide
from .merge import MergePlan, merge, unmerge
from .pipeline import Evaluation, reduce, restore
from .presets import PRESETS, ModelKind
from .run import RunState
from .schedule import Schedule, StepMode, StepPlan
from .setting_spec import ConfigError
from .user_settings import UserSettings

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
