"""Make models of a newer ComfyUI known. ComfyUI runs this file before it loads packs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from testbed.stand_ins import use_newer_models

use_newer_models()
