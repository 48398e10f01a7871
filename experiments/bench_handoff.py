"""What a hand-off between two pools costs, part by part, against a plain copy of as many bytes.

    python -m experiments.bench_handoff [--out=DIR]

KV pages of one sequence go from a prefill pool to a decode pool on other CPU devices of this
process, between pools of one size and of two. Parts: `gather` from pages to pieces, `copy` from
mesh to mesh, `scatter` into the target's cache; `whole` is one hand-off as the engine does it, cut
in the gather and joined in the scatter where the pools differ in size. A plain copy is a
warmed `jax.device_put` of one contiguous array of equal bytes between two devices, measured in
turn with the parts. Pages also come to this process from another (`handoff_processes`), and are
served as streams (`handoff_streams`). Prints tables, writes `bench.json`. Takes three minutes on
idle cores.
"""

from __future__ import annotations

import json
import math
import operator
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable

from absl import flags

from experiments import handoff_processes, handoff_streams
from experiments.program import Progress, main, out_folder, whole_file
from pdjax.core.model_config import ModelConfig
from pdjax.scheduling.pages import PageConfig

PAIRS = ((1, 1), (2, 2), (1, 2), (2, 1), (2, 4), (4, 2))  # devices of the source, of the target
NUM_TOKENS = (512, 2048)
NUM_REPEATS = 31
MODEL = ModelConfig(
  name="bench-handoff",  # 32 KiB of K and V per token in float32, next to no weights
  num_layers=8,
  d_model=64,
  num_heads=8,
  num_kv_heads=8,
  head_dim=64,
  d_ff=64,
  vocab_size=64,
  max_len=2048,
)
PAGES = PageConfig(num_rows=2, page_size=16, pages_per_row=128, num_pages=256, contiguous=True)
PARTS = ("gather", "copy", "scatter")
LAYERS = 0, MODEL.num_layers


class Pool:
  """The cache of a pool and what moves pages in and out of it; no rows, no plans."""

  def __init__(self, model, devices, num_cuts: int):
    import jax
    import jax.numpy as jnp

    from pdjax.engine.build import make_attention
    from pdjax.engine.mesh import make_mesh
    from pdjax.engine.steps import Steps, state_shapes
    from pdjax.engine.transfer import Reshard, SpareMemory
    from pdjax.models.model import axes_sharding

    mesh = make_mesh(devices)
    self.device = devices[0]
    self.steps = Steps(model, make_attention(model, PAGES, mesh, "slots", "xla"))
    layout = self.steps.attention.layout
    cache, *_ = state_shapes(model, layout, [((0, layout.num_layers), mesh)])
    self.cache = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype, device=x.sharding), cache)
    self.sharding = axes_sharding("2 L K P h", layout.pieces_shape(1), mesh)
    self.reshard = Reshard(self.sharding)
    self.spare = SpareMemory(self.device.platform)
    self.layout, self.num_cuts = layout, num_cuts

  def gather(self, page_ids):
    import jax

    shape = self.layout.pieces_shape(len(page_ids), self.num_cuts)
    like = jax.ShapeDtypeStruct(shape, self.layout.dtype, sharding=self.sharding)
    into = tuple(self.spare.take(like) for _ in range(self.num_cuts))
    return self.steps.gather_pages(self.cache, page_ids, into, self.num_cuts)

  def scatter(self, page_ids, pieces):
    cuts = pieces if isinstance(pieces, tuple) else (pieces,)
    self.cache = self.steps.scatter_pages(self.cache, page_ids, cuts)
    return self.cache


