"""Make the archive that the Comfy Registry and Manager install: `python -m scripts.archive`.

Publishing uses the same two commands of comfy-cli. `comfy node validate` checks for everything that the registry would
refuse. `comfy node pack` zips the files that git tracks, except those that `.comfyignore` names.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.comfyui import ROOT
from scripts.console import SetupError, say

PACKED = "node.zip"  # comfy-cli always uses this name
COMPLAINTS = ("Warning", "Error", "found:", "File not found")
NO_GIT = "Warning: Not in a git repository"  # harmless, because .comfyignore excludes what git would ignore


def main() -> int:
    """Parse the command line, validate, pack, and print the archive's path."""
    parser = argparse.ArgumentParser(prog="python -m scripts.archive", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder for the archive (build/)")
    try:
        archive = pack(parser.parse_args().output)
    except SetupError as error:
        say(f"error: {error}")
        return 1
    say(f"{archive}: {archive.stat().st_size:,} bytes")
    return 0


def pack(folder: Path, root: Path = ROOT) -> Path:
    """Validate the pack in `root` and return its archive in `folder`. Raises SetupError if comfy-cli reports an error
    or a warning, because the registry drops metadata with a warning."""
    folder.mkdir(parents=True, exist_ok=True)
    name, version = (project(root, key) for key in ("name", "version"))
    archive = folder / f"{name}-{version}.zip"
    (root / "build").mkdir(exist_ok=True)
    with (root / "build" / "archive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # otherwise two concurrent test runs would write the same node.zip
        for command in ("validate", "pack"):
            said = _comfy_node(command, root)
            if any(complaint in line for line in said.splitlines() for complaint in COMPLAINTS if NO_GIT not in line):
                raise SetupError(f"comfy node {command}:\n{said}")
        shutil.move(root / PACKED, archive)
    return archive


def _comfy_node(command: str, root: Path) -> str:
    """Return the output of `comfy node <command>`. comfy-cli gets a temporary home for its settings, but git uses the
    user's settings."""
    with tempfile.TemporaryDirectory() as home:
        gitconfig = os.environ.get("GIT_CONFIG_GLOBAL", str(Path.home() / ".gitconfig"))
        done = subprocess.run(
            [sys.executable, "-m", "comfy_cli", "--skip-prompt", "--no-enable-telemetry", "node", command],
            cwd=root,
            env={**os.environ, "HOME": home, "GIT_CONFIG_GLOBAL": gitconfig, "NO_COLOR": "1", "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise SetupError(f"comfy node {command} ended with {done.returncode}:\n{said}")
    return said


def project(root: Path, key: str) -> str:
    """Return a string of the [project] table of pyproject.toml. A regular expression finds the string, because Python
    3.10 has no TOML reader. Raises SetupError if the key is missing."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{key} = "(.+?)"', text, re.MULTILINE)
    if found is None:
        raise SetupError(f"{root / 'pyproject.toml'} has no {key}")
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
