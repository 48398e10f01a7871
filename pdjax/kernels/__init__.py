"""Attention over a paged cache and page writes: kernels for GPUs and TPUs, and plain XLA."""
