"""One module for each way to run the kernels. All have the same functions; none is named in an API.

    attend(q, pages, prefill, decode, *, page_size, window, soft_cap, scale, config)
    write(pages, k, v, slots, *, config)
    attend_fresh(q, k, v, slices, *, window, soft_cap, scale, config)   where K and V are contiguous
    refuses(case, chip)     why it cannot serve a case, or None
    default(case, chip)     a TileConfig that is safe there

xla and the Pallas backends (triton, mosaic, tpu) have the first two; splash and tokamax the third.
"""

from __future__ import annotations

import importlib
import types

import jax

from pdjax.kernels.slices import Pages, Slices
from pdjax.kernels.tile_config import BACKENDS, TileConfig


def backend(name: str) -> types.ModuleType:
  """The module of a backend, imported when it is first asked for.

  Raises:
    ValueError: there is none of that name.
  """
  if name not in BACKENDS:
    raise ValueError(f"backend={name!r} must be one of {', '.join(BACKENDS)}")
  return importlib.import_module(f"pdjax.kernels.backends.{name}")


def attend(
  q: jax.Array,  # [T, H, h]
  pages: Pages,
  prefill: Slices | None,
  decode: Slices | None,
  *,
  page_size: int,
  window: int | None,
  soft_cap: float | None,
  scale: float | None,
  config: TileConfig,
) -> jax.Array:  # [T, H, h]
  """By the backend of `config`; `scale` None is h ** -0.5."""
  *_, head_dim = q.shape
  return backend(config.backend).attend(
    q,
    pages,
    prefill,
    decode,
    page_size=page_size,
    window=window,
    soft_cap=soft_cap,
    scale=head_dim**-0.5 if scale is None else scale,
    config=config,
  )
