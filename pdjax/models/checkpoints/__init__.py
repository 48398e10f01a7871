"""Checkpoints: files to named float32 arrays, one module per format."""
