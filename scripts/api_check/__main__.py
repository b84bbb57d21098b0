"""List the parts of a ComfyUI that this pack uses, and which of these parts are missing or changed. ComfyUI's files are
read, not imported.

    python -m scripts.api_check FOLDER            checks an entire ComfyUI, or a folder with only some of its files
    python -m scripts.api_check FOLDER --all      lists everything that is used
    python -m scripts.api_check --write [FOLDER]  writes known.json again: downloadable releases, and those in folders

The exit code is 1 if merging stops because a part is *missing*, or because the pack's arguments *do not fit* a part.
*New* lists derived classes, which the pack refuses until a family names them in `DERIVED`. It also lists methods that
run blocks but are not in `_LOOPS` of `nodes/adapters/family.py`. After the pack begins to use a part, a test asks for
--write, which keeps the entries of releases that are neither downloadable nor in a given folder.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from scripts import comfyui
from scripts.api_check import compare
from scripts.api_check.compare import FILE, Kind
from scripts.api_check.facts import facts_of
from scripts.api_check.families import uses_of
from scripts.comfyui import RELEASES, ROOT, ComfyUI, is_comfyui
from scripts.console import SetupError

# The words by which the report counts the uses of each kind, see `uses.py`.
NAMES = {
    "name": "names",
    "call": "calls",
    "wrapper": "wrappers",
    "path": "attributes of models",
    "block": "lists of blocks",
    "loop": "loops over blocks",
    "derived": "models with derived ones",
    "key": "keys",
    "trait": "optional attributes",
}


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, compare or write, and return the exit code."""
    assert __doc__ is not None  # noqa: S101
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m scripts.api_check", description=__doc__, formatter_class=formatter)
    parser.add_argument("folder", nargs="*", type=Path, help="default: the ComfyUI that tests use")
    parser.add_argument("--all", action="store_true", help="list everything that the pack uses")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} again")
    chosen = parser.parse_args(arguments)
    missing = [folder for folder in chosen.folder if not folder.is_dir()]
    if missing:
        print(f"There is no folder {missing[0]}.")
        return 2
    if chosen.write:
        return write(chosen.folder)
    return max(check(folder, chosen.all) for folder in chosen.folder or [comfyui.find().path])


def write(folders: list[Path]) -> int:
    """Write known.json from these folders and the downloadable releases. Other releases keep their entries."""
    uses, families = uses_of(ROOT)
    known = compare.read() if FILE.exists() else {}
    known = {item: known.get(item, {}) for item in uses}
    for folder in [*folders, *(comfyui.find(release).path for release in RELEASES)]:
        release = version_of(folder)
        if not is_comfyui(folder):
            print(f"{folder} has only some files of a ComfyUI, or none.")
            return 2
        for item, text in facts_of(folder, uses, families).items():
            known[item][release] = text
        print(f"ComfyUI {release}: {len(uses)} uses")
    compare.write(known)
    return 0


def check(folder: Path, everything: bool) -> int:
    """Print how a ComfyUI, in the parts that the pack uses, differs from the nearest tried release. Return 1 if a
    difference stops merging."""
    uses, families = uses_of(ROOT)
    known, facts, version = compare.read(), facts_of(folder, uses, families), version_of(folder)
    release = compare.nearest(known, version)
    found = compare.differences(uses, facts, known, release, folder)
    partly = "" if is_comfyui(folder) else ", some files only"
    print(f"ComfyUI {version}{partly}, compared with {release}. The newest that was tried is {compare.newest(known)}.")
    counts = Counter(use.kind for use in uses.values())
    print(f"The pack uses {', '.join(f'{counts[kind]} {name}' for kind, name in NAMES.items())}.")
    if everything:
        for item in sorted(uses):
            print(f"  {item}: {facts[item]}")
    for kind in Kind:
        these = [each for each in found if each.kind is kind]
        if these:
            brief = kind is Kind.UNSEEN and not everything
            print(f"\n{kind.value} ({len(these)})" + (": --all lists it" if brief else ":"))
            if not brief:
                print("\n".join(f"  {each}" for each in these))
    fatal = sum(each.fatal for each in found)
    print(f"\n{fatal} of {len(uses)} uses stop merging." if fatal else "\nNothing stops merging.")
    return 1 if fatal else 0


def version_of(folder: Path) -> str:
    """Return the version of a ComfyUI."""
    return ComfyUI(folder, "", folder / "requirements.txt").version


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        print(f"error: {error}")
        sys.exit(2)
