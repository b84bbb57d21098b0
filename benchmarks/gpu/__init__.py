"""Measurements that need a GPU: kernels against fp64, the KV cache in main memory, and a script for a machine without
network."""
