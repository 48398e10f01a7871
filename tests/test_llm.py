"""`pdjax.LLM` answers alike under every strategy, streams what it generates, and can be stopped."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import pdjax
import pdjax.llm
from pdjax.core.costs import count_slices
from pdjax.core.events import Copied, Failed, Step
from pdjax.core.plan import StepResult
from pdjax.core.request import SamplingParams
from pdjax.metrics.latency import outcomes, request_records
from pdjax.serving.loop import serve

pytest.importorskip("tokenizers", reason="needs the extra [hf]")
ROOT = pathlib.Path(__file__).resolve().parents[1]
# As few shapes as can be: compiling them is nearly all the time that these tests take.
SMALL = dict(num_rows=2, max_len=64, token_budget=16, progress=False)
# Longer than a step's budget, so that it comes in chunks; shorter; one token.
PROMPTS = [list(range(300, 320)), "import os\n", [70]]
GREEDY = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=30, ignore_eos=True)  # of prompts of one or two tokens


@pytest.fixture(scope="module")
def chunked():
  with pdjax.LLM("tiny", strategy="chunked", **SMALL) as llm:
    yield llm


@pytest.fixture(scope="module")
def continuous():
  own = dict(num_rows=1, layout="paged", prefix_cache=True, steps_in_flight=2)
  with pdjax.LLM("tiny", strategy="continuous", tp=2, **SMALL | own) as llm:
    yield llm


@pytest.fixture(scope="module")
def disaggregated():
  with pdjax.LLM("tiny", strategy="disaggregated", **SMALL) as llm:
    yield llm


@pytest.fixture(scope="module")
def uneven():
  with pdjax.LLM("tiny", pools="1xprefill:tp2,2xdecode:tp1", **SMALL) as llm:
    yield llm


@pytest.fixture(params=["chunked", "disaggregated"])
def llm(request):
  return request.getfixturevalue(request.param)


def answers(outputs):
  return [(o.ids, o.text, o.finish_reason) for o in outputs]


def collected(pieces, num_prompts):
  """The concatenation of a stream's pieces, by prompt."""
  found = [("", (), None) for _ in range(num_prompts)]
  for piece in pieces:
    text, ids, output = found[piece.index]
    assert output is None, "a piece after the last"
    assert piece.text or piece.ids or piece.output
    found[piece.index] = (text + piece.text, ids + piece.ids, piece.output)
  return found


def check_all_free(cluster):
  for pool in cluster.pools:
    pool.scheduler.check()
    pages = pool.scheduler.pages
    assert (pages.num_free_pages, pages.num_free_rows) == (
      pages.config.num_pages,
      pages.config.num_rows,
    )
    assert not (pool.scheduler.waiting or pool.scheduler.running or pool.in_flight)
  assert not cluster.outbox and not cluster.transfers


# What comes back ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  "params",
  [GREEDY, SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=5)],
  ids=["greedy", "sampled"],
)
def test_every_strategy_gives_the_same_answers(params, chunked, continuous, disaggregated):
  alone = [chunked.generate([prompt], params)[0] for prompt in PROMPTS]
  for llm in (chunked, continuous, disaggregated):
    assert answers(llm.generate(PROMPTS, params)) == answers(alone)
  assert [len(o.ids) for o in alone] == [12, 12, 12] or "stop" in {o.finish_reason for o in alone}


@pytest.mark.slow
def test_pools_of_other_sizes_share_the_work_and_hand_over_between_them(chunked, uneven):
  assert answers(uneven.generate(PROMPTS, GREEDY)) == answers(chunked.generate(PROMPTS, GREEDY))
  copies = set()
  for params in (GREEDY, SamplingParams(max_tokens=1)):
    outputs = uneven.generate([PROMPTS[0]] * 6, params)
    assert len({o.ids for o in outputs}) == 1
    roles = {e.pool: e.kind for e in uneven.log if isinstance(e, Step)}
    copies |= {(e.source, e.target) for e in uneven.log if isinstance(e, Copied)}
    if params is GREEDY:
      assert roles == {"prefill0": "prefill", "decode0": "decode", "decode1": "decode"}
  assert copies == {("prefill0", "decode0"), ("prefill0", "decode1")}
  prefill, *decodes = uneven._executors.values()
  assert prefill.page_shape == decodes[0].page_shape == decodes[1].page_shape
  assert decodes[0].steps is decodes[1].steps is not prefill.steps, "traced once for each size"


