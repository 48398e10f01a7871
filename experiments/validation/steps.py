"""Step times against published measurements: what is fitted on what, and how far off it is.

A step is composed of the medians of its operators where only those were published, without host
time; those of Splitwise are whole iterations as they ran. For each source one model's operators are
fitted, a random half of the points of each (`LayerTimes.split`). The held-out half makes the steps
that judge the fit; all points of the other models make theirs, and those of the same model over
other numbers of devices, but all-reduces of as many bytes as some that were fitted. No step is left
out: contexts that a model was not made for are listed apart, and so are Splitwise's TP 2, batch 64
rows, which take less time than a batch of one and look like out-of-memory artefacts.

Vidur's A40 is fitted and makes no step, as attention of it is missing. Other files that make none,
as attention of as many heads on that device is missing, are not read: layers of Vidur's other
models and TPs on the A100, LLMServingSim's H100. Nor are networks of several nodes, TensorRT-LLM's
tables and Frontier's layers (a second set of one model's on one die).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from configs.hardware import HARDWARE, LINKS
from configs.models import MODELS
from experiments.validation.measured import (
  LLAMA_31_8B,
  LLAMA_31_70B,
  Aiconfigurator,
  LayerTimes,
  llmservingsim,
  splitwise,
  tpu_v6e,
  vidur_all_reduce,
  vidur_attention,
  vidur_layers,
)
from pdjax.core.names import pick
from pdjax.sim.fitting import Errors, Timing, all_reduce_curves, fit, predict
from pdjax.sim.hardware import Device, Fit, Link

HELD_OUT, OTHER_TP, OTHERS, APART = "held out", "other TP", "other models", "apart"
TABLES = "held, tables"
TABLE, ONE_KERNEL, TWO_KERNELS = "fused, table", "fused, fit", "fused, as two"
TARGETS = {  # median, p95; percent
  HELD_OUT: (5.0, 15.0),
  OTHER_TP: (7.0, 20.0),  # nobody asked apart: as of other models
  OTHERS: (7.0, 20.0),
  TABLE: (8.0, 30.0),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
  """One device as one engine's kernels were timed on it.

  `fitted` are the operators of one model, `besides` others that belong to no model or that the
  source lacks: of these the fit sees half. `others` are other models, or the same over other
  numbers of devices, of which it sees some all-reduces alone. What nobody timed is as in `start`.
  """

  name: str
  device: Device
  link: Link | None = None
  fitted: LayerTimes
  besides: tuple[LayerTimes, ...] = ()
  others: tuple[LayerTimes, ...] = ()
  start: Fit = dataclasses.field(default_factory=Fit)

  def timings(self) -> list[Timing]:
    """What is fitted: half of each operator's points."""
    return [timing for half in self._halves() for timing in half.timings()]

  def _halves(self) -> list[LayerTimes]:
    return [operators.split()[0] for operators in (self.fitted, *self.besides)]

  def unseen(self) -> Iterator[tuple[str, LayerTimes]]:
    """Of each group what no fit saw: `others` without all-reduces of as many bytes as fitted."""
    yield HELD_OUT, self.fitted.split()[1]
    seen = {(half.tp, n * half.model.d_model) for half in self._halves() for n in half.all_reduce}
    for other in self.others:
      all_reduce = {
        n: seconds
        for n, seconds in other.all_reduce.items()
        if (other.tp, n * other.model.d_model) not in seen
      }
      group = OTHER_TP if other.model.name == self.fitted.model.name else OTHERS
      yield group, dataclasses.replace(other, all_reduce=all_reduce)

  def fit(self) -> Fit:
    """One kernel for chunks and decodes is fitted last, by itself, on the points of its table."""
    timings = self.timings()
    found = fit(timings, self.device, link=self.link, start=self.start).fit
    curves = all_reduce_curves(timings, self.device)
    found = dataclasses.replace(found, all_reduces=curves)
    if not self.fitted.mixed:
      return found
    return fit(self.fitted.thinned()[0].mixed_timings(), self.device, start=found).fit


