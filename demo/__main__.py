"""Compare sampling with and without ToMA on a real ComfyUI: `make demo`, or `python -m demo` in its environment."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from scripts.comfy_client import ServerError

from .showcase import EVERYWHERE, OUTPUT, DemoError, Settings, compare, serve
from .showcase_graphs import KINDS


def main() -> int:
    """Parse the command line, run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="leave ComfyUI's web page open instead of comparing")
    parser.add_argument(
        "--listen",
        nargs="?",
        const=EVERYWHERE,
        metavar="ADDRESS",
        help="with --serve: answer other machines too, at this address (default all of this machine's)",
    )
    parser.add_argument("--port", type=_port, help="with --serve: port of the page (default 8199, or a free one)")
    parser.add_argument("--flux", action="store_true", help="compare the tiny Flux too, which is too small to gain")
    parser.add_argument("--sizes", type=_size, nargs="+", metavar="PIXELS", help="sides of the square pictures")
    parser.add_argument("--steps", type=_steps, help="sampling steps (default 8 of the UNet, 12 of Flux)")
    parser.add_argument("--repeats", type=_count, default=Settings.repeats, help="pairs per case (default %(default)s)")
    parser.add_argument("--batch", type=_count, default=Settings.batch, help="pictures at once (default %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the pictures (default %(default)s)")
    arguments = parser.parse_args()
    if not os.environ.get("COMFYUI_PATH"):
        parser.error("COMFYUI_PATH is not set: run `make demo`, which finds or gets ComfyUI first")
    if not arguments.serve and (arguments.listen or arguments.port):
        parser.error("--listen and --port go with --serve")
    signal.signal(signal.SIGTERM, _leave)
    try:
        if arguments.serve:
            serve(port=arguments.port, listen=arguments.listen)
        else:
            sizes = tuple(arguments.sizes or Settings.sizes)
            kinds = KINDS if arguments.flux else Settings.kinds
            compare(Settings(sizes, arguments.steps, arguments.repeats, arguments.batch, kinds), arguments.output)
    except (DemoError, ServerError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the server is stopped.", file=sys.stderr)
        return 130
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    """Raise an exception for the signal, so that the server is stopped and the server's folder removed."""
    raise SystemExit(128 + number)


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port from 1 to 65535")
    return value


def _size(text: str) -> int:
    value = int(text)
    if not 64 <= value <= 1024 or value % 8:
        raise argparse.ArgumentTypeError(f"{value} is not a multiple of 8 from 64 to 1024")
    return value


def _steps(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("at least 2 steps are needed to time one")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return value


if __name__ == "__main__":
    sys.exit(main())
