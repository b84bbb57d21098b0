"""Families of models, one file each. A file declares the family's blocks, their arguments and their costs."""
