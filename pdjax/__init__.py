"""pdjax: serving large language models in JAX with prefill and decode as two workloads.

Start with `experiments.compare`; WORKSPACE.md is the map. Importing this package imports no jax.
"""