def test_prompts_are_text_ids_or_messages(chunked):
  text = "import os\n"
  ids = chunked.tokenizer.encode(text, add_special_tokens=True)
  (output,) = chunked.generate(text, GREEDY)
  assert output.prompt_ids == ids
  assert answers(chunked.generate(list(ids), GREEDY)) == answers([output])
  assert answers(chunked.generate([text, list(ids)], GREEDY)) == answers([output, output])
  messages = [{"role": "user", "content": "Who are you?"}]
  templated = chunked.tokenizer.encode(chunked.tokenizer.apply_chat_template(messages))
  assert chunked.chat(messages, GREEDY).prompt_ids == templated
  assert [o.prompt_ids for o in chunked.generate([messages, text], GREEDY)] == [templated, ids]
  assert chunked.generate([], GREEDY) == []


@pytest.mark.slow
def test_options_of_the_scheduler_arrive(continuous, monkeypatch):
  given = []

  def spy(*args, **options):
    given.append(options["steps_in_flight"])
    return serve(*args, **options)

  monkeypatch.setattr(pdjax.llm, "serve", spy)
  first, second = continuous.generate([PROMPTS[0]] * 2, GREEDY)  # one after the other: one row
  assert answers([first]) == answers([second])
  starts = [e.prefill_starts for e in continuous.log if isinstance(e, Step) and e.prefill_ids]
  assert starts == [(0,), (16,)], "a page of the second was in the prefix cache"
  assert given == [2]


def test_every_pool_learns_its_own_step_times_and_keeps_them(disaggregated):
  disaggregated.generate(PROMPTS, GREEDY)
  prompt = count_slices(prefill_starts=[0], prefill_tokens=[16], num_emitted=1)
  decode = count_slices(decode_positions=[9, 9], num_emitted=2)
  prefill_s, decode_s = learnt = list(disaggregated._step_times.values())
  assert 0 < prefill_s(prompt) < 10 and 0 < decode_s(decode) < 10
  cluster = disaggregated._begin().cluster
  disaggregated._run = None
  assert [pool.scheduler.predict_step_s for pool in cluster.pools] == learnt
  assert prefill_s is not decode_s


def test_each_prompt_may_have_its_own_params(chunked):
  params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 9, 4)]
  outputs = chunked.generate(PROMPTS, params)
  assert [len(o.ids) for o in outputs] == [1, 9, 4]
  assert {o.finish_reason for o in outputs} == {"length"}


def test_logprobs_come_with_every_token_that_asked_for_them(llm):
  params = [
    SamplingParams(max_tokens=5, logprobs=3),
    SamplingParams(max_tokens=5, logprobs=0),
    SamplingParams(max_tokens=5),
  ]
  three, chosen, none = llm.generate(["import os\n"] * 3, params)
  assert none.logprobs is None
  assert len(three.logprobs) == len(chosen.logprobs) == len(none.ids)
  for token_id, with_top, without in zip(three.ids, three.logprobs, chosen.logprobs):
    assert len(with_top.top_ids) == 3 and without.top_ids == ()
    assert with_top.top_ids[0] == token_id, "greedy takes the likeliest"
    assert with_top.logprob == pytest.approx(with_top.top_logprobs[0])
    assert with_top.logprob == pytest.approx(without.logprob, abs=1e-4)
    assert with_top.logprob <= 0


def test_a_stop_string_cuts_text_ids_and_logprobs_alike(llm):
  params = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True)
  (whole,) = llm.generate("import os\n", params)
  middle = len(whole.text) // 2
  stop = whole.text[middle : middle + 3]
  cut_params = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, stop=(stop,))
  (cut,) = llm.generate("import os\n", cut_params)
  assert cut.finish_reason == "stop"
  assert whole.text.startswith(cut.text + stop) and stop not in cut.text
  assert len(cut.ids) == len(cut.logprobs) < len(whole.ids)
  assert cut.ids == whole.ids[: len(cut.ids)]
  ((text, ids, output),) = collected(llm.stream("import os\n", cut_params), 1)
  assert (text, ids) == (cut.text, cut.ids) == (output.text, output.ids)


