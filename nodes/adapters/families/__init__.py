"""Families of models, one file each: the family's blocks, the arguments that hold their tokens, and their costs."""
