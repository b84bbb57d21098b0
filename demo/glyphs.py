"""A tiny bitmap alphabet, so that scenes carry lettering without any font file."""

from __future__ import annotations

import numpy as np

GLYPH_HEIGHT = 7

_ROWS: dict[str, tuple[str, ...]] = {
    "A": (".###.", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
    "E": ("#####", "#....", "#....", "####.", "#....", "#....", "#####"),
    "F": ("#####", "#....", "#....", "####.", "#....", "#....", "#...."),
    "H": ("#...#", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
    "I": ("#####", "..#..", "..#..", "..#..", "..#..", "..#..", "#####"),
    "K": ("#...#", "#..#.", "#.#..", "##...", "#.#..", "#..#.", "#...#"),
    "L": ("#....", "#....", "#....", "#....", "#....", "#....", "#####"),
    "M": ("#...#", "##.##", "#.#.#", "#.#.#", "#...#", "#...#", "#...#"),
    "O": (".###.", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."),
    "T": ("#####", "..#..", "..#..", "..#..", "..#..", "..#..", "..#.."),
    "U": ("#...#", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."),
    "V": ("#...#", "#...#", "#...#", "#...#", ".#.#.", ".#.#.", "..#.."),
    "X": ("#...#", "#...#", ".#.#.", "..#..", ".#.#.", "#...#", "#...#"),
    "Z": ("#####", "....#", "...#.", "..#..", ".#...", "#....", "#####"),
}


def word_mask(word: str) -> np.ndarray:
    """Return the bitmap of a word, with one blank column between glyphs.

    The array is float32 of shape (7, 6 * len(word) - 1) and holds 0 and 1.
    Raises KeyError for a letter outside the alphabet.
    """
    gap = np.zeros((GLYPH_HEIGHT, 1), dtype=np.float32)
    parts: list[np.ndarray] = []
    for letter in word:
        glyph = np.array([[cell == "#" for cell in row] for row in _ROWS[letter]], dtype=np.float32)
        parts += [gap, glyph] if parts else [glyph]
    return np.concatenate(parts, axis=1)
