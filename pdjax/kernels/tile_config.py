"""How kernels are cut, and by which backend they run: plain data that tuning may change."""

from __future__ import annotations

import dataclasses

BACKENDS = ("xla", "triton", "mosaic", "tpu", "tokamax", "splash")
KERNELS = ("prefill", "decode", "mixed", "write", "fresh")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
  """One kernel on one chip. Nothing here changes what it computes.

  A tile of a prompt has `block_q` query rows, which are tokens times the G heads that share a kv
  head, and reads `block_k` keys at a time, in `num_stages` buffers. A decode's context is split
  into parts of at least `min_split_tokens`, about `programs` of them in all, so that a few rows
  still fill the chip. `decode_rows` rows are attended together where a backend does so (xla).

  Raises:
    ValueError: an unknown backend, or a number below 1.
  """

  backend: str
  block_q: int = 64
  block_k: int = 64
  num_stages: int = 2
  num_warps: int = 4
  min_split_tokens: int = 256
  programs: int = 264
  decode_rows: int = 4
  interpret: bool = False

  def __post_init__(self):
    if self.backend not in BACKENDS:
      raise ValueError(f"backend={self.backend!r} must be one of {', '.join(BACKENDS)}")
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ValueError(f"{field.name}={value} must be at least 1")

  def tile_tokens(self, group: int) -> int:
    """Tokens in a tile of a prompt where `group` heads share a kv head."""
    return max(1, self.block_q // group)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
  """What a choice of backend depends on. As JAX says it of a device, also of one not here."""

  platform: str  # cpu, gpu, tpu
  kind: str  # NVIDIA H200
  compute_capability: float | None = None  # 9.0
  num_cores: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
  """What a kernel is asked to do on each device, as far as it is known before any request."""

  kernel: str  # one of KERNELS
  num_heads: int
  num_kv_heads: int
  head_dim: int
  page_size: int
  dtype: str  # of queries
  cache_dtype: str