class Compared(NamedTuple):
  """Steps of one kind of one model, predicted and measured."""

  source: str
  group: str  # HELD_OUT, OTHER_TP, OTHERS, APART, TABLE, ONE_KERNEL, TWO_KERNELS
  model: str
  kind: str  # prefill, decode, mixed
  predicted_s: np.ndarray
  measured_s: np.ndarray


class Row(NamedTuple):
  """A line of the table. `target`: median and p95 to reach, None for what is listed apart."""

  source: str
  group: str
  kind: str
  models: str
  errors: Errors
  target: tuple[float, float] | None

  @property
  def is_reached(self) -> bool | None:
    if self.target is None:
      return None
    return self.errors.median <= self.target[0] and self.errors.p95 <= self.target[1]


def source_of(name: str, data: pathlib.Path) -> Source:
  """One of `SOURCES`, read from the folder of published data.

  Raises:
    ValueError: no such source.
    OSError: a file that is not there.
  """
  return pick(SOURCES, name, "source of timings")(name, data / "measured")


def _vllm(name: str, folder: pathlib.Path, *, gemm: str, all_reduce: str, link: str) -> Source:
  """vLLM's matrices and attention; what is elementwise from another source of the same die.

  Of H200 and L40S there is none: those of H100 and RTX 4090 (the same generation) stand in.
  """
  hardware = name.split()[0]
  tables = Aiconfigurator(
    folder=folder / "aiconfigurator",
    gemm=gemm,
    attention=gemm.replace("gemm", "attention"),
    all_reduce=all_reduce,
  )
  if hardware == "l40s":
    ada = llmservingsim(folder / "llmservingsim", "RTX4090")
    elementwise = LayerTimes(model=ada.model, elementwise=ada.elementwise)
  else:
    die, small = "a100" if hardware.startswith("a100") else "h100", MODELS["llama2-7b"]
    layers = vidur_layers(folder / "vidur" / f"mlp_{die}_Llama-2-7b-hf.csv", small, 1)
    elementwise = LayerTimes(model=small, elementwise=layers["elementwise"])
  splits = [tables.operators(LLAMA_31_8B, tp) for tp in (2, 4, 8)]
  return Source(
    name=name,
    device=HARDWARE[hardware],
    link=LINKS[link],
    fitted=tables.operators(LLAMA_31_8B),
    besides=(
      elementwise,
      *(LayerTimes(model=o.model, tp=o.tp, all_reduce=o.all_reduce) for o in splits),
    ),
    others=(
      *splits,
      *(tables.operators(LLAMA_31_70B, tp) for tp in (2, 4, 8)),
      *(tables.operators(MODELS["llama2-7b"], tp) for tp in (1, 4, 8)),
      tables.operators(MODELS["opt-13b"]),
    ),
  )


def _a100_vidur(
  name: str, folder: pathlib.Path, *, node: str = "dgx", splits: tuple[int, ...] = (2, 4, 8)
) -> Source:
  """Vidur's layers; attention is Frontier's on an A800 (the same die), Vidur's own or vLLM's.

  Vidur's own is of Llama-2-70B over two devices alone. All-reduces are those of a `node`, over as
  many devices as `splits` has.
  """
  vidur = folder / "vidur"
  attention = folder / "frontier" / "attention_a800_Llama-2-7b_tp1.csv"
  network = vidur / f"net_a100_{node}_all_reduce.csv"
  small, large = MODELS["llama2-7b"], MODELS["llama2-70b"]
  vllm = Aiconfigurator(
    folder=folder / "aiconfigurator",
    gemm="a100_sxm__gemm_vllm_0.14.0",
    attention="a100_sxm__attention_vllm_0.14.0",
    all_reduce="a100_sxm__comm_vllm_0.14.0__custom_allreduce",
  ).operators(LLAMA_31_8B)
  return Source(
    name=name,
    device=HARDWARE[name.split()[0]],
    link=LINKS["nvlink"],
    fitted=LayerTimes(
      **vidur_layers(vidur / "mlp_a100_Llama-2-7b-hf.csv", small, 1), **vidur_attention(attention)
    ),
    besides=tuple(
      LayerTimes(model=small, tp=tp, all_reduce=vidur_all_reduce(network, small, tp))
      for tp in splits
    ),
    others=(
      LayerTimes(
        **vidur_layers(vidur / "mlp_a100_Llama-2-70b-hf.csv", large, 2),
        **vidur_attention(vidur / "attention_a100_llama2-70b_tp2_e2d00e9.csv"),
        all_reduce=vidur_all_reduce(network, large, 2),
      ),
      LayerTimes(  # as many heads
        **vidur_layers(vidur / "mlp_a100_Meta-Llama-3-70B.csv", MODELS["llama3-70b"], 2),
        **vidur_attention(vidur / "attention_a100_llama2-70b_tp2_e2d00e9.csv"),
        all_reduce=vidur_all_reduce(network, MODELS["llama3-70b"], 2),
      ),
      LayerTimes(
        **vidur_layers(vidur / "mlp_a100_Meta-Llama-3-8B.csv", LLAMA_31_8B, 1),
        prefill=vllm.prefill,
        decode=vllm.decode,
      ),
    ),
  )


