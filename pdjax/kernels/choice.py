"""Which backend runs which kernel on a chip, and how it is cut there."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax

from pdjax.kernels.backends import backend
from pdjax.kernels.tile_config import Case, Chip, TileConfig
from pdjax.kernels.tuning import tuned

ATTENTION = ("auto", "xla", "pallas")
"""What may be asked for: the best of the chip, plain XLA, or kernels (interpreted on a CPU)."""

# In the order in which they are tried; xla refuses nothing.
_CANDIDATES = {
  "cpu": ("triton", "xla"),
  "gpu": ("mosaic", "triton", "xla"),
  "tpu": ("tpu", "xla"),
}
_FRESH = {"gpu": "tokamax", "tpu": "splash"}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
  """The kernels of a pool. `fresh`, if any, serves prompts that begin in a step (see splash)."""

  prefill: TileConfig
  decode: TileConfig
  mixed: TileConfig
  write: TileConfig
  fresh: TileConfig | None = None

  @property
  def interleaves(self) -> bool:
    """Whether keys and values lie in turn in one array, as the TPU's kernels want them."""
    return self.write.backend == "tpu"


def chip_of(device: jax.Device) -> Chip:
  """What JAX says of a device, which may be one of a topology that is not here."""
  try:
    capability = float(getattr(device, "compute_capability", None))
  except (TypeError, ValueError):  # no GPU, or one of AMD: gfx942
    capability = None
  return Chip(
    platform=device.platform,
    kind=device.device_kind,
    compute_capability=capability,
    num_cores=getattr(device, "core_count", None),
  )


@functools.cache
def choose(
  chip: Chip,
  attention: str,
  *,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  page_size: int,
  dtype: str,
  cache_dtype: str,
) -> Tuning:
  """The kernels of a pool on such devices, each with its heads of the model.

  A backend that cannot serve a case is passed over with a logged line that says why. The table of
  `pdjax.kernels.tuning` comes before a backend's safe default.

  Raises:
    ValueError: `attention` is not one of ATTENTION.
  """
  if attention not in ATTENTION:
    raise ValueError(f"attention={attention!r} must be one of {', '.join(ATTENTION)}")
  candidates = _CANDIDATES.get(chip.platform, ("xla",))
  if attention == "xla" or (attention == "auto" and chip.platform == "cpu"):
    candidates = ("xla",)

  def case(kernel: str) -> Case:
    return Case(kernel=kernel, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                page_size=page_size, dtype=dtype, cache_dtype=cache_dtype)  # fmt: skip

  passed_over: dict[str, list[str]] = {}

  def pick(kernel: str) -> TileConfig:
    known = tuned(chip, case(kernel))
    first = None if known is None else known.backend
    if first == "xla" and attention == "pallas":
      first = None  # the better one, but not what was asked for
    for name in sorted(candidates, key=lambda name: name != first):
      reason = backend(name).refuses(case(kernel), chip)
      if reason is None:
        return known if name == first else backend(name).default(case(kernel), chip)
      passed_over.setdefault(f"{name}: {reason}", []).append(kernel)
    raise AssertionError("xla refuses nothing")

  picked = {kernel: pick(kernel) for kernel in ("prefill", "decode", "mixed", "write")}
  if chip.platform == "tpu" and len({config.backend for config in picked.values()}) > 1:
    xla = backend("xla")  # the two lay out the cache differently
    picked = {kernel: xla.default(case(kernel), chip) for kernel in picked}
  for why, kernels in passed_over.items():
    instead = ", ".join(f"{kernel} by {picked[kernel].backend}" for kernel in kernels)
    _log.warning("attention is not run by %s; instead %s", why, instead)
  picked = {kernel: as_run_on(chip, config) for kernel, config in picked.items()}
  fresh = None if candidates == ("xla",) else _fresh(chip, case("fresh"))
  return Tuning(**picked, fresh=fresh)


def as_run_on(chip: Chip, config: TileConfig) -> TileConfig:
  """`config` as a chip can run it: a CPU interprets what is not plain XLA."""
  is_interpreted = chip.platform == "cpu" and config.backend != "xla"
  return dataclasses.replace(config, interpret=is_interpreted)


def _fresh(chip: Chip, case: Case) -> TileConfig | None:
  """On a GPU a library serves prompts that begin in a step only where it was measured to win."""
  known, name = tuned(chip, case), _FRESH.get(chip.platform)
  if known is not None and known.backend != name:
    known = name = None  # something else was measured to win
  if name is None or (known is None and chip.platform == "gpu"):
    return None
  reason = backend(name).refuses(case, chip)
  if reason is not None:
    _log.warning("prompts that begin in a step are not attended by %s: %s", name, reason)
    return None
  return known or backend(name).default(case, chip)
