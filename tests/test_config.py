"""Configs load from a file, change by typed assignments, and refuse what makes no sense."""

import dataclasses
import json

import pytest

from pdjax.config import (
  POOLS_FORM,
  STRATEGIES,
  CacheConfig,
  ExperimentConfig,
  SamplingConfig,
  SchedulerOptions,
  SloConfig,
  WorkloadConfig,
  load_config,
  num_devices_of,
  override,
  parse_pools,
)
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.workloads.lengths import Fixed, Uniform

pytestmark = pytest.mark.quick
LENGTHS = Fixed(prompt_tokens=10, output_tokens=5)
CONFIG = ExperimentConfig(workload=WorkloadConfig(lengths=LENGTHS, rate_rps=2.0))
FILE = """
from pdjax.config import ExperimentConfig, WorkloadConfig
from pdjax.workloads.lengths import Fixed

def get_config():
  lengths = Fixed(prompt_tokens=10, output_tokens=5)
  return ExperimentConfig(workload=WorkloadConfig(lengths=lengths, rate_rps=2.0))
"""


def leaves(node, prefix=""):
  """Every value of a config by its dotted path."""
  if not dataclasses.is_dataclass(node):
    return {prefix.rstrip("."): node}
  found = {}
  for field in dataclasses.fields(node):
    found |= leaves(getattr(node, field.name), f"{prefix}{field.name}.")
  return found


def test_a_file_gives_its_config_with_overrides_applied_in_order(tmp_path):
  path = tmp_path / "lab.py"
  path.write_text(FILE)
  assert load_config(path) == load_config(str(path)) == CONFIG
  changed = load_config(path, ["num_devices=3", "num_devices=4", "slo.ttft_s=0.5"])
  assert changed == dataclasses.replace(CONFIG, num_devices=4, slo=SloConfig(ttft_s=0.5))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (None, "does not exist"),
    ("x = 1", r"has no function get_config\(\)"),
    ("def get_config():\n  return 1", "gave a int, not ExperimentConfig"),
    ("def get_config():\n  return None", "gave a NoneType, not ExperimentConfig"),
    ("def get_config()\n  return 1", "SyntaxError"),
    ("import nonsense_package", "line 1: .*No module named 'nonsense_package'"),
    ("x = 1\ndef get_config():\n  return 1 / 0", "line 3: ZeroDivisionError"),
  ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, text, message):
  path = tmp_path / "lab.py"
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    load_config(path)
  assert str(path) in str(error.value)


def test_a_file_may_have_a_policy_with_options(tmp_path, monkeypatch):
  """A dataclass with annotations that are text: they are looked up in the module of the file."""
  path = tmp_path / "json.py"  # not the module of that name
  path.write_text(f"""
from __future__ import annotations
import dataclasses
from pdjax.scheduling.policies import POLICIES, PolicySpec
{FILE}
Tokens = int

@dataclasses.dataclass(slots=True, kw_only=True)
class Capped:
  most: Tokens = 64

  def __call__(self, step):
    step.tokens_left = min(step.tokens_left, self.most)
    step.admit()

POLICIES["capped"] = PolicySpec(policy=Capped, chunks=True, mixes=True)
""")
  monkeypatch.setitem(POLICIES, "capped", None)  # and taken away again
  config = load_config(path, ["scheduler.options=capped.most=8"])
  assert make_policy("capped", config.scheduler.options_of("capped")).most == 8
  assert json.loads("1") == 1


def test_a_file_of_another_kind_is_named(tmp_path):
  path = tmp_path / "lab.yaml"
  path.write_text("model: tiny")
  with pytest.raises(ValueError, match=r"lab.yaml is not a Python file \(.py\)"):
    load_config(path)