def test_a_stream_concatenates_to_what_generate_gives(llm):
  outputs = llm.generate(PROMPTS, GREEDY)
  pieces = list(llm.stream(PROMPTS, GREEDY))
  assert len(pieces) > len(PROMPTS), "it should come in pieces"
  streamed = collected(pieces, len(PROMPTS))
  assert [(ids, text) for text, ids, _ in streamed] == [(o.ids, o.text) for o in outputs]
  assert answers(output for _, _, output in streamed) == answers(outputs)


def test_streams_may_be_interleaved_with_each_other_and_with_generate(llm):
  expected = llm.generate(PROMPTS, GREEDY)
  first, second = llm.stream(PROMPTS[:1], GREEDY), llm.stream(PROMPTS[1:], GREEDY)
  heard = [[next(first)], [next(second)]]
  assert answers(llm.generate(PROMPTS, GREEDY)) == answers(expected)
  heard[1] += second
  heard[0] += first
  assert answers(
    output for i, n in ((0, 1), (1, 2)) for _, _, output in collected(heard[i], n)
  ) == answers(expected)


def test_requests_without_a_seed_get_one_from_the_seed_of_the_llm(chunked):
  params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
  chunked._rng.seed(1)
  first, again = chunked.generate(["import os\n"] * 2, params)
  assert first.ids != again.ids
  chunked._rng.seed(1)
  assert answers(chunked.generate(["import os\n"] * 2, params)) == answers([first, again])


# Timings ------------------------------------------------------------------------------------------


def test_the_phases_of_a_request_sum_to_its_time_and_say_where_it_went(llm):
  for output in llm.generate(PROMPTS * 2, GREEDY):
    assert output.phases.total_s == output.e2e_s
    assert 0 <= output.queue_s <= output.ttft_s <= output.e2e_s
    assert len(output.record.token_s) == len(output.record.token_ids)
  # Two rows and six prompts: the last had to wait for others.
  assert output.queue_s > 0
  assert output.record.pools == (
    ("mixed0",) if output.record.copy_s is None else ("prefill0", "decode0")
  )


def test_requests_arrive_when_they_are_due(chunked):
  one = SamplingParams(max_tokens=1)
  late, soon = chunked.generate(["import os\n"] * 2, one, arrivals_s=[0.4, 0.1])
  assert late.record.arrival_s - soon.record.arrival_s == pytest.approx(0.3)
  assert soon.record.finish_s < late.record.arrival_s <= late.record.first_scheduled_s


def test_a_second_call_compiles_nothing(llm):
  llm.generate(PROMPTS, GREEDY)
  steps = [executor.steps for executor in llm._executors.values()]
  before = [dict(s.num_traces) for s in steps]
  assert all(before)
  llm.generate(PROMPTS[::-1], SamplingParams(max_tokens=9, temperature=0.5, logprobs=1))
  assert [dict(s.num_traces) for s in steps] == before


# Stopped and broken -------------------------------------------------------------------------------


def test_closing_a_stream_cancels_its_requests_and_frees_what_they_hold(llm):
  expected = answers(llm.generate(PROMPTS, GREEDY))
  stream = llm.stream([[70]] * 5, LONG)
  for _ in range(4):
    next(stream)
  cluster = llm._run.cluster
  assert any(pool.scheduler.running or pool.in_flight for pool in cluster.pools)
  stream.close()
  assert [e.reason for e in llm.log if isinstance(e, Failed)] == ["cancelled"] * 5
  check_all_free(cluster)
  assert llm._run is None
  assert answers(llm.generate(PROMPTS, GREEDY)) == expected


def test_what_has_not_ended_in_time_fails_with_what_came_until_then(llm):
  (whole,) = llm.generate([[70]], LONG)
  (late,) = llm.generate([[70]], LONG, timeout_s=whole.e2e_s / 4)
  assert (late.finish_reason, late.error) == ("error", f"timed out after {whole.e2e_s / 4} s")
  assert len(late.ids) < len(whole.ids) and late.ids == whole.ids[: len(late.ids)]
  (in_time,) = llm.generate([[70]], LONG, timeout_s=60 + 10 * whole.e2e_s)
  assert in_time.ids == whole.ids and in_time.error is None
  with pytest.raises(ValueError, match="prompt 0: request 0: timeout_s=0 must be positive"):
    llm.generate([[70]], LONG, timeout_s=0)
  assert llm._run is None


