"""Measurements that need a GPU: properties of the card, kernels against fp64, and the script for a machine without
network."""
