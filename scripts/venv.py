"""Make a virtual environment, or name the package that Debian needs for it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from scripts.console import SetupError


def make_venv(folder: Path) -> Path:
    """Make a virtual environment and return its Python. Raises an error that names Debian's package if `venv` is
    missing."""
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        version = "{}.{}".format(*sys.version_info)
        raise SetupError(
            f"This Python cannot make virtual environments. On Debian or Ubuntu: "
            f"sudo apt install python3-venv (or python{version}-venv), then run the same command again."
        )
    done = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"Could not make a virtual environment in {folder}:\n{done.stdout}{done.stderr}")
    return folder / "bin" / "python"
