"""How long a step takes: GPU operators as the package aiconfigurator-core has them measured.

The tables are NVIDIA's (Apache-2.0): kernels of vLLM, TensorRT-LLM and SGLang on the GPUs that they
serve with. Needs the extra `[silicon]`, but only to read them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from pdjax.core.costs import StepCounts, cost_rates, shard_of
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.sim.hardware import Device, Link
from pdjax.sim.latency_model import LatencyModel, StepTerms
from pdjax.sim.tables import Grid, Tables

_BACKENDS = ("sglang", "trtllm", "vllm")
_LAUNCHES = 3  # of a layer's elementwise operators: two residuals with their norms, the activation
_DOUBLINGS = 3  # of the longest measured prompt: so far prefill attention is extrapolated


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operators:
  """What was measured of one system's operators, with head vectors of one size.

  Arrays of rows, seconds last: `gemm` and `lm_head` [m, n, k], `context` and `generation` [query
  heads, kv heads, sequences, tokens or keys of each], `all_reduce` [devices, elements].
  `memory_share` and `launch_s` are of operators that nobody measured: they move their bytes at a
  share of the memory's rate and take a constant.
  """

  device: Device
  gemm: np.ndarray
  lm_head: np.ndarray
  context: np.ndarray
  generation: np.ndarray
  all_reduce: np.ndarray
  memory_share: float
  launch_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Silicon(LatencyModel):
  """Step times of one model on `tp` GPUs of a system, as measured under one backend.

  Linear between measured points. A mixed step is the linear operators over all its tokens and both
  attentions. `gemm` is the type of the layers' matrices, the output matrix is always bfloat16; `kv`
  is that of the cache. `version` is the backend's; None is the newest with tables, for each
  operator its own. `operators` are given instead of read. The host takes `host_s` for a step and
  `host_row_s` for each of its sequences.

  Raises:
    ModuleNotFoundError: the package is not installed.
    ValueError: a system, backend, version, type or shape that nobody measured, or a model that `tp`
      cannot split.
  """

  model: ModelConfig
  system: str = "h100_sxm"
  backend: str = "vllm"
  version: str | None = None
  tp: int = 1
  gemm: str = "bfloat16"
  kv: str = "bfloat16"
  host_s: float = 0.0
  host_row_s: float = 0.0
  link: Link | None = None
  operators: Operators | None = dataclasses.field(default=None, repr=False)
  _tables: Tables = dataclasses.field(init=False, repr=False)

  def __post_init__(self):
    if self.operators is None:
      found = read_operators(
        self.system,
        self.backend,
        self.version,
        gemm=self.gemm,
        kv=self.kv,
        head_dim=self.model.head_dim,
      )
      object.__setattr__(self, "operators", found)
    tables = to_tables(self.model, self.operators, self.tp, self.link)
    object.__setattr__(self, "_tables", tables)

  @property
  def device(self) -> Device:
    return self.operators.device

  @property
  def caveats(self) -> tuple[str, ...]:
    found = [
      "chunks behind cached tokens were not measured: they take what they add to a whole prompt",
      f"elementwise operators were not measured: their bytes at {self.operators.memory_share:.0%} "
      f"of the memory's rate",
    ]
    if not self.host_s + self.host_row_s:
      found.append("the host takes no time: its work is hidden behind the step before")
    return tuple(found)

  def beyond(self, counts: StepCounts) -> tuple[str, ...]:
    return self._tables.beyond(counts)

  def terms_of(self, counts: StepCounts) -> StepTerms:
    return self._tables.terms_of(counts)._replace(host_s=self._host_s(counts))

  def decode_steps_s(self, counts: StepCounts, num_steps: int) -> np.ndarray:
    return self._tables.decode_steps_s(counts, num_steps) + self._host_s(counts)

  def _host_s(self, counts: StepCounts) -> float:
    num_prefills = counts.num_prefills or bool(counts.num_prefill_tokens)
    return self.host_s + self.host_row_s * (counts.num_decodes + num_prefills)

  def hand_over_s(self, num_tokens: int) -> float:
    return self._tables.hand_over_s(num_tokens)


def to_tables(model: ModelConfig, operators: Operators, tp: int, link: Link | None) -> Tables:
  """The tables of one model on `tp` devices: from shapes that were measured to those it has.

  Raises:
    ValueError: heads or numbers of devices that nobody measured, or `tp` cannot split the model.
  """
  shard = shard_of(model, tp)
  q_width, kv_width = shard.num_heads * shard.head_dim, shard.num_kv_heads * shard.head_dim
  up_width = 2 * shard.d_ff if shard.gated_mlp else shard.d_ff
  shapes = (
    (q_width + 2 * kv_width, shard.d_model),
    (shard.d_model, q_width),
    (up_width, shard.d_model),
    (shard.d_model, shard.d_ff),
  )
  return Tables(
    model=model,
    linear=_gemms(operators.gemm, shapes),
    elementwise=_elementwise(shard, operators),
    lm_head=_gemms(operators.lm_head, ((shard.vocab_size, shard.d_model),)),
    prefill=_chunks(_of_heads(operators.context, shard, "prefill")),
    decode=_decodes(_of_heads(operators.generation, shard, "decode")),
    all_reduce=_all_reduce(operators.all_reduce, model.d_model, tp) if tp > 1 else None,
    link=link,
  )


def _gemms(rows: np.ndarray, shapes: tuple[tuple[int, int], ...]) -> Grid:
  """Seconds of matrices of these shapes (n, k) together, by rows m."""
  axes = [np.unique(rows[:, i]) for i in range(3)]
  total_s, is_measured = np.zeros(len(axes[0])), True
  for shape in shapes:
    near = [_around(axis, x) for axis, x in zip(axes[1:], shape)]
    own = rows[np.isin(rows[:, 1], near[0]) & np.isin(rows[:, 2], near[1])]
    points = {(n, k, m): seconds for m, n, k, seconds in own.tolist()}
    grid = Grid.of(points, (*near, axes[0].tolist()))
    total_s = total_s + grid.along(*shape, last=axes[0])
    is_measured = is_measured & all(a[0] <= x <= a[1] for a, x in zip(near, shape))
  return Grid(
    axes=(tuple(axes[0].tolist()),),
    values=total_s,
    is_measured=np.full(len(axes[0]), is_measured),
  )


def _around(axis: np.ndarray, x: float) -> list[float]:
  """The two values of an axis that `x` lies between, or the last two on its side."""
  i = int(np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2))
  return axis[i : i + 2].tolist()


def _elementwise(shard: ModelConfig, operators: Operators) -> Grid:
  op = cost_rates(shard)["elementwise"]
  token_s = op.num_bytes.num_prefill_tokens / (
    operators.memory_share * operators.device.peak_bytes_per_s
  )
  launch_s = _LAUNCHES * operators.launch_s
  values = np.array([launch_s, launch_s + token_s / shard.num_layers])
  return Grid(axes=((0.0, 1.0),), values=values, is_measured=np.ones(2, bool))


def _of_heads(rows: np.ndarray, shard: ModelConfig, kind: str) -> np.ndarray:
  """Rows [sequences, tokens or keys, seconds] of a device's heads.

  Heads are independent: where nobody measured so many, n sequences of them are as 2 n, 4 n, ... of
  a half, a quarter, ...

  Raises:
    ValueError: nobody measured any heads that these are a multiple of.
  """
  heads, kv_heads = shard.num_heads, shard.num_kv_heads
  pairs = np.unique(rows[:, :2], axis=0).astype(int).tolist()
  fitting = [(h, k) for h, k in pairs if h * kv_heads == k * heads and heads % h == 0]
  if not fitting:
    known = ", ".join(f"{h}/{k}" for h, k in pairs)
    raise ValueError(
      f"{shard.name}: nobody measured {kind} attention of {heads} query heads and {kv_heads} kv "
      f"heads on a device, nor of a part of them (there is: {known})"
    )
  h, k = max(fitting)
  own = rows[(rows[:, 0] == h) & (rows[:, 1] == k)][:, 2:].copy()
  own[:, 0] /= heads // h
  return own


def _chunks(rows: np.ndarray) -> Grid:
  """Seconds of a chunk, by (its tokens, cached tokens before it), from those of whole prompts.

  A chunk takes what a prompt of both takes more than one of the tokens before it, and a launch,
  which that difference has lost; at least what it would take with nothing before it. Beyond the
  longest measured prompt time grows with the pairs of a query and a key.
  """
  grid = Grid.of({(n, tokens): seconds for n, tokens, seconds in rows.tolist()})
  axis = np.array(grid.axes[1])
  alone_s = np.maximum.accumulate(grid.along(1.0, last=axis))
  pair_s = (alone_s[-1] - alone_s[-2]) / (axis[-1] ** 2 - axis[-2] ** 2)

  def whole_s(tokens: np.ndarray) -> np.ndarray:
    more_pairs = np.maximum(0.0, tokens**2 - axis[-1] ** 2)
    return np.interp(tokens, axis, alone_s) + pair_s * more_pairs

  axis_beyond = np.append(axis, axis[-1] * 2.0 ** np.arange(1, _DOUBLINGS + 1))
  before = np.append(0.0, axis_beyond[axis_beyond > 1])
  both = axis_beyond[:, None] + before
  added_s = whole_s(both) - whole_s(before) + alone_s[0]
  return Grid(
    axes=(tuple(axis_beyond.tolist()), tuple(before.tolist())),
    values=np.maximum(added_s, whole_s(axis_beyond)[:, None]),
    is_measured=both <= axis[-1],
  )


def _decodes(rows: np.ndarray) -> Grid:
  """Seconds of decodes, by (sequences, keys of each).

  Where many sequences of many keys did not fit, fewer of as many keys say what more would take.
  """
  grid = Grid.of({(keys, n): seconds for n, keys, seconds in rows.tolist()})
  return Grid(axes=grid.axes[::-1], values=grid.values.T, is_measured=grid.is_measured.T)


def _all_reduce(rows: np.ndarray, d_model: int, tp: int) -> Grid:
  """Seconds of one all-reduce of the hidden states over `tp` devices, by tokens."""
  own = rows[rows[:, 0] == tp]
  if not len(own):
    known = ", ".join(str(int(n)) for n in np.unique(rows[:, 0]))
    raise ValueError(f"tp={tp}: nobody measured all-reduces over so many devices, only {known}")
  return Grid.of({(elements / d_model,): seconds for _, elements, seconds in own.tolist()})


# The package --------------------------------------------------------------------------------------


def systems_folder() -> pathlib.Path:
  """Where the package keeps its tables.

  Raises:
    ModuleNotFoundError: it is not installed.
  """
  found = importlib.util.find_spec("aiconfigurator_core")
  if found is None:
    raise ModuleNotFoundError(
      "measured GPU operators are in the package aiconfigurator-core, which is not installed: "
      "pip install 'pdjax[silicon]'"
    )
  return pathlib.Path(found.submodule_search_locations[0]) / "systems"


def systems() -> tuple[str, ...]:
  """The names of systems whose matrices were measured."""
  return tuple(sorted(path.parent.name for path in systems_folder().glob("data/*/gemm")))


def read_operators(
  system: str, backend: str, version: str | None = None, *, gemm: str, kv: str, head_dim: int
) -> Operators:
  """What the package has of a system under a backend. Where it has two kernels, the faster one.

  Raises:
    ModuleNotFoundError: the package is not installed.
    ValueError: a name that it does not have, with those that it has.
  """
  pick(dict.fromkeys(systems()), system, "system")
  pick(dict.fromkeys(_BACKENDS), backend, "backend")
  folder = systems_folder()
  data = folder / "data" / system

  def table(op: str, name: str, keys: tuple[str, ...], who: str = backend, **only: Any):
    path = _newest(data / op / who, name, version if op in ("gemm", "attention") else None)
    return _read(path, keys, only)

  heads = ("num_heads", "num_key_value_heads", "batch_size")
  attention = {"head_dim": head_dim, "kv_cache_dtype": kv, "window_size": 0}
  context = table("attention", "context_attention_perf", (*heads, "isl"), **attention)
  generation = table("attention", "generation_attention_perf", (*heads, "step"), **attention)
  generation[:, 3] += 1  # its own key
  all_reduce = table("comm", "custom_allreduce_perf", ("num_gpus", "message_size"))
  gpu = _spec(folder / f"{system}.yaml")
  return Operators(
    device=Device(
      name=system,
      peak_flops_per_s=gpu["bfloat16_tc_flops"],
      peak_bytes_per_s=gpu["mem_bw"],
      memory_bytes=gpu["mem_capacity"],
    ),
    gemm=table("gemm", "gemm_perf", ("m", "n", "k"), gemm_dtype=gemm),
    lm_head=table("gemm", "gemm_perf", ("m", "n", "k"), gemm_dtype="bfloat16"),
    context=context,
    generation=generation,
    all_reduce=all_reduce,
    memory_share=gpu["mem_bw_empirical_scaling_factor"],
    launch_s=gpu["mem_empirical_constant_latency"],
  )


def _newest(folder: pathlib.Path, name: str, version: str | None) -> pathlib.Path:
  """The file of a table in the folder of its version, None for the newest that has it."""
  found = {path.parent.name: path for path in folder.glob(f"*/{name}.parquet")}
  where = "/".join(folder.parts[-3:])
  if not found:
    raise ValueError(f"the package has no {name} of {where}")
  if version is None:
    version = max(found, key=_order)
  elif version not in found:
    raise ValueError(f"the package has {name} of {where} {', '.join(sorted(found))}, not {version}")
  return found[version]


def _order(version: str) -> tuple[tuple[int, str], ...]:
  """Numbers by size; a release candidate before its release."""
  parts = re.findall(r"\d+|[a-z]+", version.lower())
  order = [(int(p), "") if p.isdecimal() else (-1 if p == "rc" else 0, p) for p in parts]
  return (*order, (0, ""))


def _read(path: pathlib.Path, keys: tuple[str, ...], only: Mapping[str, Any]) -> np.ndarray:
  """Rows [*keys, seconds] of a table that have the values `only`, the fastest of equal keys."""
  from pyarrow import parquet

  known = parquet.read_schema(path).names
  filters = [(name, "==", value) for name, value in only.items() if name in known]
  table = parquet.read_table(path, columns=[*keys, "latency"], filters=filters or None)
  if not table.num_rows:
    what = ", ".join(f"{name}={value}" for name, value in only.items())
    raise ValueError(f"the package has no row of {what} in {'/'.join(path.parts[-4:])}")
  rows = np.column_stack([table[name].to_numpy().astype(float) for name in (*keys, "latency")])
  rows[:, -1] /= 1e3
  rows = rows[np.lexsort(rows.T[::-1])]
  is_first = np.append(True, (np.diff(rows[:, :-1], axis=0) != 0).any(axis=1))
  return rows[is_first]


def _spec(path: pathlib.Path) -> dict[str, float]:
  """The numbers that a system's description has of its GPU."""
  import yaml

  return yaml.safe_load(path.read_text())["gpu"]
