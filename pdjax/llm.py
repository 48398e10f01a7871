"""`pdjax.LLM`: a model to talk to from a notebook. Imports jax only once one is made.

import pdjax

llm = pdjax.LLM("smollm2-135m", strategy="disaggregated")
greedy = pdjax.SamplingParams(max_tokens=32)
for output in llm.generate(["The capital of France is", "Two and two make"], greedy):
  print(output.text, output.finish_reason, f"{output.ttft_s:.3f} s to the first token")
for piece in llm.stream("Once upon a time", greedy):
  print(piece.text, end="", flush=True)
print(llm.chat([{"role": "user", "content": "Who wrote Faust?"}], greedy).text)
llm.close()
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import pathlib
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from pdjax.config import (
  STRATEGIES,
  CacheConfig,
  PoolSpec,
  SchedulerOptions,
  check_attention,
  check_platforms,
  num_devices_of,
  parse_pools,
  parse_role_change,
)
from pdjax.core.clock import WallClock, to_ticks
from pdjax.core.events import EventLog
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.core.plan import TokenLogprobs
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.deployment import (
  check_split,
  in_role,
  largest_budgets,
  layer_groups_of,
  make_cluster,
  make_pages,
  planner_of,
  uses_of,
)
from pdjax.metrics.latency import Phases, RequestRecord, phases, request_records
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.routing import check_roles
from pdjax.serving.cluster import Cluster
from pdjax.serving.executor import Nowhere
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import GRACE_S, Turn, serve
from pdjax.serving.step_time import FittedStepTime
from pdjax.sources import resolve
from pdjax.stopping import Settled, Stopper, with_eos
from pdjax.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer

if TYPE_CHECKING:  # it imports jax
  from pdjax.models.checkpoints.checkpoint import Checkpoint

Chat = Seq[Mapping[str, str]]
Prompt = str | Seq[int] | Chat

DEFAULT_MAX_LEN = 1024


def open_model(
  path: pathlib.Path, *, check_weights: bool = False
) -> tuple[Checkpoint, Tokenizer | ByteTokenizer]:
  """What a checkpoint says of itself, without its weights, and its tokenizer.

  Raises:
    ImportError: a package of the extra `[hf]` is missing.
    ValueError: what is wrong with a file, or that tokenizer and model do not belong together.
  """
  tokenizer = load_tokenizer(path)  # first, as it needs no jax to find out what is wrong
  from pdjax.models.checkpoints.checkpoint import open_checkpoint

  checkpoint = open_checkpoint(path, check_weights=check_weights)
  check_vocabulary(tokenizer, checkpoint.config, path)
  return checkpoint, tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
  """What became of one prompt.

  `finish_reason` is `length`, `stop` or `error`; then `error` says why, and the rest is what came
  until then. `logprobs` are in parallel to `ids`, None where none were asked for. `record` has the
  request's time stamps; with `phases` all its durations are on one clock, that of the loop.
  """

  prompt_ids: tuple[int, ...]
  text: str
  ids: tuple[int, ...]
  logprobs: tuple[TokenLogprobs, ...] | None
  finish_reason: str
  error: str | None
  record: RequestRecord

  @property
  def phases(self) -> Phases | None:
    """Queue, prefill, hand-off wait, copy and decode; None for a request that failed."""
    return phases(self.record)

  @property
  def queue_s(self) -> float | None:
    """From its arrival to the start of its first step."""
    started_s = self.record.first_scheduled_s
    return None if started_s is None else started_s - self.record.arrival_s

  @property
  def ttft_s(self) -> float | None:
    return self.record.ttft_s

  @property
  def tpot_s(self) -> float | None:
    return self.record.tpot_s

  @property
  def e2e_s(self) -> float | None:
    return self.record.e2e_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
  """What is new of one prompt's answer. The last piece has the whole `output`."""

  index: int  # of the prompt
  text: str
  ids: tuple[int, ...]
  output: Output | None = None