def test_a_stream_that_is_closed_leaves_the_others_alone(llm):
  expected = answers(llm.generate(PROMPTS, GREEDY))
  stays = llm.stream(PROMPTS, GREEDY)
  pieces = [next(stays)]
  leaves = llm.stream([[70]] * 3, LONG)
  next(leaves)
  leaves.close()
  pieces += stays
  assert answers(output for _, _, output in collected(pieces, len(PROMPTS))) == expected
  assert llm._run is None


def _interrupt_after(llm, delay_s):
  """A thread that presses Ctrl-C so long after the first request of the next run has arrived."""
  before = llm.log

  def press():
    while llm.log is before or not len(llm.log):
      time.sleep(1e-3)
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=press)
  thread.start()
  return thread


def test_ctrl_c_cancels_what_runs_and_leaves_the_llm_usable(llm):
  expected = answers(llm.generate(PROMPTS, GREEDY))
  for delay_s in (0.0, 0.1, 0.3):
    thread = _interrupt_after(llm, delay_s)
    with pytest.raises(KeyboardInterrupt):
      llm.generate([[70]] * 1000, LONG)
    thread.join()
    assert llm._run is None and outcomes(request_records(llm.log))["failed"] > 900
    assert answers(llm.generate(PROMPTS, GREEDY)) == expected
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_the_end_of_a_turn():
  done = []
  with pytest.raises(KeyboardInterrupt), pdjax.llm._interrupts_held():
    signal.raise_signal(signal.SIGINT)
    done.append("the rest of the turn")
  assert done
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Failing:
  """A ticket whose step has no token for one request."""

  def __init__(self, ticket, plan, request_id):
    self._ticket, self._plan, self._request_id = ticket, plan, request_id
    self.finish_s, self.is_ready = ticket.finish_s, ticket.is_ready

  def result(self):
    owners = [s.request_id for s in self._plan.prefills if s.emits_token]
    owners += self._plan.decodes.request_ids
    tokens = self._ticket.result().token_ids
    return StepResult(
      token_ids=tuple(None if i == self._request_id else t for i, t in zip(owners, tokens)),
      errors=((self._request_id, "broken on purpose"),),
    )


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_request_that_fails_does_not_take_the_others_along(chunked, monkeypatch, num_good):
  expected = chunked.generate(PROMPTS, GREEDY)
  (executor,) = chunked._executors.values()
  submit, num_tokens = executor.submit, 0

  def failing(plan, now_s, exports):
    nonlocal num_tokens
    ticket = submit(plan, now_s, exports)
    owns = 1 in plan.decodes.request_ids or any(
      s.request_id == 1 and s.emits_token for s in plan.prefills
    )
    num_tokens += owns
    return _Failing(ticket, plan, 1) if owns and num_tokens > num_good else ticket

  monkeypatch.setattr(executor, "submit", failing)
  first, bad, last = chunked.generate(PROMPTS, GREEDY)
  assert answers([first, last]) == answers([expected[0], expected[2]])
  assert (bad.finish_reason, bad.error) == ("error", "broken on purpose")
  assert bad.ids == expected[1].ids[:num_good] and expected[1].text.startswith(bad.text)
  assert bad.e2e_s is None and bad.phases is None