@pytest.mark.parametrize(
  ("assignment", "path", "value"),
  [
    ("num_devices=4", "num_devices", 4),
    (" num_devices = 4 ", "num_devices", 4),
    ("model=tiny", "model", "tiny"),
    ("model='tiny'", "model", "tiny"),
    ("model=7", "model", "7"),
    ("workload.rate_rps=2.5", "workload.rate_rps", 2.5),
    ("workload.rate_rps=3", "workload.rate_rps", 3.0),
    ("workload.rate_rps=1e-3", "workload.rate_rps", 1e-3),
    ("workload.rate_rps=None", "workload.rate_rps", None),
    ("workload.trace=None", "workload.trace", None),
    ("workload.trace=a=b.csv", "workload.trace", "a=b.csv"),
    ("workload.chat=False", "workload.chat", False),
    ("workload.num_requests=12", "workload.num_requests", 12),
    ("workload.lengths.prompt_tokens=99", "workload.lengths.prompt_tokens", 99),
    ("strategies=chunked", "strategies", ("chunked",)),
    ("strategies=chunked,continuous", "strategies", ("chunked", "continuous")),
    ("strategies=chunked, continuous", "strategies", ("chunked", "continuous")),
    ("strategies='chunked','continuous'", "strategies", ("chunked", "continuous")),
    ("strategies=('chunked', 'continuous')", "strategies", ("chunked", "continuous")),
    ("strategies=['chunked']", "strategies", ("chunked",)),
    ("strategies=(chunked,continuous)", "strategies", ("chunked", "continuous")),
    ("cache.max_len=64", "cache.max_len", 64),
    ("scheduler.steps_in_flight=2", "scheduler.steps_in_flight", 2),
    (
      "scheduler.options=sarathi.tile_tokens=64",
      "scheduler.options",
      ("sarathi.tile_tokens=64",),
    ),
    (
      "scheduler.options=sarathi.tile_tokens=64, deadline.safety=1.5",
      "scheduler.options",
      ("sarathi.tile_tokens=64", "deadline.safety=1.5"),
    ),
    ("scheduler.options=()", "scheduler.options", ()),
    ("workload.chat=false", "workload.chat", False),
    ("scheduler.prefix_cache=true", "scheduler.prefix_cache", True),
    ("scheduler.reservation=chunk", "scheduler.reservation", "chunk"),
    ("scheduler.max_partial_prefills=2", "scheduler.max_partial_prefills", 2),
    ("scheduler.prefix_cache=True", "scheduler.prefix_cache", True),
    ("tp=2", "tp", 2),
    ("check_weights=True", "check_weights", True),
  ],
)
def test_an_assignment_sets_one_value_of_the_right_type(assignment, path, value):
  before, after = leaves(CONFIG), leaves(override(CONFIG, [assignment]))
  assert after == before | {path: value}
  assert type(after[path]) is type(value)


def test_a_part_can_be_replaced_whole():
  text = 'workload.lengths={"prompt_tokens": (1, 4), "output_tokens": (2, 3)}'
  changed = override(CONFIG, [text])
  assert changed.workload.lengths == Uniform(prompt_tokens=(1, 4), output_tokens=(2, 3))


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    ("num_devices", r"--set 'num_devices' is not of the form path=value"),
    ("workload.rate=2", "or rate_rps?"),
    ("shceduler.token_budget=2", "did you mean scheduler"),
    ("scheduler.tokenbudget=2", "did you mean token_budget"),
    ("num_devices.x=2", "num_devices has no parts"),
    ("workload.lengths.prompt=2", "did you mean prompt_tokens"),
    ("num_devices=2.0", "--set num_devices=2.0: not a value of type int"),
    ("num_devices=two", "--set num_devices=two: not a value of type int"),
    ("num_devices=True", "--set num_devices=True: not a value of type int"),
    ("num_devices=None", "--set num_devices=None: not a value of type int"),
    ("workload.chat=1", "--set workload.chat=1: not a value of type bool"),
    ("workload.rate_rps=fast", "--set workload.rate_rps=fast: not a value of type float | None"),
    ("workload=5", "--set workload=5: not a value of type WorkloadConfig"),
    ('workload.lengths={"nonsense": 1}', "not a value of type"),
    ("strategies=chunked,nonsense", "unknown strategy 'nonsense'"),
    ("scheduler.options=tile_tokens=4", "'tile_tokens=4' is not name.option=value"),
    ("scheduler.options=sarathi.tile_tokens", "is not name.option=value"),
    ("scheduler.options=sarathy.tile_tokens=4", "'sarathy'; did you mean sarathi"),
    ("scheduler.options=sarathi.tile=4", "option of policy sarathi: 'tile'"),
    ("scheduler.options=sarathi.tile_tokens=x", "tile_tokens='x' is not a value of type"),
    ("scheduler.options=sarathi.tile_tokens=0", "tile_tokens=0 must be at least 1"),
    ("strategies=()", "strategies is empty"),
    ("num_devices=0", "num_devices=0 must be at least 1"),
    ("tp=3", "num_devices=2 is no multiple of tp=3"),
  ],
)
def test_an_assignment_that_makes_no_sense_says_why(assignment, message):
  with pytest.raises(ValueError) as error:
    override(CONFIG, [assignment])
  assert message in str(error.value)


