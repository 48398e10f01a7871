"""Published operator timings, read into one form. Changes nothing.

The files are those of `measured` in the folder of data, whose PROVENANCE.md names sources and
licences: Vidur, Frontier, LLMServingSim and splitwise-sim (MIT), aiconfigurator (Apache-2.0). All
times are those of one device, with its share of the model where that is split.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import functools
import gzip
import itertools
import pathlib
import random
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from configs.models import MODELS
from pdjax.core.costs import StepCounts
from pdjax.core.model_config import ModelConfig
from pdjax.sim.fitting import Timing, whole_step
from pdjax.sim.tables import Grid, Tables

MATRICES = ("qkv", "attn_out", "mlp_up", "mlp_down")
Table = Mapping[int, float]  # tokens -> seconds

LLAMA_31_8B = dataclasses.replace(MODELS["llama3-8b"], name="llama3.1-8b", max_len=131_072)
LLAMA_31_70B = dataclasses.replace(MODELS["llama3-70b"], name="llama3.1-70b", max_len=131_072)
BLOOM = ModelConfig(  # bigscience/bloom: ALiBi and LayerNorm cost what their likes do
  name="bloom-176b",
  num_layers=70,
  d_model=14_336,
  num_heads=112,
  num_kv_heads=112,
  head_dim=128,
  d_ff=57_344,
  vocab_size=250_880,
  max_len=2048,
  norm="layer",
  activation="gelu",
  gated_mlp=False,
  tie_embeddings=True,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
  """What one layer's operators took, of one model over `tp` devices; absent is not measured.

  `linear`: by the operators that were timed together, then tokens. `prefill`: by (sequences,
  cached tokens, chunk) of equal sequences. `decode`: by (sequences, keys). `mixed`, one kernel for
  both: by (chunk, its keys before, decodes, keys of each). `lm_head`, once a step: by rows.
  """

  model: ModelConfig
  tp: int = 1
  linear: Mapping[tuple[str, ...], Table] = dataclasses.field(default_factory=dict)
  elementwise: Table = dataclasses.field(default_factory=dict)
  prefill: Mapping[tuple[int, int, int], float] = dataclasses.field(default_factory=dict)
  decode: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
  mixed: Mapping[tuple[int, int, int, int], float] = dataclasses.field(default_factory=dict)
  all_reduce: Table = dataclasses.field(default_factory=dict)
  lm_head: Table = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    return self.model.name if self.tp == 1 else f"{self.model.name} TP{self.tp}"

  def timings(self) -> list[Timing]:
    """Each measured operator as something to fit."""
    layer, tp = dataclasses.replace(self.model, num_layers=1), self.tp

    def of(table: Table, ops: tuple[str, ...], field: str, share: float = 1) -> Iterator[Timing]:
      for size, seconds in table.items():
        yield Timing(layer, tp, StepCounts(**{field: size}), ops, seconds * share)

    found = [
      timing
      for ops, table in self.linear.items()
      for timing in of(table, ops, "num_prefill_tokens")
    ]
    found += of(self.elementwise, ("elementwise",), "num_prefill_tokens")
    found += of(self.lm_head, ("lm_head",), "num_emitted")
    found += of(self.all_reduce, ("all_reduce",), "num_prefill_tokens", 2)  # two a layer
    for key, seconds in self.prefill.items():
      found.append(Timing(layer, tp, prefill_counts(*key), ("attention_prefill",), seconds))
    for key, seconds in self.decode.items():
      found.append(Timing(layer, tp, decode_counts(*key), ("attention_decode",), seconds))
    return found

  def mixed_timings(self) -> list[Timing]:
    layer = dataclasses.replace(self.model, num_layers=1)
    return [
      Timing(layer, self.tp, mixed_counts(*key), ("attention_mixed",), seconds)
      for key, seconds in self.mixed.items()
    ]

  def thinned(self) -> tuple[LayerTimes, LayerTimes]:
    """Mixed attention at every second value of each axis, its ends among them, and the rest."""
    axes = [sorted(set(values)) for values in zip(*self.mixed)]
    kept = [{*axis[::2], axis[-1]} for axis in axes]
    coarse = {key for key in self.mixed if all(k in values for k, values in zip(key, kept))}
    parts = []
    for first in (True, False):
      mixed = {key: s for key, s in self.mixed.items() if (key in coarse) == first}
      parts.append(dataclasses.replace(self, mixed=mixed))
    return parts[0], parts[1]

  def tables(self) -> Tables:
    """The same as a latency model that is linear between the points."""

    def curve(table: Table) -> Grid | None:
      return Grid.of({(size,): seconds for size, seconds in table.items()}) if table else None

    tokens = set.intersection(*(set(table) for table in self.linear.values()))
    return Tables(
      model=self.model,
      linear=curve({n: sum(t[n] for t in self.linear.values()) for n in sorted(tokens)}),
      elementwise=curve(self.elementwise),
      lm_head=curve(self.lm_head),
      all_reduce=curve(self.all_reduce),
      prefill=Grid.of(
        {(chunk, before): s for (batch, before, chunk), s in self.prefill.items() if batch == 1}
      ),
      decode=Grid.of(self.decode),
      mixed=Grid.of(self.mixed) if self.mixed else None,
    )

  def split(self, seed: int = 0) -> tuple[LayerTimes, LayerTimes]:
    """A random half of the points of each operator, and the other half.

    Token counts are in the same half for all operators, so that steps can be made of it. Of
    all-reduces it is one of every two neighbours, and both ends: they change by leaps, which no fit
    finds where it saw nothing.
    """
    rng = random.Random(seed)
    tables = [*self.linear.values(), self.elementwise]
    tokens = sorted({n for table in tables for n in table})
    chosen = set(rng.sample(tokens, len(tokens) // 2))
    sizes = sorted(self.all_reduce)
    reduced = {rng.choice(sizes[i : i + 2]) for i in range(0, len(sizes), 2)}
    reduced |= {*sizes[:1], *sizes[-1:]}
    halves = []
    picks = {
      field: set(rng.sample(sorted(getattr(self, field)), len(getattr(self, field)) // 2))
      for field in ("prefill", "decode", "mixed", "lm_head")
    }
    for first in (True, False):
      changes = {
        field: {k: v for k, v in getattr(self, field).items() if (k in pick) == first}
        for field, pick in picks.items()
      }
      for field, pick in (("elementwise", chosen), ("all_reduce", reduced)):
        table = getattr(self, field)
        changes[field] = {k: v for k, v in table.items() if (k in pick) == first}
      changes["linear"] = {
        ops: {k: v for k, v in table.items() if (k in chosen) == first}
        for ops, table in self.linear.items()
      }
      halves.append(dataclasses.replace(self, **changes))
    return halves[0], halves[1]

  def steps(self, *, num_mixed: int = 1000, seed: int = 0) -> dict[str, list[Timing]]:
    """Whole steps, by kind, as sums of what their operators took.

    Every prefill and every decode that was timed, so far as the matrices were for as many tokens;
    mixed steps are a random choice of pairs of the two. Where a step's tokens lie between measured
    ones, at most half as many again apart, the matrices are interpolated.
    """
    prefills = {key: (prefill_counts(*key), s) for key, s in self.prefill.items()}
    decodes = {key: (decode_counts(*key), s) for key, s in self.decode.items()}
    made = {
      "prefill": [self._step(counts, attention_s) for counts, attention_s in prefills.values()],
      "decode": [self._step(counts, attention_s) for counts, attention_s in decodes.values()],
    }
    small = [pair for pair in prefills.values() if self._body_s(pair[0].num_tokens) is not None]
    few = [pair for pair in decodes.values() if self._body_s(pair[0].num_tokens) is not None]
    num_pairs = len(small) * len(few)
    chosen = random.Random(seed).sample(range(num_pairs), min(num_pairs, 2 * num_mixed))
    pairs = [(small[i % len(small)], few[i // len(small)]) for i in chosen]
    mixed = (
      self._step(StepCounts(*map(sum, zip(prefill[0], decode[0]))), prefill[1] + decode[1])
      for prefill, decode in pairs
    )
    made["mixed"] = list(itertools.islice(filter(None, mixed), num_mixed))
    return {kind: [step for step in steps if step] for kind, steps in made.items()}

  def mixed_steps(self) -> list[Timing]:
    """Whole steps whose attention was one kernel."""
    steps = (self._step(mixed_counts(*key), seconds) for key, seconds in self.mixed.items())
    return [step for step in steps if step]

  def _step(self, counts: StepCounts, attention_s: float) -> Timing | None:
    body_s = self._body_s(counts.num_tokens)
    if body_s is None:
      return None
    ops = [op for ops in self.linear for op in ops]
    ops += ["elementwise"] * bool(self.elementwise) + ["all_reduce"] * bool(self.all_reduce)
    ops += ["attention_prefill"] * bool(counts.num_prefill_tokens)
    ops += ["attention_decode"] * bool(counts.num_decodes)
    total_s = self.model.num_layers * (body_s + attention_s)
    head_s = between(self.lm_head, counts.num_decodes)
    if head_s is not None:
      ops.append("lm_head")
      counts = counts._replace(num_emitted=counts.num_decodes)
      total_s += head_s
    return Timing(self.model, self.tp, counts, tuple(ops), total_s)

  def _body_s(self, num_tokens: int) -> float | None:
    """All of a layer but attention."""
    tables = [*self.linear.values(), self.elementwise, self.all_reduce, self.all_reduce]
    parts = [between(table, num_tokens) for table in tables if table]
    return None if None in parts else sum(parts)


def between(table: Table, size: int, *, apart: float = 1.5) -> float | None:
  """The value at `size`, or between its neighbours if these are not more than so far apart.

  The table's sizes ascend.
  """
  if size in table:
    return table[size]
  keys = list(table)
  i = bisect.bisect(keys, size)
  if not 0 < i < len(keys) or keys[i] > apart * keys[i - 1]:
    return None
  low, high = keys[i - 1], keys[i]
  return table[low] + (size - low) / (high - low) * (table[high] - table[low])


def prefill_counts(num_prefills: int, before: int, chunk: int) -> StepCounts:
  return StepCounts(
    num_prefill_tokens=num_prefills * chunk,
    num_prefill_pairs=num_prefills * (before * chunk + chunk * (chunk + 1) // 2),
    num_prefill_keys=num_prefills * (before + chunk),
    num_prefills=num_prefills,
  )


def decode_counts(num_decodes: int, keys: int) -> StepCounts:
  return StepCounts(num_decodes=num_decodes, num_decode_keys=num_decodes * keys)


def mixed_counts(chunk: int, before: int, num_decodes: int, keys: int) -> StepCounts:
  both = prefill_counts(1, before, chunk), decode_counts(num_decodes, keys)
  return StepCounts(*map(sum, zip(*both)))


# Files -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def read_rows(path: pathlib.Path) -> tuple[dict[str, str], ...]:
  with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
    return tuple(csv.DictReader(file))


def medians(pairs: Iterable[tuple]) -> dict:
  """(key, value) pairs as a table: the median where a key was measured more than once."""
  groups: dict = {}
  for key, value in pairs:
    groups.setdefault(key, []).append(value)
  return {key: median(values) for key, values in sorted(groups.items())}


def vidur_layers(path: pathlib.Path, model: ModelConfig, tp: int) -> dict:
  """`linear` and `elementwise` of an mlp file of Vidur. Of the two adds one was timed."""
  rows = [row for row in read_rows(path) if int(row["num_tensor_parallel_workers"]) == tp]
  columns = {
    "qkv": "attn_pre_proj_ms", "attn_out": "attn_post_proj_ms",
    "mlp_up": "mlp_up_proj_ms", "mlp_down": "mlp_down_proj_ms",
  }  # fmt: skip
  linear = {
    (op,): medians((int(row["num_tokens"]), float(row[column]) / 1e3) for row in rows)
    for op, column in columns.items()
  }
  small = ("input_layernorm_ms", "attn_rope_ms", "post_attention_layernorm_ms", "mlp_act_ms",
           "add_ms", "add_ms")  # fmt: skip
  elementwise = medians(
    (int(row["num_tokens"]), sum(float(row[column]) for column in small) / 1e3) for row in rows
  )
  return {"model": model, "tp": tp, "linear": linear, "elementwise": elementwise}


def vidur_attention(path: pathlib.Path) -> dict:
  """`prefill` and `decode` of an attention file of Vidur's form."""
  prefill, decode = [], []
  for row in read_rows(path):
    cached, batch = int(row["kv_cache_size"]), int(row["batch_size"])
    if row["is_prefill"] == "True":
      key = batch, cached, int(row["prefill_chunk_size"])
      prefill.append((key, float(row["attn_prefill_ms"]) / 1e3))
    else:
      decode.append(((batch, cached + 1), float(row["attn_decode_ms"]) / 1e3))
  return {
    "prefill": {k: s for k, s in medians(prefill).items() if s},
    "decode": {k: s for k, s in medians(decode).items() if s},
  }