class LLM:
  """A model on this machine's devices, compiled and ready. Not thread-safe: one thread at a time.

  `model` is a known name, a path or a Hugging Face repo id (`pdjax.sources`). `strategy` is one of
  `pdjax.config.STRATEGIES` (default: chunked); it serves on `num_devices`, by default the fewest
  that it can, and each of its pools splits the model over `tp` of them. `pools` says all of that
  itself, as in "2xprefill:tp2,1xdecode:tp4" (`pdjax.config.parse_pools`). A sequence has up to
  `max_len` tokens, prompt and output together: by default what the model was trained for, but at
  most 1,024; `num_rows` of them run at once in each pool. `dtype` is float32 where a CPU takes
  part and bfloat16 elsewhere. `attention` is as in `pdjax.config.ExperimentConfig`. `seed` is where
  requests that are sampled without a seed of their own get one from.

  `scheduler` is any of `pdjax.config.SchedulerOptions`: `token_budget`, `policy`, `prefix_cache`
  (of `layout="paged"`), `swap_tokens`, `router`, `steps_in_flight`, and others. Policies and
  routers that plan by time learn how long steps take from the LLM's own. `hand_off` says how KV
  caches go from prefill to decode pools.

  All shapes are compiled here and not at the first request, so that the timings of every request
  are honest: this takes a minute for a model of 135 million parameters on two cores, and `progress`
  says how far it is (None: in a terminal or a notebook).

  Raises:
    SourceError: the checkpoint cannot be had.
    ValueError: what is wrong with an argument or the checkpoint.
  """

  def __init__(
    self,
    model: str = "smollm2-135m",
    *,
    strategy: str | None = None,
    tp: int | None = None,
    num_devices: int | None = None,
    pools: str | None = None,
    max_len: int | None = None,
    num_rows: int = 8,
    layout: str = "slots",
    attention: str = "auto",
    page_size: int = 16,
    dtype: str | None = None,
    seed: int = 0,
    check_weights: bool = False,
    progress: bool | None = None,
    hand_off: HandOff = HandOff(),
    **scheduler: Any,
  ):
    self._hand_off = hand_off
    self._specs = _make_specs(strategy, tp, num_devices, pools)
    check_attention(attention)
    self._options = SchedulerOptions(**scheduler)
    uses = uses_of(self._specs, self._options)
    show = _progress(progress)
    path = resolve(str(model), show=show)
    checkpoint, self.tokenizer = open_model(path, check_weights=check_weights)
    self.config: ModelConfig = checkpoint.config
    check_split(self._specs, self.config, hand_off.layer_groups)
    trained = self.config.max_len
    max_len = min(trained, DEFAULT_MAX_LEN) if max_len is None else max_len
    if max_len > trained:
      raise ValueError(
        f"max_len={max_len} is more than the {trained} tokens that {self.config.name} was made for"
      )
    cache = CacheConfig(layout=layout, num_rows=num_rows, page_size=page_size, max_len=max_len)
    self._pages = make_pages(cache, max_len)
    self._make_cluster(lambda group: Nowhere())  # or its ValueError

    from pdjax.engine.build import build_executors, default_buckets, warm_up
    from pdjax.engine.mesh import find_devices, make_mesh

    groups = find_devices(list(uses))
    is_on_cpu = any(device.platform == "cpu" for group in groups for device in group)
    dtype = dtype or ("float32" if is_on_cpu else "bfloat16")
    show(f"reading {path}")
    loaded = checkpoint.load(dtype=dtype, target=make_mesh(groups[0][: next(iter(uses)).tp]))
    whole, mixed = largest_budgets(self._specs, self._options, self._pages)
    buckets = default_buckets(self._pages, whole_budget=whole, chunk_budget=mixed)
    executors = build_executors(
      loaded,
      self._pages,
      buckets,
      groups,
      layout=layout,
      attention=attention,
      stages=[group.pp for group in uses],
      layer_groups=layer_groups_of(uses, hand_off),
    )
    for number, line in enumerate(warm_up(executors, list(uses.values())), 1):
      show(f"compiling, shape {number}: {line}")
    show("")
    self._executors = dict(zip(uses, executors, strict=True))
    self._step_times = {group: FittedStepTime() for group in uses}  # of one pool each
    self._rng = random.Random(seed)
    self._run: _Run | None = None
    self.log = EventLog()
    """What happened in the latest run: the calls since no request was left."""

  # What a user calls ---------------------------------------------------------------------------

  def generate(
    self,
    prompts: Prompt | Seq[Prompt],
    params: SamplingParams | Seq[SamplingParams],
    *,
    arrivals_s: Seq[float] | None = None,
    timeout_s: float | None = None,
  ) -> list[Output]:
    """Answers prompts together; one output each, in their order.

    A prompt is text, token ids, or chat messages (`role`, `content`) for the model's template;
    `params` are of all, or of each. All arrive at once, or so many seconds from now; `timeout_s`
    after that those fail that have not ended. Ctrl-C cancels them, and the LLM can be used again.
    What fails on the way has its reason in its output.

    Raises:
      ValueError: a prompt that is empty, too long or not in the vocabulary; nothing has run.
      TypeError: a prompt or params of another type.
    """
    with self._call(prompts, params, arrivals_s, timeout_s) as call:
      while call.step():
        pass
      return list(call.outputs(range(len(call.requests))).values())

  def stream(
    self,
    prompts: Prompt | Seq[Prompt],
    params: SamplingParams | Seq[SamplingParams],
    *,
    timeout_s: float | None = None,
  ) -> Iterator[Piece]:
    """As `generate`, but yields what is new as it comes; of each prompt the last has its output.

    Requests arrive with the first `next`. Closing the iterator (or leaving a loop over it) cancels
    them. Several streams may be open, and `generate` be called meanwhile: they share every step.
    Time that the caller takes between two pieces is part of the timings.
    """
    return self._stream(self._call(prompts, params, None, timeout_s))

  def _stream(self, call: _Call) -> Iterator[Piece]:
    told = [Settled("", 0)] * len(call.requests)
    with call:
      while news := call.step():
        outputs = call.outputs(news)
        for index in news:
          text, num_tokens = told[index]
          told[index], ids = call.settled(index), call.ids(index)
          piece = Piece(
            index=index,
            text=told[index].text[len(text) :],
            ids=ids[num_tokens : told[index].num_tokens],
            output=outputs.get(index),
          )
          if piece.ids or piece.text or piece.output:
            yield piece

  def chat(self, messages: Chat, params: SamplingParams) -> Output:
    """The answer to one conversation, as `generate` gives it."""
    (output,) = self.generate([messages], params)
    return output

  def change_role(self, pool: str, role: str) -> None:
    """Gives a pool another role, in the run in progress as soon as it is drained, and after it.

    Needs an LLM that was made with `changes_roles=True`.

    Raises:
      ValueError: pools that are not there, or could not serve a request to its end then.
    """
    if not self._options.needs_all_roles:
      raise ValueError("pools were not made to change roles: make the LLM with changes_roles=True")
    names = [spec.name for spec in self._specs]
    if pool not in names:
      raise ValueError(f"there is no pool {pool!r}, only {', '.join(names)}")
    specs = [in_role(spec, role) if spec.name == pool else spec for spec in self._specs]
    check_roles(spec.role for spec in specs)
    self._specs = specs
    if self._run is not None:
      self._run.inbox.change_role(pool, role)

  def close(self) -> None:
    """Lets go of the weights and caches; streams that are open cannot go on."""
    if self._run is not None:
      self._run.is_over = True
    self._executors, self._run = {}, None

  def __enter__(self) -> LLM:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  # Inside --------------------------------------------------------------------------------------

  def _call(
    self,
    prompts: Prompt | Seq[Prompt],
    params: SamplingParams | Seq[SamplingParams],
    arrivals_s: Seq[float] | None,
    timeout_s: float | None,
  ) -> _Call:
    """Checks everything about a call; submits nothing yet."""
    if not self._executors:
      raise RuntimeError("this LLM is closed")
    ids = self._all_ids(prompts)
    each = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
    if wrong := [own for own in each if not isinstance(own, SamplingParams)]:
      raise TypeError(f"params are {wrong[0]!r}, not pdjax.SamplingParams or a list of them")
    offsets_s = [0.0] * len(ids) if arrivals_s is None else list(arrivals_s)
    for name, values in (("params", each), ("arrivals_s", offsets_s)):
      if len(values) != len(ids):
        raise ValueError(f"{len(values)} {name} for {len(ids)} prompts")
    cluster = self._cluster()
    requests = []
    for index, (prompt_ids, own, offset_s) in enumerate(zip(ids, each, offsets_s)):
      if not prompt_ids:
        raise ValueError(f"prompt {index} is empty")
      if own.temperature > 0 and own.seed is None:
        own = dataclasses.replace(own, seed=self._rng.getrandbits(31))
      try:
        request = Request(
          request_id=index,
          arrival_s=offset_s,
          num_prompt_tokens=len(prompt_ids),
          prompt_ids=prompt_ids,
          sampling=with_eos(own, self.tokenizer.eos_ids),
          timeout_s=timeout_s,
        )
        refusal = cluster.refusal(request)
      except ValueError as error:
        refusal = str(error)
      if refusal is not None:
        raise ValueError(f"prompt {index}: {refusal}")
      requests.append(request)
    return _Call(self, requests)

  def _all_ids(self, prompts: Prompt | Seq[Prompt]) -> list[tuple[int, ...]]:
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if prompts and isinstance(prompts[0], numbers.Integral | Mapping):
      prompts = [prompts]
    return [self._ids(index, prompt) for index, prompt in enumerate(prompts)]

  def _ids(self, index: int, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
      return self.tokenizer.encode(prompt, add_special_tokens=True)
    if len(prompt) and all(isinstance(part, Mapping) for part in prompt):
      return self.tokenizer.encode(self.tokenizer.apply_chat_template(prompt))
    if all(isinstance(part, numbers.Integral) for part in prompt):
      return tuple(map(int, prompt))
    raise TypeError(f"prompt {index} is neither text, nor token ids, nor chat messages: {prompt!r}")

  def _cluster(self) -> Cluster:
    return self._make_cluster(self._executors.__getitem__, self._step_times.__getitem__)

  def _make_cluster(self, *of_groups: Callable) -> Cluster:
    return make_cluster(
      self._specs, self._options, lambda group: self._pages, *of_groups, hand_off=self._hand_off
    )

  def _begin(self) -> _Run:
    """The run in progress, or a new one on empty pools."""
    if not self._executors:
      raise RuntimeError("this LLM is closed")
    if self._run is None:
      for executor in self._executors.values():
        executor.reset()
      self._run = _Run(self._cluster(), Stopper(self.tokenizer), self._options)
      self.log = self._run.log
    return self._run


class _Clock(WallClock):
  """Waits no longer than `patience_s`, so that the loop comes by to be interrupted."""

  patience_s = 0.05

  def wait(self, tickets, until_s):
    if tickets or until_s is not None:
      soon_s = self.now_s() + self.patience_s
      until_s = soon_s if until_s is None else min(until_s, soon_s)
    return super().wait(tickets, until_s)


class _Run:
  """One `serve` loop and the calls that share it, from the first until no request is left."""

  def __init__(self, cluster: Cluster, stopper: Stopper, options: SchedulerOptions):
    self.cluster, self.inbox, self.clock = cluster, Inbox(is_open=True), _Clock()
    self.log, self.stopper = EventLog(), stopper
    self.num_requests = 0
    self.sequences: dict[int, Sequence] = {}  # by request id, of those that got a token
    self.calls: list[_Call] = []
    self.is_over = False
    self._turns = serve(
      cluster,
      self.inbox,
      self.clock,
      self.log,
      finish_reason=stopper,
      steps_in_flight=options.steps_in_flight,
      planner=planner_of(options),
    )
    for pool, role, at_s in map(parse_role_change, options.role_changes):
      self.inbox.change_role(pool, role, at_s)

  @property
  def is_busy(self) -> bool:
    """Whether a device still uses pages: those of cancelled requests are freed after that."""
    cluster = self.cluster
    is_copying = cluster.transfers or cluster.prefetches
    return bool(is_copying) or any(pool.in_flight for pool in cluster.pools)

  def turn(self) -> None:
    """Goes through the loop once, and tells each call what that means for its requests.

    Raises:
      RuntimeError: the run is over, as the LLM was closed or the loop itself failed.
    """
    if self.is_over:
      raise RuntimeError("this run is over: its LLM was closed, or failed in another call")
    with _interrupts_held():
      try:
        turn = next(self._turns)
      except BaseException:
        self.is_over = True
        raise
      self.sequences |= turn.sequences
      for call in self.calls:
        call.hear(turn)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
  """Lets Ctrl-C wait: within a turn there are moments when a cache is donated and has no successor.

  Signals come to the main thread alone.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  held = []
  previous = signal.signal(signal.SIGINT, lambda *args: held.append(args))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
  if held:
    signal.raise_signal(signal.SIGINT)


class _Call:
  """The requests of one call while they run; as a context it cancels those that are left."""

  def __init__(self, llm: LLM, requests: list[Request]):
    self._llm, self.requests = llm, requests
    self._ends: dict[int, tuple[str, str | None]] = {}  # by index: finish reason, error
    self._news: dict[int, None] = {}  # indices in the order of their news

  def __enter__(self) -> _Call:
    run = self._run = self._llm._begin()
    now_s = run.clock.now_s()
    self._first_id = run.num_requests
    run.num_requests += len(self.requests)
    self.requests = [
      dataclasses.replace(
        r, request_id=self._first_id + r.request_id, arrival_s=to_ticks(now_s + r.arrival_s)
      )
      for r in self.requests
    ]
    self._running = {r.request_id for r in self.requests}
    run.calls.append(self)
    for request in self.requests:
      run.inbox.submit(request)
    return self

  def __exit__(self, *error: object) -> None:
    run = self._run
    try:
      now_s = run.clock.now_s()
      for request_id in self._running:
        run.inbox.cancel(request_id)
      # Those that have not arrived yet are cancelled when they do; nobody waits for that.
      self._running &= {r.request_id for r in self.requests if r.arrival_s <= now_s}
      while not run.is_over and (self._running or (run.calls == [self] and run.is_busy)):
        if not self._running and run.clock.now_s() > now_s + GRACE_S:
          break  # work that never ends: its pages go with the run
        run.turn()
    finally:
      run.calls.remove(self)
      if self._llm._run is run and (run.is_over or not run.calls):
        self._llm._run = None

  def hear(self, turn: Turn) -> None:
    """Takes what is about own requests."""
    ends = [(i, (reason, None)) for i, reason in turn.ended]
    ends += [(i, ("error", reason)) for i, reason in turn.failed]
    for request_id, end in ends:
      if request_id in self._running:
        self._ends[request_id - self._first_id] = end
    for request_id in [*turn.sequences, *(i for i, _ in ends)]:
      if request_id in self._running:
        self._news[request_id - self._first_id] = None
    self._running.difference_update(i for i, _ in ends)

  def step(self) -> list[int]:
    """Runs until there is something new; the indices of which, none when all has ended."""
    while self._running and not self._news:
      self._run.turn()
    news, self._news = list(self._news), {}
    return news

  def ids(self, index: int) -> tuple[int, ...]:
    """The tokens so far; those that are kept, once it has ended."""
    seq = self._run.sequences.get(self._first_id + index)
    return () if seq is None else tuple(seq.output_ids)

  def settled(self, index: int) -> Settled:
    """The text and how many tokens no later token can take back: all, once it has ended."""
    seq = self._run.sequences.get(self._first_id + index)
    if seq is None:
      return Settled("", 0)
    text, num_tokens = self._run.stopper.settled(seq)
    return Settled(text, len(seq.output_ids) if index in self._ends else num_tokens)

  def outputs(self, indices: Iterable[int]) -> dict[int, Output]:
    """The outputs of those that have ended."""
    ended = [index for index in indices if index in self._ends]
    records = request_records(self._run.log) if ended else {}
    return {index: self._output(index, records[self._first_id + index]) for index in ended}

  def _output(self, index: int, record: RequestRecord) -> Output:
    request, (finish_reason, error) = self.requests[index], self._ends[index]
    seq = self._run.sequences.get(request.request_id)
    asked = request.sampling.logprobs is not None
    return Output(
      prompt_ids=request.prompt_ids,
      text=self.settled(index).text,
      ids=self.ids(index),
      logprobs=tuple(seq.output_logprobs if seq is not None else ()) if asked else None,
      finish_reason=finish_reason,
      error=error,
      record=record,
    )


def _make_specs(
  strategy: str | None, tp: int | None, num_devices: int | None, pools: str | None
) -> tuple[PoolSpec, ...]:
  if pools is None:
    make_pools = pick(STRATEGIES, "chunked" if strategy is None else strategy, "strategy")
    tp = 1 if tp is None else tp
    return make_pools(_fewest_devices(make_pools, tp) if num_devices is None else num_devices, tp)
  for name, value in (("strategy", strategy), ("tp", tp)):
    if value is not None:
      raise ValueError(f"pools={pools!r} and {name}={value!r}: give one of them")
  specs = parse_pools(pools)
  check_platforms(specs)
  if num_devices not in (None, num_devices_of(specs)):
    raise ValueError(
      f"pools={pools!r} have {num_devices_of(specs)} devices, but num_devices={num_devices}"
    )
  return specs


def _fewest_devices(make_pools: Callable[[int, int], object], tp: int) -> int:
  """Those of one pool, or of a prefill and a decode pool: no strategy needs more."""
  try:
    make_pools(tp, tp)
  except ValueError:
    return 2 * tp
  return tp


def _progress(is_wanted: bool | None) -> Callable[[str], None]:
  """Shows lines on stderr, one over the other; an empty one ends that."""
  if is_wanted is None:
    is_wanted = sys.stderr.isatty() or "ipykernel" in sys.modules
  if not is_wanted:
    return lambda line: None
  width = shutil.get_terminal_size().columns - 1

  def show(line: str) -> None:
    text = f"\r{line[:width]:<{width}}" if line else "\n"
    print(text, end="", file=sys.stderr, flush=True)

  return show
