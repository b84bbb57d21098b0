"""Measurements that need a GPU: kernels against fp64, and the KV cache in main memory. `visit.sh` runs the suite on a
machine without network."""