def vidur_all_reduce(path: pathlib.Path, model: ModelConfig, tp: int) -> Table:
  """`all_reduce` of a network file of Vidur, inside a node, at the tokens of its mlp files."""
  sizes = medians(
    (int(row["size"]), float(row["all_reduce_ms"]) / 1e3)
    for row in read_rows(path)
    if int(row["num_workers"]) == tp == int(row["devices_per_node"])
  )
  tokens = [*range(1, 9), *range(16, 1024, 8), *range(1024, 2048, 16), *range(2048, 4097, 32)]
  table = {n: between(sizes, 2 * n * model.d_model) for n in tokens}
  return {n: seconds for n, seconds in table.items() if seconds is not None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Aiconfigurator:
  """The tables of one GPU by one version of an engine, as aiconfigurator-core 0.12 has them."""

  folder: pathlib.Path
  gemm: str
  attention: str
  all_reduce: str

  def operators(self, model: ModelConfig, tp: int = 1) -> LayerTimes:
    """One model's operators: its matrices interpolated between those timed, as that package does.

    Bilinear in the sizes of the matrix, at each number of tokens that its neighbours were timed at.
    """
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    d, width = model.d_model, model.head_dim
    shapes = {
      "qkv": ((heads + 2 * kv_heads) * width, d),
      "attn_out": (d, heads * width),
      "mlp_up": ((2 if model.gated_mlp else 1) * model.d_ff // tp, d),
      "mlp_down": (d, model.d_ff // tp),
    }
    gemms = self._gemms()
    linear = {(op,): _at_shape(gemms, n, k) for op, (n, k) in shapes.items()}
    own = [
      row
      for row in read_rows(self.folder / f"{self.attention}__context_attention_perf.csv.gz")
      if int(row["num_heads"]) == heads and int(row["num_key_value_heads"]) == kv_heads
    ]
    prefill = medians(
      ((int(row["batch_size"]), 0, int(row["isl"])), float(row["latency"]) / 1e3) for row in own
    )
    own = [
      row
      for row in read_rows(self.folder / f"{self.attention}__generation_attention_perf.csv.gz")
      if int(row["num_heads"]) == heads and int(row["num_key_value_heads"]) == kv_heads
    ]
    decode = medians(
      ((int(row["batch_size"]), int(row["step"]) + 1), float(row["latency"]) / 1e3) for row in own
    )
    all_reduce = self._all_reduces(model, tp) if tp > 1 else {}
    return LayerTimes(
      model=model, tp=tp, linear=linear, prefill=prefill, decode=decode, all_reduce=all_reduce
    )

  def _gemms(self) -> dict[int, dict[tuple[int, int], float]]:
    return _gemm_table(self.folder / f"{self.gemm}__gemm_perf.csv.gz")

  def _all_reduces(self, model: ModelConfig, tp: int) -> Table:
    """By tokens: the sizes that were timed are powers of two, all those of a model between them."""
    rows = [
      row
      for row in read_rows(self.folder / f"{self.all_reduce}_perf.csv.gz")
      if int(row["num_gpus"]) == tp
      if row.get("op_name", "all_reduce") == "all_reduce"
      if row.get("backend", "vllm_graph") == "vllm_graph"
    ]
    sizes = medians((int(row["message_size"]), float(row["latency"]) / 1e3) for row in rows)
    table = {n: between(sizes, 2 * n * model.d_model, apart=2) for n in sorted(self._gemms())}
    return {n: s for n, s in table.items() if s is not None}


@functools.lru_cache(maxsize=16)
def _gemm_table(path: pathlib.Path) -> dict[int, dict[tuple[int, int], float]]:
  by_tokens: dict[int, dict[tuple[int, int], float]] = {}
  for row in read_rows(path):
    shape = int(row["n"]), int(row["k"])
    by_tokens.setdefault(int(row["m"]), {})[shape] = float(row["latency"]) / 1e3
  return dict(sorted(by_tokens.items()))


def _at_shape(gemms: Mapping[int, Mapping[tuple[int, int], float]], n: int, k: int) -> Table:
  sizes = sorted({size for table in gemms.values() for shape in table for size in shape})
  found = {}
  for tokens, table in gemms.items():
    corners = [
      (table.get((n_at, k_at)), n_share * k_share)
      for n_at, n_share in _neighbours(sizes, n)
      for k_at, k_share in _neighbours(sizes, k)
    ]
    if all(seconds is not None for seconds, _ in corners):
      found[tokens] = sum(seconds * share for seconds, share in corners)
  return found


def _neighbours(sizes: list[int], size: int) -> list[tuple[int, float]]:
  """Measured sizes around `size` and how near it is to each."""
  if size in sizes:
    return [(size, 1.0)]
  i = bisect.bisect(sizes, size)
  low, high = sizes[i - 1], sizes[i]
  share = (size - low) / (high - low)
  return [(low, 1 - share), (high, share)]


def splitwise(path: pathlib.Path, hardware: str) -> list[tuple[str, int, int, Timing]]:
  """Whole steps of a 2023 vLLM: kind, prompt, batch, timing. Both models as they were named.

  A step of prompts has `batch` of one length; of decodes the mean over an output is given, here as
  one at the middle of it.
  """
  prompts, tokens = [], []
  for row in read_rows(path):
    if row["hardware"] != hardware:
      continue
    name, tp = row["model"], int(row["tensor_parallel"])
    prompt, batch, output = (
      int(row[column]) for column in ("prompt_size", "batch_size", "token_size")
    )
    prompts.append(((name, tp, prompt, batch), float(row["prompt_time"]) / 1e3))
    tokens.append(((name, tp, prompt, batch, output), float(row["token_time"]) / 1e3))
  models = {"llama2-70b": MODELS["llama2-70b"], "bloom-176b": BLOOM}
  made = []
  for (name, tp, prompt, batch), seconds in medians(prompts).items():
    counts = prefill_counts(batch, 0, prompt)._replace(num_emitted=batch)
    made.append(("prefill", prompt, batch, whole_step(models[name], tp, counts, seconds)))
  for (name, tp, prompt, batch, output), seconds in medians(tokens).items():
    counts = decode_counts(batch, prompt + output // 2)._replace(num_emitted=batch)
    made.append(("decode", prompt, batch, whole_step(models[name], tp, counts, seconds)))
  return made


def llmservingsim(folder: pathlib.Path, hardware: str) -> LayerTimes:
  """Llama-3.1-8B as vLLM 0.19 runs it: norm and residual add are one kernel, attention one."""
  stem = f"{hardware}_llama3.1-8b_tp1"
  layers: dict[str, dict[int, float]] = {}
  for row in read_rows(folder / f"{stem}_dense.csv"):
    layers.setdefault(row["layer"], {})[int(row["tokens"])] = float(row["time_us"]) / 1e6
  names = {"qkv": "qkv_proj", "attn_out": "o_proj", "mlp_up": "gate_up_proj",
           "mlp_down": "down_proj"}  # fmt: skip
  small = ("layernorm", "layernorm", "rotary_emb", "act_fn")
  prefill, decode, mixed = {}, {}, {}
  for row in read_rows(folder / f"{stem}_attention.csv"):
    chunk, before, num_decodes, keys = (
      int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    )
    seconds = float(row["time_us"]) / 1e6
    if not num_decodes:
      prefill[1, before, chunk] = seconds
    elif not chunk:
      decode[num_decodes, keys] = seconds
    else:
      mixed[chunk, before, num_decodes, keys] = seconds
  return LayerTimes(
    model=LLAMA_31_8B,
    linear={(op,): layers[name] for op, name in names.items()},
    elementwise={n: sum(layers[name][n] for name in small) for n in layers["act_fn"]},
    prefill=prefill,
    decode=decode,
    mixed=mixed,
    lm_head={
      int(row["sequences"]): float(row["time_us"]) / 1e6
      for row in read_rows(folder / f"{stem}_per_sequence.csv")
      if row["layer"] == "lm_head"
    },
  )


def tpu_v6e(folder: pathlib.Path) -> LayerTimes:
  """Llama-3.1-8B on a TPU. XLA fuses layers' operators as it likes: their sum is what counts."""
  layers: dict[str, dict[int, float]] = {}
  for row in read_rows(folder / "TPU-v6e-1_llama3.1-8b_tp1_layers.csv.gz"):
    layers.setdefault(row["layer_name"], {})[int(row["input"])] = float(row["latency(ns)"]) / 1e9
  body = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
  small = ("input_layernorm", "post_layernorm", "rope", "act_fn")
  prefill, decode = [], []
  for row in read_rows(folder / "TPU-v6e-1_llama3.1-8b_tp1_attention.csv"):
    batch, cached, chunk = (
      int(row[name]) for name in ("batch_size", "kv_cache_size", "prefill_chunk_size")
    )
    seconds = float(row["p50_ns"]) / 1e9
    if row["is_prefill"] == "True":
      prefill.append(((batch, cached, chunk), seconds))
    else:
      decode.append(((batch, cached + 1), seconds))

  def total(names: tuple[str, ...]) -> Table:
    return {n: sum(layers[name].get(n, 0.0) for name in names) for n in layers["q_proj"]}

  return LayerTimes(
    model=LLAMA_31_8B,
    linear={MATRICES: total(body)},
    elementwise=total(small),
    prefill=medians(prefill),
    decode=medians(decode),
    lm_head=layers["lm_head"],
  )