def measure(source: Pool, target: Pool, num_tokens: int) -> dict[str, float]:
  """Medians of all parts, of the whole and of a plain copy, taken in turn."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from pdjax.engine.transfer import TransferTicket

  num_pages = num_tokens // PAGES.page_size
  page_ids = np.arange(num_pages, dtype=np.int32)
  num_bytes = num_tokens * source.layout.bytes_per_token
  flat = jnp.ones(num_bytes // 4, jnp.float32, device=source.device).block_until_ready()
  took_s: dict[str, list[float]] = {}

  def timed(name: str, function: Callable, *args):
    start_s = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    took_s.setdefault(name, []).append(time.perf_counter() - start_s)
    return result

  def whole():
    pieces = source.gather(page_ids)
    sent = {LAYERS: target.reshard.send(pieces)}
    TransferTicket(sent, lambda arrived: target.scatter(page_ids, arrived[LAYERS])).result()
    source.spare.give(pieces)
    return target.cache

  for _ in range(NUM_REPEATS + 2):
    timed("plain", jax.device_put, flat, target.device)
    pieces = timed("gather", source.gather, page_ids)
    copied = timed("copy", target.reshard.send, pieces)
    timed("scatter", target.scatter, page_ids, copied)
    del copied  # as a hand-off gives up what it has moved
    source.spare.give(pieces)
    timed("whole", whole)
  warm_s = {name: times[2:] for name, times in took_s.items()}
  return {
    "bytes": num_bytes,
    **{f"{name}_s": statistics.median(times) for name, times in warm_s.items()},
    "copy_ratio": _ratio(warm_s["copy"], warm_s["plain"]),
    "whole_ratio": _ratio(warm_s["whole"], warm_s["plain"]),
  }


def _ratio(times_s: Iterable[float], plain_s: Iterable[float]) -> float:
  """The median of ratios within a turn: other programs on the machine slow down both."""
  return statistics.median(map(operator.truediv, times_s, plain_s))


def asked(row: dict) -> tuple[float, float]:
  """How many plain copies the copy and the whole may take."""
  return (1.5 if row["source"] == row["target"] else 2.5), 3.0


def prepare() -> pathlib.Path:
  return out_folder("bench_handoff")


def run(out: pathlib.Path) -> int:
  import jax

  from pdjax.engine.mesh import ensure_devices
  from pdjax.models.transformer import from_arrays, random_arrays

  jax.config.update("jax_platforms", "cpu")
  devices = ensure_devices(max(map(sum, PAIRS)))
  model = from_arrays(MODEL, random_arrays(MODEL, 0))
  load_average, rows = os.getloadavg()[0], []
  for sizes in (PAIRS[0], *PAIRS):  # a process gets its first memory more slowly: once for nothing
    ends = devices[: sizes[0]], devices[sizes[0] : sum(sizes)]
    source, target = (Pool(model, own, math.lcm(*sizes) // len(own)) for own in ends)
    for num_tokens in NUM_TOKENS:
      where = {"source": sizes[0], "target": sizes[1]}
      rows.append(where | measure(source, target, num_tokens))
  del rows[: len(NUM_TOKENS)]
  result = {
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "jax": jax.__version__,
    "load_average": [load_average, os.getloadavg()[0]],  # before and after
    "date": time.strftime("%Y-%m-%d %H:%M"),
    "hand_offs": rows,
    "between_processes": handoff_processes.measure_all(NUM_TOKENS),
  }
  print(table(result))
  print(handoff_processes.table(result["between_processes"]), flush=True)
  progress = Progress()
  result["streamed"] = handoff_streams.measure_all(progress.update)
  progress.done("measured: streams")
  print(handoff_streams.table(result["streamed"]))
  out.mkdir(parents=True, exist_ok=True)
  with whole_file(out / "bench.json") as part:
    part.write_text(json.dumps(result, indent=2) + "\n")
  print(f"wrote {out / 'bench.json'}")
  return 0


def table(result: dict) -> str:
  before, after = result["load_average"]
  lines = [
    f"jax {result['jax']}, {result['machine']}, load {before:.1f} to {after:.1f}, "
    f"{result['date']}; GB/s, medians of {NUM_REPEATS}",
    f"{'devices':8}{'MiB':>5}{'plain':>8}"
    + "".join(f"{name:>8}" for name in (*PARTS, "whole"))
    + "   copy, whole in plain copies (asked)",
  ]
  for row in result["hand_offs"]:
    rates = "".join(
      f"{row['bytes'] / row[f'{name}_s'] / 1e9:8.1f}" for name in ("plain", *PARTS, "whole")
    )
    reached = row["copy_ratio"], row["whole_ratio"]
    ratios = ", ".join(
      f"{ratio:.2f} ({limit})" for ratio, limit in zip(reached, asked(row), strict=True)
    )
    sizes = f"{row['source']} -> {row['target']}"
    lines.append(f"{sizes:8}{row['bytes'] / 2**20:5.0f}{rates}   {ratios}")
  return "\n".join(lines)


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "folder for bench.json; default: runs/bench_handoff-TIME")
  main(prepare, run)
