"""Measurements that need a GPU: properties of the card, kernels against fp64, and the script of a visit to a lent
machine."""