def _a40_vidur(name: str, folder: pathlib.Path) -> Source:
  """Vidur's layers, and what nobody timed on an A40 as on an A100, in shares of the peaks.

  That is attention, and all-reduces between pairs that NVLink joins.
  """
  path, small = folder / "vidur" / "mlp_a40_Llama-2-7b-hf.csv", MODELS["llama2-7b"]
  return Source(
    name=name,
    device=HARDWARE["a40"],
    fitted=LayerTimes(**vidur_layers(path, small, 1)),
    others=tuple(LayerTimes(**vidur_layers(path, small, tp)) for tp in (2, 4, 8)),
    start=dataclasses.replace(HARDWARE["a100-pairs"].fit, all_reduces=()),
  )


def _h100_vidur(name: str, folder: pathlib.Path) -> Source:
  """Vidur's layers with vLLM's attention, where that was timed for as many heads on one device.

  So there are decodes at TP 4 and 8 alone. Decode attention is fitted to that of Llama-3.1-8B.
  """
  vidur, small = folder / "vidur", MODELS["llama2-7b"]
  network = vidur / "net_h100_dgx_all_reduce.csv"
  vllm = Aiconfigurator(
    folder=folder / "aiconfigurator",
    gemm="h100_sxm__gemm_vllm_0.24.0",
    attention="h100_sxm__attention_vllm_0.24.0",
    all_reduce="h100_sxm__comm_vllm_0.24.0__custom_allreduce",
  )

  def split(tp: int) -> LayerTimes:
    heads = vllm.operators(small, tp)
    return LayerTimes(
      **vidur_layers(vidur / "mlp_h100_Llama-2-7b-hf.csv", small, tp),
      prefill=heads.prefill,
      decode=heads.decode,
      all_reduce=vidur_all_reduce(network, small, tp) if tp > 1 else {},
    )

  return Source(
    name=name,
    device=HARDWARE["h100"],
    link=LINKS["nvlink4"],
    fitted=split(1),
    besides=(
      LayerTimes(model=LLAMA_31_8B, decode=vllm.operators(LLAMA_31_8B).decode),
      *(
        LayerTimes(model=small, tp=tp, all_reduce=vidur_all_reduce(network, small, tp))
        for tp in (2, 4, 8)
      ),
    ),
    others=(split(2), split(4), split(8)),
  )


def _llmservingsim(name: str, folder: pathlib.Path, *, hardware: str) -> Source:
  fitted = llmservingsim(folder / "llmservingsim", hardware)
  return Source(name=name, device=HARDWARE[name.split()[0]], fitted=fitted)


def _tpu(name: str, folder: pathlib.Path) -> Source:
  fitted = tpu_v6e(folder / "llmservingsim")
  return Source(name=name, device=HARDWARE["tpu-v6e"], fitted=fitted)


