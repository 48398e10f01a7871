"""Models in JAX: the transformer, its KV cache and attention, sampling, and the checksum model."""
