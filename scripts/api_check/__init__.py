"""Check whether a ComfyUI still has the parts that this pack uses, by reading the source of the pack and of ComfyUI.

uses.py     what the pack uses, read from its own source
families.py the models and blocks that the pack's families know
source.py   names, classes and signatures of a folder of Python files
facts.py    a fact on each use, read from a folder of ComfyUI: a line of text, such as a signature
known.json  the facts of the releases on which the pack was tried
compare.py  the differences of a ComfyUI from these releases, and which of them stop merging
"""