SOURCES: dict[str, Callable[[str, pathlib.Path], Source]] = {
  "a100 vidur": _a100_vidur,
  "a100-pairs vidur": functools.partial(_a100_vidur, node="pairwise_nvlink", splits=(2, 4)),
  "a40 vidur": _a40_vidur,
  "a100-vllm aiconfigurator": functools.partial(
    _vllm,
    gemm="a100_sxm__gemm_vllm_0.14.0",
    all_reduce="a100_sxm__comm_vllm_0.14.0__custom_allreduce",
    link="nvlink",
  ),
  "h100 vidur": _h100_vidur,
  "h100 aiconfigurator": functools.partial(
    _vllm,
    gemm="h100_sxm__gemm_vllm_0.24.0",
    all_reduce="h100_sxm__comm_vllm_0.24.0__custom_allreduce",
    link="nvlink4",
  ),
  "h200 aiconfigurator": functools.partial(
    _vllm,
    gemm="h200_sxm__gemm_vllm_0.24.0",
    all_reduce="h200_sxm__comm_nccl_2.29.2__nccl",
    link="nvlink4",
  ),
  "l40s aiconfigurator": functools.partial(
    _vllm,
    gemm="l40s__gemm_vllm_0.24.0",
    all_reduce="l40s__comm_nccl_2.27.3__nccl",
    link="pcie4",
  ),
  "rtx-pro-6000 llmservingsim": functools.partial(_llmservingsim, hardware="RTXPRO6000"),
  "rtx-4090 llmservingsim": functools.partial(_llmservingsim, hardware="RTX4090"),
  "tpu-v6e llmservingsim": _tpu,
}
"""By name; the first word is the device in `configs.hardware`."""


def compared(source: Source, fitted: Fit) -> Iterator[Compared]:
  """All steps that can be made of a source, by a fit of its half."""
  for group, operators in source.unseen():
    for kind, steps in operators.steps().items():
      for part, of in _by_context(group, operators.model.max_len, steps):
        predicted_s = predict(fitted, of, source.device, source.link)
        measured_s = np.array([step.seconds for step in of])
        yield Compared(source.name, part, operators.name, kind, predicted_s, measured_s)


def _by_context(
  group: str, max_len: int, steps: Sequence[Timing]
) -> Iterator[tuple[str, list[Timing]]]:
  """Steps within what the model was made for, and those beyond."""

  def longest(step: Timing) -> float:
    counts = step.counts
    return max(
      counts.num_prefill_keys / max(1, counts.num_prefills),
      counts.num_decode_keys / max(1, counts.num_decodes),
    )

  within = [step for step in steps if longest(step) <= max_len]
  beyond = [step for step in steps if longest(step) > max_len]
  yield from ((name, of) for name, of in ((group, within), (APART, beyond)) if of)


def tables_compared(source: Source) -> Iterator[Compared]:
  """Held-out steps by tables of the fitted half, where chunks behind cached tokens were timed."""
  half, held_out = source.fitted.split()
  tables = dataclasses.replace(half, mixed={}).tables()
  for kind, steps in held_out.steps().items():
    predicted_s = np.array([tables.terms_of(step.counts).total_s for step in steps])
    measured_s = np.array([step.seconds for step in steps])
    yield Compared(source.name, TABLES, source.fitted.name, kind, predicted_s, measured_s)


def mixed_compared(source: Source, fitted: Fit) -> Iterator[Compared]:
  """Steps whose attention was one kernel for both kinds, by a table and by the roofline.

  Table and fit have every second value of each axis of that kernel's timings, and the fitted half
  of all other operators; the steps are those of all other points.
  """
  half, held_out = source.fitted.split()
  coarse, rest = source.fitted.thinned()
  steps = dataclasses.replace(held_out, mixed=rest.mixed).mixed_steps()
  measured_s = np.array([step.seconds for step in steps])
  tables = dataclasses.replace(half, mixed=coarse.mixed).tables()
  one = [step._replace(ops=_one_kernel(step.ops)) for step in steps]
  for group, predicted_s in (
    (TABLE, np.array([tables.terms_of(step.counts).total_s for step in steps])),
    (ONE_KERNEL, predict(fitted, one, source.device)),
    (TWO_KERNELS, predict(fitted, steps, source.device)),
  ):
    yield Compared(source.name, group, source.fitted.name, "mixed", predicted_s, measured_s)