@pytest.mark.parametrize(
  ("make", "changes", "message"),
  [
    (WorkloadConfig, {"rate_rps": 0.0}, "workload.rate_rps=0.0 must be positive"),
    (WorkloadConfig, {"rate_rps": float("nan")}, "workload.rate_rps=nan must be positive"),
    (WorkloadConfig, {"load": -1.0}, "workload.load=-1.0 must be positive"),
    (WorkloadConfig, {"duration_s": 0.0}, "workload.duration_s=0.0 must be positive"),
    (WorkloadConfig, {"rate_rps": float("inf")}, "workload.rate_rps=inf must be positive"),
    (WorkloadConfig, {"load": float("inf")}, "workload.load=inf must be positive"),
    (WorkloadConfig, {"duration_s": float("inf")}, "workload.duration_s=inf must be positive"),
    (WorkloadConfig, {"cv": 0.0}, "workload.cv=0.0 must be positive"),
    (WorkloadConfig, {"seed": -1}, "workload.seed=-1 must be 0 or more"),
    (WorkloadConfig, {"num_requests": 0}, "workload.num_requests=0 must be at least 1"),
    (SchedulerOptions, {"prefill_budget": 0}, "scheduler.prefill_budget=0 must be at least 1"),
    (SchedulerOptions, {"watermark": 1.0}, "scheduler.watermark=1.0 must be in [0, 1)"),
    (
      SchedulerOptions,
      {"reservation": "page"},
      "scheduler.reservation='page' must be one of chunk",
    ),
    (SchedulerOptions, {"look_ahead": -1}, "scheduler.look_ahead=-1 must be at least 0"),
    (SchedulerOptions, {"long_prompt_share": 0.0}, "scheduler.long_prompt_share=0.0 must be in"),
    (SchedulerOptions, {"max_partial_prefills": 0}, "max_partial_prefills=0 must be at least 1"),
    (SchedulerOptions, {"options": ("orca.x=1",)}, "policy orca has no options"),
    (CacheConfig, {"max_len": 0}, "cache.max_len=0 must be at least 1"),
    (CacheConfig, {"num_pages": -3}, "cache.num_pages=-3 must be at least 1"),
    (SamplingConfig, {"temperature": -1.0}, "sampling.temperature=-1.0 must be"),
    (SamplingConfig, {"top_k": 0}, "sampling.top_k=0 must be at least 1"),
    (SamplingConfig, {"top_p": 1.5}, "sampling.top_p=1.5 must be in (0, 1]"),
    (SamplingConfig, {"min_p": 1.5}, "sampling.min_p=1.5 must be in [0, 1]"),
    (SamplingConfig, {"repetition_penalty": 0.0}, "sampling.repetition_penalty=0.0 must be"),
    (SloConfig, {"tpot_multiple": float("inf")}, "slo.tpot_multiple=inf must be positive"),
    (SchedulerOptions, {"token_budget": 0}, "scheduler.token_budget=0 must be at least 1"),
    (SchedulerOptions, {"steps_in_flight": 3}, "scheduler.steps_in_flight=3 must be 1 or 2"),
    (CacheConfig, {"layout": "heap"}, "cache.layout='heap' must be 'slots' or 'paged'"),
    (CacheConfig, {"num_rows": 0}, "cache.num_rows=0 must be at least 1"),
    (CacheConfig, {"page_size": 0}, "cache.page_size=0 must be at least 1"),
    (SloConfig, {"ttft_s": 0.0}, "slo.ttft_s=0.0 must be positive"),
    (SloConfig, {"tpot_s": -1.0}, "slo.tpot_s=-1.0 must be positive"),
    (SloConfig, {"ttft_multiple": 0.0}, "slo.ttft_multiple=0.0 must be positive"),
    (SloConfig, {"tpot_multiple": 0.0}, "slo.tpot_multiple=0.0 must be positive"),
    (ExperimentConfig, {"backend": "cuda"}, "backend='cuda' must be 'jax' or 'sim'"),
    (ExperimentConfig, {"attention": "foo"}, "attention='foo' must be 'auto', 'xla' or 'pallas'"),
    (ExperimentConfig, {"num_devices": 0}, "num_devices=0 must be at least 1"),
    (ExperimentConfig, {"tp": 0}, "tp=0 must be at least 1"),
    (ExperimentConfig, {"num_devices": 6, "tp": 4}, "num_devices=6 is no multiple of tp=4"),
    (ExperimentConfig, {"strategies": ()}, "strategies is empty; name at least one"),
    (
      ExperimentConfig,
      {"strategies": ("chunk",)},
      "unknown strategy 'chunk'; did you mean chunked",
    ),
    (ExperimentConfig, {"strategies": ("chunked",) * 2}, "names one twice"),
    (
      ExperimentConfig,
      {"pools": "2xprefill,1xdecode"},
      "pools=2xprefill,1xdecode have 3 devices, but num_devices=2: strategies are compared",
    ),
    (
      ExperimentConfig,
      {"pools": "prefill,2xdecode", "num_devices": 3, "tp": 2},
      "have 3 devices, which continuous, chunked, disaggregated cannot have too, in pools of tp=2",
    ),
    (ExperimentConfig, {"pools": "prefill,decode", "tp": 0}, "tp=0 must be at least 1"),
    (ExperimentConfig, {"pools": "", "strategies": ()}, f"write {POOLS_FORM}"),
  ],
)
def test_a_value_outside_its_range_is_refused_with_the_value(make, changes, message):
  needed = {WorkloadConfig: {"lengths": LENGTHS}, ExperimentConfig: {"workload": CONFIG.workload}}
  with pytest.raises(ValueError) as error:
    make(**needed.get(make, {}) | changes)
  assert message in str(error.value)


