"""Cut the rows at the top of the README out of the pictures in docs/fidelity.md: `python -m demo.pair`."""

from __future__ import annotations

import argparse

from PIL import Image

from scripts.comfyui import ROOT

IMAGES = ROOT / "docs" / "images"
# Heights in pixels: of a row of pictures, of the line of text above it, and of the gap between rows in the result.
ROW, TEXT, GAP = 128, 16, 6
# Indices of rows: without ToMA, with `balanced` at ratio 0.75, and without ToMA in a quarter fewer steps.
SHOWN = (0, 2, 4)


def main() -> None:
    argparse.ArgumentParser(prog="python -m demo.pair", description=__doc__).parse_args()
    rows = Image.open(IMAGES / "fidelity-pictures-unet.jpg")
    pair = Image.new("RGB", (rows.width, len(SHOWN) * (ROW + GAP) - GAP), (255, 255, 255))
    for index, row in enumerate(SHOWN):
        top = TEXT + row * (ROW + TEXT)
        pair.paste(rows.crop((0, top, rows.width, top + ROW)), (0, index * (ROW + GAP)))
    pair.save(IMAGES / "pair.jpg", quality=90)


if __name__ == "__main__":
    main()