def _one_kernel(ops: tuple[str, ...]) -> tuple[str, ...]:
  kept = (op for op in ops if op not in ("attention_prefill", "attention_decode"))
  return (*kept, "attention_mixed")


def splitwise_compared(data: pathlib.Path) -> Iterator[Compared]:
  """Whole iterations of Llama-2-70B, half of them fitted; BLOOM-176B is the other model."""
  link = {"a100": LINKS["nvlink"], "h100": LINKS["nvlink4"]}
  for hardware in ("a100-80gb", "h100-80gb", "h100-80gb-pcap"):
    name = hardware.split("-")[0]
    steps = splitwise(data / "measured" / "splitwise" / "perf_model.csv", hardware)
    groups: dict[str, list[tuple[str, Timing]]] = {HELD_OUT: [], OTHERS: [], APART: []}
    for kind, _, batch, step in steps:
      odd = step.tp == 2 and batch == 64
      own = step.model is MODELS["llama2-70b"]
      groups[APART if odd else HELD_OUT if own else OTHERS].append((kind, step))
    own = groups[HELD_OUT]
    random.Random(0).shuffle(own)
    groups[HELD_OUT] = own[len(own) // 2 :]
    device = HARDWARE[name]
    chosen = [step for _, step in own[: len(own) // 2]]
    fitted = fit(chosen, device, link=link[name], start=Fit()).fit
    for group, pairs in groups.items():
      for kind in ("prefill", "decode"):
        of = [step for its, step in pairs if its == kind]
        if of:
          predicted_s = predict(fitted, of, device, link[name])
          measured_s = np.array([step.seconds for step in of])
          names = sorted({f"{step.model.name} TP{step.tp}" for step in of})
          models = ", ".join(names)
          yield Compared(f"{hardware} splitwise", group, models, kind, predicted_s, measured_s)


def rows_of(found: Iterable[Compared]) -> list[Row]:
  """A row for each source, group and kind, all models together."""
  pooled: dict[tuple[str, str, str], list[Compared]] = {}
  for one in found:
    pooled.setdefault((one.source, one.group, one.kind), []).append(one)
  return [
    Row(
      source,
      group,
      kind,
      ", ".join(dict.fromkeys(one.model for one in parts)),
      Errors.of(
        np.concatenate([one.predicted_s for one in parts]),
        np.concatenate([one.measured_s for one in parts]),
      ),
      TARGETS.get(group),
    )
    for (source, group, kind), parts in pooled.items()
  ]


def step_rows(data: pathlib.Path) -> tuple[list[Row], list[str]]:
  """The whole table: a fit of each source's half, judged by all that it never saw.

  Of sources that lack a file: which one.
  """
  jobs = {name: functools.partial(_source_compared, name, data) for name in SOURCES}
  jobs["splitwise"] = functools.partial(splitwise_compared, data)
  found: list[Compared] = []
  missing = []
  for name, job in jobs.items():
    try:
      found += list(job())
    except FileNotFoundError as error:
      missing.append(f"{name}, as there is no {pathlib.Path(error.filename).name}")
  return rows_of(found), missing


def _source_compared(name: str, data: pathlib.Path) -> Iterator[Compared]:
  source = source_of(name, data)
  fitted = source.fit()
  yield from compared(source, fitted)
  if any(before for _, before, _ in source.fitted.prefill):
    yield from tables_compared(source)
  if source.fitted.mixed:
    yield from mixed_compared(source, fitted)


def table(rows: Sequence[Row]) -> str:
  """The rows as text: errors are median / 95th percentile."""
  lines = [
    f"{'source':<28}{'steps':<14}{'kind':<9}{'n':>6}  {'error':>14}  {'bias':>6}  {'asked':<8}"
    f"        models"
  ]
  for row in rows:
    asked = "" if row.target is None else "{:g} / {:g}".format(*row.target)
    verdict = {True: "", False: "missed", None: ""}[row.is_reached]
    lines.append(
      f"{row.source:<28}{row.group:<14}{row.kind:<9}{row.errors.num_points:>6}  "
      f"{row.errors!s:>14}  {row.errors.bias:>+5.1f}%  {asked:<8}{verdict:<8}{row.models}"
    )
  return "\n".join(lines)
