"""How close the engine comes to what this machine can do, and to peers on the same requests.

    python -m experiments.bench_engine [--requests=FILE] [--arrivals=all_at_once|file] [--out=DIR]

Steps are compared with ceilings measured in the same run: a large matmul (FLOP/s), `np.copyto` on
warm buffers (bytes read plus written), and the model's own weight matmuls at the same number of
rows. Then a workload is served by one pool with chunked prefill: `floor_share` is the time that its
FLOPs would take at the matmul rate, over the time it took. Prints a table, writes `bench.json`.

The file of requests is JSON: `{"requests": [{"id", "prompt_ids", "output_len", "arrival_s"}]}`.
Without one, 24 prompts of the Python documentation, a sixth of them long.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from experiments.program import FLAGS, Progress, main, out_folder, whole_file
from pdjax.core.clock import WallClock
from pdjax.core.costs import StepCounts, count_plan, count_slices, step_costs, total_flops
from pdjax.core.events import EventLog, Step
from pdjax.core.model_config import ModelConfig
from pdjax.core.plan import StepPlan, StepResult
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics.latency import percentile, request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.probe import probe_plan
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool
from pdjax.serving.executor import Executor
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.serving.step_time import FittedStepTime
from pdjax.sim.hardware import PCIE_4
from pdjax.sim.sim_executor import SimExecutor

if TYPE_CHECKING:
  from pdjax.models.checkpoints.checkpoint import Checkpoint

PREFILL_TOKENS = 512
DECODE_CONTEXT = 256
HOST_ROWS = 64
IDLE_ROWS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
  """What will be measured."""

  checkpoint: Checkpoint
  requests: tuple[Request, ...]
  source: str
  arrivals: str
  token_budget: int
  num_rows: int
  page_size: int
  out: pathlib.Path


# Input --------------------------------------------------------------------------------------------


def read_requests(path: pathlib.Path, vocab_size: int) -> tuple[Request, ...]:
  """Reads a file of requests; greedy, exactly `output_len` tokens each.

  Raises:
    ValueError: not such a file, with what is wrong and in which request.
  """
  try:
    rows = json.loads(path.read_text())["requests"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f"--requests={path}: not a JSON file with 'requests' ({error!r})") from error
  requests = []
  for number, row in enumerate(rows):
    try:
      ids = tuple(row["prompt_ids"])
      if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise ValueError(f"prompt_ids are not all whole numbers from 0 to {vocab_size - 1}")
      requests.append(
        Request(
          request_id=row["id"],
          arrival_s=float(row["arrival_s"]),
          num_prompt_tokens=len(ids),
          prompt_ids=ids,
          sampling=SamplingParams(max_tokens=row["output_len"]),
        )
      )
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f"--requests={path}: request {number}: {error!r}") from error
  if not requests:
    raise ValueError(f"--requests={path}: no requests")
  return tuple(requests)


def own_requests(tokenizer) -> tuple[Request, ...]:
  """24 prompts like those that peers were measured on, a sixth of them long."""
  from pdjax.workloads import make_requests
  from pdjax.workloads.arrivals import Poisson
  from pdjax.workloads.lengths import Mix
  from pdjax.workloads.prompts import text_prompts

  rng = np.random.default_rng(0)
  mix = Mix(
    prompt_tokens=(100, 250),
    long_prompt_tokens=(1000, 1400),
    output_tokens=(18, 48),
    long_every=6,
  )
  lengths = mix.pairs(24, rng)
  return make_requests(
    Poisson(rate_rps=0.65).times_s(24, rng),
    lengths,
    prompts=text_prompts(tokenizer, lengths, 0),
    sampling=SamplingParams(max_tokens=1),
  )


# Ceilings -----------------------------------------------------------------------------------------


def best_s(run: Callable[[], object], repeats: int) -> float:
  return min(_times_s(run, repeats))


def median_s(run: Callable[[], object], repeats: int) -> float:
  return statistics.median(_times_s(run, repeats))


def _times_s(run, repeats):
  run()  # compiles, warms caches
  times = []
  for _ in range(repeats):
    start_s = time.perf_counter()
    run()
    times.append(time.perf_counter() - start_s)
  return times


def matmul_flops_per_s() -> float:
  import jax
  import jax.numpy as jnp

  m, k, n = 2048, 4096, 4096
  x, w = jnp.ones((m, k), jnp.float32), jnp.ones((k, n), jnp.float32)
  multiply = jax.jit(lambda x, w: x @ w)
  return 2 * m * k * n / best_s(lambda: multiply(x, w).block_until_ready(), 5)


def copy_bytes_per_s() -> float:
  """Read plus written, one thread."""
  source, target = np.ones(1 << 26, np.float32), np.ones(1 << 26, np.float32)
  return 2 * source.nbytes / best_s(lambda: np.copyto(target, source), 5)


def weight_matmuls_s(
  model, num_rows: int, *, num_emitted: int | None = None, repeats: int = 9
) -> float:
  """Every matrix of the model times `num_rows` rows, and nothing else; the median of `repeats`.

  The LM head is multiplied by `num_emitted` rows, None for all.
  """
  import jax
  import jax.numpy as jnp

  matrices = []
  for name, axes, param in zip(model.param_names, model.param_axes, model.params):
    if "->" not in axes or (name == "embedding" and not model.config.tie_embeddings):
      continue
    num_in = len(axes.split("->")[0].split())
    is_head = name == "embedding"  # tied: V -> D, multiplied along D
    contracted = (1,) if is_head else tuple(range(num_in))
    own = (num_emitted or num_rows) if name in ("embedding", "unembedding") else num_rows
    rows = jnp.ones((own, *(param.shape[i] for i in contracted)), param.dtype)
    matrices.append((contracted, rows, param))

  dims = [contracted for contracted, _, _ in matrices]

  @jax.jit
  def multiply(rows, params):
    return [
      jax.lax.dot_general(x, w, ((tuple(range(1, x.ndim)), contracted), ((), ())))
      for contracted, x, w in zip(dims, rows, params)
    ]

  rows, params = [x for _, x, _ in matrices], [w for _, _, w in matrices]
  return median_s(lambda: jax.block_until_ready(multiply(rows, params)), repeats)


# The engine ---------------------------------------------------------------------------------------


class _NoDevice(SimExecutor):
  """Builds the arrays of every step as the engine does, and gives a token at once."""

  def __init__(self, pages: PageConfig, buckets, vocab_size: int):
    from pdjax.engine.batch import RowState, step_inputs

    super().__init__(step_s=lambda plan: 0.0, link=PCIE_4, bytes_per_token=0)
    self._rows = RowState(pages, vocab_size)
    self._step_inputs, self._buckets = step_inputs, buckets

  def submit(self, plan: StepPlan, now_s: float, exports=()) -> Done:
    self._step_inputs(plan, self._buckets, self._rows)
    num_tokens = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
    return Done(StepResult(token_ids=(1,) * num_tokens))


class Done:
  """A ticket of a step that took no time."""

  finish_s = None

  def __init__(self, result: StepResult):
    self._result = result

  def is_ready(self) -> bool:
    return True

  def block(self) -> None:
    pass

  def result(self) -> StepResult:
    return self._result


def make_pool(executor: Executor, pages: PageConfig, token_budget: int) -> Pool:
  limits = SchedulerConfig(token_budget=token_budget)
  scheduler = Scheduler(make_policy("sarathi"), pages, limits, FittedStepTime())
  return Pool("mixed0", "mixed", scheduler, executor)


def host_s_per_step(vocab_size: int) -> float:
  """Plan, batch arrays, commit, the loop and its log, with 64 running sequences."""
  from pdjax.engine.build import default_buckets

  pages = PageConfig(
    num_rows=HOST_ROWS,
    page_size=16,
    pages_per_row=64,
    num_pages=64 * HOST_ROWS,
    contiguous=True,
  )
  buckets = default_buckets(pages, whole_budget=512, chunk_budget=512)
  requests = [
    Request(
      request_id=i,
      arrival_s=0.0,
      num_prompt_tokens=32,
      prompt_ids=(1,) * 32,
      sampling=SamplingParams(max_tokens=300),
    )
    for i in range(HOST_ROWS)
  ]

  def run() -> float:
    log = EventLog()
    cluster = Cluster([make_pool(_NoDevice(pages, buckets, vocab_size), pages, 512)])
    for _ in serve(cluster, Inbox(requests), WallClock(), log):
      pass
    ends = [e.end_s for e in log if isinstance(e, Step) and len(e.decode_ids) == HOST_ROWS]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))

  return statistics.median(run() for _ in range(3))


def decode_gaps(steps_in_flight: int) -> tuple[float, float, list[tuple[int, ...]]]:
  """The tiny model with 32 rows decoding: idle share of the device, seconds a step, and the tokens.

  Idle is from the end of a decode step to when the device could begin the next one.
  """
  from pdjax.engine.build import build_executors, default_buckets, warm_up
  from pdjax.engine.mesh import ensure_devices
  from pdjax.models.checkpoints.checkpoint import open_checkpoint
  from pdjax.sources import resolve

  devices = ensure_devices(1)
  model = open_checkpoint(str(resolve("tiny", show=lambda _: None))).load(target=devices[0])
  pages = PageConfig(
    num_rows=IDLE_ROWS, page_size=16, pages_per_row=16, num_pages=16 * IDLE_ROWS, contiguous=True
  )
  buckets = default_buckets(pages, whole_budget=256, chunk_budget=256)
  (executor,) = build_executors(model, pages, buckets, [devices], layout="slots")
  for _ in warm_up([executor], [{"prefill", "decode", "mixed"}]):
    pass
  requests = [
    Request(
      request_id=i,
      arrival_s=0.0,
      num_prompt_tokens=16,
      prompt_ids=tuple(range(i, i + 16)),
      sampling=SamplingParams(max_tokens=200),
    )
    for i in range(IDLE_ROWS)
  ]
  log = EventLog()
  cluster = Cluster([make_pool(executor, pages, 256)])
  for _ in serve(cluster, Inbox(requests), WallClock(), log, steps_in_flight=steps_in_flight):
    pass
  steps = [e for e in log if isinstance(e, Step) and len(e.decode_ids) == IDLE_ROWS]
  span_s = steps[-1].end_s - steps[0].end_s
  idle_s = sum(b.start_s - a.end_s for a, b in itertools.pairwise(steps))
  records = request_records(log)
  tokens = [records[i].token_ids for i in range(IDLE_ROWS)]
  return idle_s / span_s, span_s / (len(steps) - 1), tokens


def serve_requests(
  executor, pages: PageConfig, token_budget: int, requests: Sequence[Request], show
) -> EventLog:
  executor.reset()
  log = EventLog()
  cluster = Cluster([make_pool(executor, pages, token_budget)])
  ended = 0
  for turn in serve(cluster, Inbox(requests), WallClock(), log, steps_in_flight=2):
    ended += len(turn.ended) + len(turn.failed)
    show(f"served {ended} of {len(requests)} requests, {turn.now_s:.0f} s")
  return log


def workload_flops(config: ModelConfig, requests: Sequence[Request]) -> int:
  """Matrices and attention of every token computed once, the head where a token is emitted."""
  prompts = [r.num_prompt_tokens for r in requests]
  decodes = [r.num_prompt_tokens + i for r in requests for i in range(r.sampling.max_tokens - 1)]
  counts = count_slices(
    prefill_starts=[0] * len(prompts),
    prefill_tokens=prompts,
    decode_positions=decodes,
    num_emitted=sum(r.sampling.max_tokens for r in requests),
  )
  return model_flops(config, counts)


def model_flops(config: ModelConfig, counts: StepCounts) -> int:
  return total_flops(op for op in step_costs(counts, config) if op.kind != "elementwise")


# The program --------------------------------------------------------------------------------------


def prepare() -> Bench:
  from pdjax.sources import resolve

  out = out_folder("bench_engine")
  for name in ("token_budget", "num_rows"):
    if getattr(FLAGS, name) < 1:
      raise ValueError(f"--{name}={getattr(FLAGS, name)} must be at least 1")
  if FLAGS.token_budget < FLAGS.num_rows:
    raise ValueError(
      f"--token_budget={FLAGS.token_budget} cannot hold a decode of --num_rows={FLAGS.num_rows}"
    )
  path = resolve(FLAGS.model, show=print)
  from pdjax.models.checkpoints.checkpoint import open_checkpoint  # which imports JAX

  checkpoint = open_checkpoint(path)
  if FLAGS.requests is None:
    from pdjax.tokenizer import load_tokenizer

    requests, source = own_requests(load_tokenizer(path)), "24 prompts made here"
  else:
    vocab_size = checkpoint.config.vocab_size
    requests, source = read_requests(pathlib.Path(FLAGS.requests), vocab_size), FLAGS.requests
  if FLAGS.arrivals == "all_at_once":
    requests = tuple(dataclasses.replace(r, arrival_s=0.0) for r in requests)
  return Bench(
    checkpoint=checkpoint,
    requests=requests,
    source=source,
    arrivals=FLAGS.arrivals,
    token_budget=FLAGS.token_budget,
    num_rows=FLAGS.num_rows,
    page_size=16,
    out=out,
  )


def run(bench: Bench) -> int:
  from pdjax.engine.build import build_executors, default_buckets, warm_up
  from pdjax.engine.mesh import ensure_devices

  progress = Progress()
  devices = ensure_devices(1)
  model = bench.checkpoint.load(target=devices[0])
  config = model.config
  longest = max(max(r.max_cached_tokens for r in bench.requests), PREFILL_TOKENS)
  pages_per_row = -(-longest // bench.page_size)
  pages = PageConfig(
    num_rows=bench.num_rows,
    page_size=bench.page_size,
    pages_per_row=pages_per_row,
    num_pages=bench.num_rows * pages_per_row,
    contiguous=True,
  )
  buckets = default_buckets(
    pages, whole_budget=max(PREFILL_TOKENS, bench.token_budget), chunk_budget=bench.token_budget
  )
  (executor,) = build_executors(model, pages, buckets, [devices], layout="slots")
  for line in warm_up([executor], [{"prefill", "decode", "mixed"}]):
    progress.update(f"warm-up: {line}")

  progress.update("measuring ceilings and steps")
  flops_per_s, bytes_per_s = matmul_flops_per_s(), copy_bytes_per_s()
  result: dict = {
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "load_average": os.getloadavg()[0],
    "model": config.name,
    "date": time.strftime("%Y-%m-%d %H:%M"),
    "matmul_flops_per_s": flops_per_s,
    "copy_bytes_per_s": bytes_per_s,
  }

  def step_s(plan: StepPlan) -> float:
    return median_s(lambda: executor.submit(plan, 0.0).result(), 9)

  plan = probe_plan(pages, prefills=(PREFILL_TOKENS,))
  prefill_s = step_s(plan)
  result["prefill"] = {
    "tokens": PREFILL_TOKENS,
    "step_s": prefill_s,
    "matmul_share": model_flops(config, count_plan(plan)) / prefill_s / flops_per_s,
  }
  weight_bytes = config.num_params * 4
  for rows in (1, 8):
    decode_s = step_s(probe_plan(pages, decodes=rows, context=DECODE_CONTEXT))
    own_s = weight_matmuls_s(model, rows)
    kv_bytes = rows * DECODE_CONTEXT * config.kv_bytes_per_token(4)
    result[f"decode_{rows}"] = {
      "rows": rows,
      "context": DECODE_CONTEXT,
      "step_s": decode_s,
      "copy_share": (weight_bytes + kv_bytes) / decode_s / bytes_per_s,
      "own_matmuls_s": own_s,
      "own_matmuls_share": own_s / decode_s,
    }
  result["host_s_per_step"] = host_s_per_step(config.vocab_size)
  progress.update("measuring the gaps between decode steps")
  alone_share, alone_s, one = decode_gaps(1)
  share, planned_s, two = decode_gaps(2)
  result["decode_gaps"] = {
    "rows": IDLE_ROWS,
    "idle_share": share,
    "step_s": planned_s,
    "idle_share_one_in_flight": alone_share,
    "step_s_one_in_flight": alone_s,
    "tokens_equal": one == two,
  }

  log = serve_requests(executor, pages, bench.token_budget, bench.requests, progress.update)
  records = request_records(log)
  alone: dict[int, tuple[int, ...]] = {}
  for number, request in enumerate(bench.requests, 1):
    own = serve_requests(
      executor,
      pages,
      bench.token_budget,
      [dataclasses.replace(request, arrival_s=0.0)],
      lambda _: None,
    )
    alone[request.request_id] = request_records(own)[request.request_id].token_ids
    progress.update(f"one at a time: {number} of {len(bench.requests)}")
  span_s = max(r.token_s[-1] for r in records.values() if r.token_s)
  ttft = [r.ttft_s for r in records.values() if r.ttft_s is not None]
  itl = [gap for r in records.values() for gap in r.itl_s]
  num_prompt = sum(r.num_prompt_tokens for r in bench.requests)
  num_output = sum(len(r.token_ids) for r in records.values())
  flops = workload_flops(config, bench.requests)
  same = sum(records[i].token_ids == ids for i, ids in alone.items())
  result["workload"] = {
    "source": bench.source,
    "arrivals": bench.arrivals,
    "requests": len(bench.requests),
    "prompt_tokens": num_prompt,
    "output_tokens": num_output,
    "token_budget": bench.token_budget,
    "num_rows": bench.num_rows,
    "span_s": span_s,
    "flops": flops,
    "floor_s": flops / flops_per_s,
    "floor_share": flops / flops_per_s / span_s,
    "output_tokens_per_s": num_output / span_s,
    "ttft_p50_s": percentile(ttft, 50),
    "ttft_p90_s": percentile(ttft, 90),
    "itl_p50_s": percentile(itl, 50),
    "itl_p99_s": percentile(itl, 99),
    "itl_max_s": max(itl, default=None),
    "requests_equal_to_one_at_a_time": same,
  }
  progress.done("")
  print(table(result))
  bench.out.mkdir(parents=True, exist_ok=True)
  with whole_file(bench.out / "bench.json") as part:
    part.write_text(json.dumps(result, indent=2) + "\n")
  print(f"wrote {bench.out / 'bench.json'}")
  return 0 if same == len(bench.requests) else 1


def table(result: dict) -> str:
  prefill, work, gaps = result["prefill"], result["workload"], result["decode_gaps"]
  lines = [
    f"{result['model']} in float32, {result['machine']}, load {result['load_average']:.1f}, "
    f"{result['date']}",
    f"ceilings: matmul {result['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s, copy "
    f"{result['copy_bytes_per_s'] / 1e9:.1f} GB/s (read + written, one thread)",
    f"prefill {prefill['tokens']} tokens  {prefill['step_s'] * 1e3:7.1f} ms  "
    f"{prefill['matmul_share']:.0%} of the matmul rate",
  ]
  for rows in (1, 8):
    decode = result[f"decode_{rows}"]
    lines.append(
      f"decode {rows} rows        {decode['step_s'] * 1e3:7.1f} ms  "
      f"{decode['copy_share']:.0%} of the copy rate, {decode['own_matmuls_share']:.0%} of its own "
      f"matmuls ({decode['own_matmuls_s'] * 1e3:.1f} ms)"
    )
  lines += [
    f"host per step, {HOST_ROWS} rows  {result['host_s_per_step'] * 1e3:7.3f} ms",
    f"tiny, {IDLE_ROWS} rows, two steps in flight: idle {gaps['idle_share']:.1%}, "
    f"{gaps['step_s'] * 1e3:.2f} ms a step; one: {gaps['idle_share_one_in_flight']:.1%}, "
    f"{gaps['step_s_one_in_flight'] * 1e3:.2f} ms; tokens "
    f"{'equal' if gaps['tokens_equal'] else 'DIFFER'}",
    "",
    f"{work['requests']} requests, {work['prompt_tokens']} prompt + {work['output_tokens']} output "
    f"tokens, arrivals {work['arrivals']}, budget {work['token_budget']}, {work['num_rows']} rows",
    f"  span {work['span_s']:.1f} s, {work['floor_share']:.0%} of the floor of "
    f"{work['floor_s']:.1f} s; {work['output_tokens_per_s']:.1f} output tokens/s",
    f"  TTFT p50 {work['ttft_p50_s']:.2f} s, p90 {work['ttft_p90_s']:.2f} s; ITL p50 "
    f"{work['itl_p50_s'] * 1e3:.0f} ms, p99 {work['itl_p99_s'] * 1e3:.0f} ms, max "
    f"{work['itl_max_s'] * 1e3:.0f} ms",
    f"  tokens equal to one request at a time: {work['requests_equal_to_one_at_a_time']} of "
    f"{work['requests']} requests",
  ]
  return "\n".join(lines)


if __name__ == "__main__":
  flags.DEFINE_string("model", "smollm2-135m", "a model by name, or a path")
  flags.DEFINE_string("requests", None, "JSON file of requests; default: made here")
  flags.DEFINE_enum("arrivals", "all_at_once", ["all_at_once", "file"], "when requests come")
  flags.DEFINE_integer("token_budget", 256, "most tokens of a step")
  flags.DEFINE_integer("num_rows", 16, "most requests running")
  flags.DEFINE_string("out", None, "folder for bench.json; default: runs/bench_engine-TIME")
  main(prepare, run)
