"""Decisions on the host: which tokens go into the next step, on which pages, on which pool."""
