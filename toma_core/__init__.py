"""ToMA, Token Merge with Attention (ICML 2025, arXiv 2509.10918), in PyTorch, and in Triton where there is a fast GPU.

`reduce` and `restore` (pipeline) are the front door; `ToMAConfig` (config) holds the settings; `RunState` (state)
holds what lives as long as one sampling run.
"""

from __future__ import annotations

from .config import PRESETS, ToMAConfig
from .fields import ConfigError
from .merge import MergePlan, merge, unmerge
from .pipeline import Evaluation, plan_for, reduce, restore
from .schedule import Decision, Schedule
from .state import RunState

__all__ = [
    "PRESETS",
    "ConfigError",
    "Decision",
    "Evaluation",
    "MergePlan",
    "RunState",
    "Schedule",
    "ToMAConfig",
    "merge",
    "plan_for",
    "reduce",
    "restore",
    "unmerge",
]
