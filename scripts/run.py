"""Download ComfyUI and make the Python environment if needed, then run a command in the environment.

    python3 -m scripts.run [--comfyui 0.16.3] [--quiet] -- python -m pytest -k windows

`python` as the first word means the environment's Python. The command runs in the checkout with COMFYUI_PATH set.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from scripts import cache, comfyui, environment
from scripts.comfyui import ROOT
from scripts.console import SetupError, say


def main() -> int:
    """Parse the command line, and replace this process by the command. Without a command, return an exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m scripts.run", description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", metavar="RELEASE", help=f"one of {', '.join(comfyui.RELEASES)}; else one is found")
    parser.add_argument("--quiet", action="store_true", help="do not print which ComfyUI, Python and device are used")
    parser.add_argument("--purge", action="store_true", help="remove all environments and downloads, run nothing")
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    try:
        if arguments.purge:
            cache.purge()
            return 0
        if not arguments.command:
            parser.error("no command given")
        run(arguments.command, release=arguments.comfyui, quiet=arguments.quiet)
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted. The same command resumes.")
        return 130


def run(command: list[str], *, release: str | None, quiet: bool) -> NoReturn:
    """Replace this process by the command."""
    found = comfyui.find(release)
    python = environment.ensure(found)
    if not quiet:
        say(f"ComfyUI {found.version} ({found.origin}) | {environment.describe(python)}")
    os.chdir(ROOT)
    program = str(python) if command[0] == "python" else command[0]
    variables = {
        **os.environ,
        "COMFYUI_PATH": str(found.path),
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
    }
    try:
        os.execvpe(program, [program, *command[1:]], variables)
    except OSError as error:
        raise SetupError(f"cannot run {program}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
