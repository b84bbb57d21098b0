"""Compare the parts of ComfyUI that this pack uses with a folder of ComfyUI, by reading both: nothing is imported.

uses.py     what the pack uses, read from its own source
families.py the same for models and blocks
source.py   names, classes and signatures of a folder of Python files
facts.py    what a ComfyUI has of each use, as text
known.json  those texts of the releases that the pack was tried on
compare.py  what of a ComfyUI differs from them, and what of that stops merging
"""
