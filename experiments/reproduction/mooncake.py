"""All figures of Mooncake: FAST'25, and `tr-` of its technical report (arXiv 2407.00079)."""

from __future__ import annotations

from experiments.reproduction import mooncake_cache, mooncake_overload, mooncake_serving

FIGURES = (*mooncake_overload.FIGURES, *mooncake_serving.FIGURES, *mooncake_cache.FIGURES)
