"""Compare the parts of ComfyUI that this pack uses with a folder of ComfyUI, by reading the source of both.

uses.py     what the pack uses, read from its own source
families.py the models and blocks that the pack's families know
source.py   names, classes and signatures of a folder of Python files
facts.py    a fact on each use, read from a folder of ComfyUI, as a line of text
known.json  the facts of the releases on which the pack was tried
compare.py  the differences of a ComfyUI from these releases, and those that stop merging
"""
