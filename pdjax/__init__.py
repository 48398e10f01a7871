"""pdjax: serving large language models in JAX with prefill and decode as two workloads.

Start with `experiments.compare`, or with `pdjax.LLM` in a notebook; WORKSPACE.md is the map.
Importing this package imports no jax: what it exports is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from pdjax.core.request import SamplingParams
  from pdjax.llm import LLM

__all__ = ["LLM", "SamplingParams"]

_HOMES = {"LLM": "pdjax.llm", "SamplingParams": "pdjax.core.request"}


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f"module 'pdjax' has no attribute {name!r}")
  return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
