"""Figures and tables of Sarathi-Serve (OSDI'24) and of SARATHI (2023)."""

from __future__ import annotations

from experiments.reproduction import (
  sarathi_2023,
  sarathi_capacity,
  sarathi_chunks,
  sarathi_frontier,
  sarathi_serving,
  sarathi_steps,
  sarathi_tables,
  sarathi_timelines,
)

FIGURES = (
  *sarathi_capacity.FIGURES,
  *sarathi_frontier.FIGURES,
  *sarathi_serving.FIGURES,
  *sarathi_steps.FIGURES,
  *sarathi_chunks.FIGURES,
  *sarathi_timelines.FIGURES,
  *sarathi_tables.FIGURES,
  *sarathi_2023.FIGURES,
)