@pytest.mark.parametrize(("num_devices", "tp"), [(2, 1), (3, 1), (8, 1), (4, 2), (9, 3), (8, 4)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_uses_every_device_once_in_groups_of_tp(strategy, num_devices, tp):
  pools = STRATEGIES[strategy](num_devices, tp)
  assert len(pools) == len({p.name for p in pools})
  assert sorted(i for p in pools for i in p.devices) == list(range(num_devices))
  assert {len(p.devices) for p in pools} == {tp}
  roles = {p.role for p in pools}
  assert roles == ({"prefill", "decode"} if strategy == "disaggregated" else {"mixed"})


def test_pools_are_read_in_order_and_each_device_is_in_one_of_them():
  specs = parse_pools("2xprefill:tp2, decode:tp3, mixed:orca, 2xdecode:sarathi, 1xmixed:fcfs:tp2")
  assert [(s.name, s.role, s.policy, s.devices) for s in specs] == [
    ("prefill0", "prefill", "prefill_only", (0, 1)),
    ("prefill1", "prefill", "prefill_only", (2, 3)),
    ("decode0", "decode", "decode_only", (4, 5, 6)),
    ("mixed0", "mixed", "orca", (7,)),
    ("decode1", "decode", "sarathi", (8,)),
    ("decode2", "decode", "sarathi", (9,)),
    ("mixed1", "mixed", "fcfs", (10, 11)),
  ]
  assert num_devices_of(specs) == 12


def test_pools_have_stages_and_hardware_of_their_own():
  specs = parse_pools("2xprefill:tp2:pp3@h100, decode@a100-80gb, mixed:pp2:orca:tp2")
  assert [(s.name, s.devices, s.pp, s.hardware) for s in specs] == [
    ("prefill0", (0, 1, 2, 3, 4, 5), 3, "h100"),
    ("prefill1", (6, 7, 8, 9, 10, 11), 3, "h100"),
    ("decode0", (12,), 1, "a100-80gb"),
    ("mixed0", (13, 14, 15, 16), 2, None),
  ]
  assert num_devices_of(specs) == 17
  for spec in specs:
    group = spec.group
    assert (group.devices, group.pp, group.hardware) == (spec.devices, spec.pp, spec.hardware)
  assert specs[0].group.stages == ((0, 1), (2, 3), (4, 5))


def test_prompts_are_cut_for_a_pipeline_unless_the_policy_is_named():
  texts = ("prefill:pp2,decode:pp2", "prefill:pp2:prefill_only,decode", "prefill:tp2,decode")
  policies = [parse_pools(text)[0].policy for text in texts]
  assert policies == ["prefill_chunks", "prefill_only", "prefill_only"]
  assert parse_pools(texts[0])[1].policy == "decode_only"
  assert POLICIES["prefill_chunks"].chunks


def test_pools_of_equal_size_are_those_of_disaggregation():
  for num_each, tp in ((1, 1), (2, 1), (3, 4)):
    text = f"{num_each}xprefill:tp{tp},{num_each}xdecode:tp{tp}"
    assert parse_pools(text) == STRATEGIES["disaggregated"](2 * num_each * tp, tp)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("2xprefil,1xdecode", "unknown role 'prefil'; did you mean prefill"),
    ("2prefill,1xdecode", "unknown role '2prefill'; did you mean prefill"),
    ("-1xprefill,1xdecode", "'-1xprefill' does not begin with a count and a role"),
    ("2x,1xdecode", "unknown role '2x'"),
    ("1xprefill,,1xdecode", "'' does not begin with a count and a role"),
    ("0xprefill,1xdecode", "count, tp and pp of '0xprefill' must be whole numbers of at least 1"),
    ("prefill:tp0,decode", "count, tp and pp of 'prefill:tp0' must be"),
    ("prefill:tp,decode", "count, tp and pp of 'prefill:tp' must be"),
    ("prefill:tp1.5,decode", "count, tp and pp of 'prefill:tp1.5' must be"),
    ("prefill:pp0,decode", "count, tp and pp of 'prefill:pp0' must be"),
    ("prefill:pp-2,decode", "count, tp and pp of 'prefill:pp-2' must be"),
    ("prefill:pp2:tp2:pp4,decode", "'prefill:pp2:tp2:pp4' has two pp"),
    ("prefill@a100:tp2,decode", "'a100:tp2' of 'prefill@a100:tp2' is no name of hardware, which"),
    ("prefill@,decode", "'' of 'prefill@' is no name of hardware"),
    ("prefill@a100@h100,decode", "'a100@h100' of 'prefill@a100@h100' is no name"),
    ("@a100,decode", "'@a100' does not begin with a count and a role"),
    ("mixed:prefill_chunks", "policy prefill_chunks does not do what a mixed pool has to do"),
    ("prefill:tp2:tp4,decode", "'prefill:tp2:tp4' has two tp"),
    ("mixed:orca:fcfs", "'mixed:orca:fcfs' has two policies"),
    ("mixed:sarathy", "unknown policy 'sarathy'; did you mean sarathi"),
    ("mixed:2", "unknown policy '2'"),
    ("mixed:prefill_only", "policy prefill_only does not do what a mixed pool has to do"),
    ("prefill,decode:prefill_only", "policy prefill_only does not do what a decode pool has to"),
    ("2xprefill:tp2", "prefill pools need a decode pool to hand over to"),
    ("mixed,prefill", "prefill pools need a decode pool to hand over to"),
    ("mixed,2xdecode", "decode pools need a prefill pool that hands over to them"),
  ],
)
def test_a_text_that_is_no_pools_says_what_is_wrong_and_shows_the_form(text, message):
  with pytest.raises(ValueError) as error:
    override(CONFIG, [f"pools={text}"])
  assert str(error.value).startswith(f"pools={text!r}: ") and message in str(error.value)
  assert str(error.value).endswith(f"; write {POOLS_FORM}")
  assert "\n" not in str(error.value)