# Wrong input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("prompts", "params", "error", "message"),
  [
    ([[1] * 60], GREEDY, ValueError, "prompt 0: .*71 tokens, but the pool holds 64"),
    (["import os\n", ""], GREEDY, ValueError, "prompt 1 is empty"),
    (["a", []], GREEDY, ValueError, "prompt 1 is empty"),
    ([[1, 2], [3, -1]], GREEDY, ValueError, "prompt 1: token id -1 is outside the vocabulary"),
    ([9_999], GREEDY, ValueError, "prompt 0: token id 9999 is outside the vocabulary"),
    ([["a", 1]], GREEDY, TypeError, "prompt 0 is neither text, nor token ids, nor chat"),
    (["a"], {"max_tokens": 3}, TypeError, "params are .max_tokens., not pdjax.SamplingParams"),
    (["a", "b"], [GREEDY], ValueError, "1 params for 2 prompts"),
    ([{"role": "user"}], GREEDY, ValueError, "message 0: content=None"),
  ],
)
def test_wrong_input_is_refused_before_anything_runs(chunked, prompts, params, error, message):
  log = chunked.log
  for call in (chunked.generate, chunked.stream):
    with pytest.raises(error, match=message):
      call(prompts, params)
  assert chunked._run is None and chunked.log is log


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"strategy": "chunk"}, "unknown strategy 'chunk'; did you mean chunked"),
    ({"num_devices": 3, "tp": 2}, "num_devices=3 is no multiple of tp=2"),
    ({"strategy": "disaggregated", "num_devices": 1}, "needs at least 2 devices"),
    ({"max_len": 0}, "max_len=0 must be at least 1"),
    ({"num_devices": 0}, "num_devices=0 must be at least 1"),
    ({"max_len": 10_000_000}, r"max_len=10000000 is more than the \d+ tokens"),
    ({"token_budget": 4}, "token_budget=4 cannot advance 8 running"),
    ({"policy": "prefill_only"}, "policy=prefill_only serves only half"),
    ({"router": "nearest"}, "unknown router 'nearest'"),
    ({"prefix_cache": True}, "in the slots layout every row has its own"),
    ({"layout": "heap"}, "layout='heap' must be"),
    ({"attention": "cuda"}, "attention='cuda' must be 'auto', 'xla' or 'pallas'"),
    ({"tp": 3}, "num_heads=8 is no multiple of the 3 devices"),
    ({"pools": "2xprefil,decode"}, "unknown role 'prefil'; did you mean prefill"),
    ({"pools": "2xprefill"}, "prefill pools need a decode pool"),
    ({"pools": "prefill,decode:tp3"}, "num_heads=8 is no multiple of the 3 devices"),
    ({"pools": "prefill,decode", "num_devices": 3}, "have 2 devices, but num_devices=3"),
    ({"pools": "prefill,decode", "strategy": "chunked"}, "and strategy='chunked': give one"),
    ({"pools": "prefill,decode", "tp": 1}, "and tp=1: give one"),
  ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_compiles(arguments, message):
  with pytest.raises(ValueError, match=message):
    pdjax.LLM("tiny", **arguments)


def test_an_argument_that_nobody_knows_is_refused():
  with pytest.raises(TypeError, match="num_row"):
    pdjax.LLM("tiny", num_row=3)


def test_a_model_that_is_not_there_says_so():
  from pdjax.sources import SourceError

  with pytest.raises(SourceError, match="nowhere"):
    pdjax.LLM("nowhere.gguf")


def test_a_closed_llm_says_so():
  llm = object.__new__(pdjax.LLM)  # closing needs no compiled steps
  llm._executors, llm._run = {"any": None}, None
  llm.close()
  with pytest.raises(RuntimeError, match="this LLM is closed"):
    llm.generate("import os\n", GREEDY)


# As in a notebook ---------------------------------------------------------------------------------


def test_the_ten_lines_of_the_documentation_run(chunked, monkeypatch, capsys):
  text = pdjax.llm.__doc__.split("\n\n", 1)[1]
  lines = [line for line in textwrap.dedent(text).splitlines() if line.strip()]
  assert lines[0] == "import pdjax" and len(lines) <= 10
  monkeypatch.setattr(pdjax.llm, "LLM", lambda *args, **options: chunked)
  monkeypatch.setattr(type(chunked), "close", lambda self: None)
  exec("\n".join(lines), {})
  assert "s to the first token" in capsys.readouterr().out


@pytest.mark.quick
def test_importing_the_package_and_its_names_imports_no_jax():
  program = (
    "import sys, pdjax; pdjax.LLM, pdjax.SamplingParams\n"
    "assert {'LLM', 'SamplingParams'} <= set(dir(pdjax))\n"
    "print('jax' in sys.modules)\n"
    "pdjax.LMM"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.stdout == "False\n"
  assert "module 'pdjax' has no attribute 'LMM'" in done.stderr
