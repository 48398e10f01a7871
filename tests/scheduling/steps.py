"""Steps of one scheduler without a loop, for tests."""

from pdjax.core.plan import StepResult
from pdjax.core.request import Request, SamplingParams, Slo
from pdjax.core.sequence import Sequence


def make_sequence(request_id, num_prompt_tokens, max_tokens, *, arrival_s=0.0, slo=None):
  if slo is not None:
    slo = Slo(ttft_s=slo[0], tpot_s=slo[1])
  return Sequence(
    Request(
      request_id=request_id,
      arrival_s=arrival_s,
      num_prompt_tokens=num_prompt_tokens,
      sampling=SamplingParams(max_tokens=max_tokens),
      slo=slo,
    )
  )


def contents(plan):
  """A step as ([(request, start, tokens) of a prefill], [(request, position) of a decode])."""
  return (
    [(s.request_id, s.start, s.num_tokens) for s in plan.prefills],
    list(zip(plan.decodes.request_ids, plan.decodes.positions, strict=True)),
  )


def finish(scheduler, plan):
  num_tokens = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
  scheduler.commit(plan, StepResult(token_ids=(7,) * num_tokens))
  scheduler.check()


def timeline(scheduler, arrivals):
  """The contents of each step until nothing is left to do.

  `arrivals` maps a step number to the (request id, prompt tokens, max tokens) that come before it.
  """
  steps = []
  while True:
    for arrival in arrivals.get(len(steps), ()):
      scheduler.add(make_sequence(*arrival))
    if (plan := scheduler.next_step()) is None:
      return steps
    steps.append(contents(plan))
    finish(scheduler, plan)
