"""All figures and tables of DistServe (OSDI'24)."""

from __future__ import annotations

from experiments.reproduction import (
  distserve_ablation,
  distserve_phases,
  distserve_queues,
  distserve_search,
  distserve_serving,
  distserve_steps,
)

FIGURES = (
  *distserve_queues.FIGURES,
  *distserve_steps.FIGURES,
  *distserve_serving.FIGURES,
  *distserve_phases.FIGURES,
  *distserve_ablation.FIGURES,
  *distserve_search.FIGURES,
)