def test_pools_are_one_more_strategy_or_the_only_one():
  text = "1xprefill:tp2,2xdecode"
  config = override(CONFIG, ["num_devices=4", f"pools={text}"])
  assert config.strategy_names == (*CONFIG.strategies, text)
  for name in config.strategy_names:
    assert num_devices_of(config.pools_of(name)) == 4
  assert config.pools_of(text) == parse_pools(text)
  assert config.pools_of("chunked") == STRATEGIES["chunked"](4)
  alone = dataclasses.replace(config, strategies=())
  assert alone.strategy_names == (text,)
  # tp is of the others: there are none that three devices would be too few for.
  assert dataclasses.replace(alone, tp=3).strategy_names == (text,)
  assert CONFIG.strategy_names == CONFIG.strategies


def test_every_policy_that_serves_whole_requests_is_a_strategy():
  """And each is compared as mixed pools alone."""
  for name, spec in POLICIES.items():
    if spec.half:
      assert name not in STRATEGIES
    else:
      assert {(p.role, p.policy) for p in STRATEGIES[name](4, 2)} == {("mixed", name)}
  named = {name: {p.policy for p in STRATEGIES[name](2)} for name in ("continuous", "chunked")}
  assert named == {"continuous": {"prefill_first"}, "chunked": {"sarathi"}}


