"""Families of models, one file each: its blocks, where their tokens lie, and what they cost."""
