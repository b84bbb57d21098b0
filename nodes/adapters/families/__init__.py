"""Families of models, one file each: the family's blocks, where tokens lie in their arguments, and their costs."""