def test_options_of_policies_are_typed_and_the_last_one_counts():
  texts = ("sarathi.tile_tokens=64", " deadline.ttft_s = 3", "sarathi.tile_tokens=None")
  options = SchedulerOptions(options=texts)
  assert options.options_of("sarathi") == {"tile_tokens": None}
  assert options.options_of("deadline") == {"ttft_s": 3}
  assert options.options_of("orca") == {}


@pytest.mark.parametrize("tp", [1, 4])
def test_disaggregation_needs_two_pools(tp):
  with pytest.raises(ValueError, match=rf"at least {2 * tp} devices.*, not num_devices={tp}"):
    STRATEGIES["disaggregated"](tp, tp)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_devices_that_are_left_over_are_refused(strategy):
  with pytest.raises(ValueError, match="num_devices=7 is no multiple of tp=2"):
    STRATEGIES[strategy](7, 2)


@pytest.mark.parametrize("change", ["num_devices=2.0", 'strategies="chunked"'])
def test_a_value_of_the_wrong_type_in_a_file_is_refused(tmp_path, change):
  path = tmp_path / "wrong.py"
  path.write_text(
    "from pdjax.config import *\nfrom pdjax.workloads.lengths import Fixed\n"
    "def get_config():\n"
    "  lengths = Fixed(prompt_tokens=4, output_tokens=2)\n"
    f"  return ExperimentConfig(workload=WorkloadConfig(lengths=lengths), {change})\n"
  )
  with pytest.raises(ValueError, match=r"wrong\.py"):
    load_config(path)
