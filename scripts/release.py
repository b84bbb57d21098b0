"""Check a release before it is published: `python3 -m scripts.release v0.1.0`.

The command prints the tag's section of CHANGELOG.md, and fails if the tag, pyproject.toml and the changelog name
different versions. With `--pin NAME` it prints the `dev` extra's requirement for a package, so that publishing uses the
version that tests use.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from scripts.archive import project
from scripts.comfyui import ROOT
from scripts.console import SetupError, say
from scripts.environment import dev_requirements


def main() -> int:
    """Parse the command line and print the notes or the requirement."""
    parser = argparse.ArgumentParser(prog="python3 -m scripts.release", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("tag", nargs="?", help="the tag that is published, vX.Y.Z")
    what.add_argument("--pin", metavar="NAME")
    arguments = parser.parse_args()
    try:
        print(pin(arguments.pin) if arguments.pin else notes(arguments.tag))
    except SetupError as error:
        say(f"error: {error}")
        return 1
    return 0


def notes(tag: str, root: Path = ROOT) -> str:
    """Return the changelog of the version that the tag names: X.Y.Z for vX.Y.Z. Raises SetupError if pyproject.toml has
    another version, or if the changelog has no text under `## [X.Y.Z] - date`."""
    version = project(root, "version")
    if tag != f"v{version}":
        raise SetupError(f"the tag is {tag} and pyproject.toml says {version}; tag v{version}, or change the version")
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    if found is None or not found[1].strip():
        raise SetupError(
            f"CHANGELOG.md has no text for {version}; rename [Unreleased] to '## [{version}] - YYYY-MM-DD' and begin "
            "a new [Unreleased]"
        )
    return found[1].strip()


def pin(name: str, root: Path = ROOT) -> str:
    """Return the requirement of the `dev` extra for a package, as `name==version`. Raises SetupError if the extra lacks
    the package."""
    for requirement in dev_requirements(root / "pyproject.toml"):
        if re.match(rf"{re.escape(name)}==", requirement):
            return requirement
    raise SetupError(f"the dev extra of pyproject.toml pins no {name}")


if __name__ == "__main__":
    sys.exit(main())
