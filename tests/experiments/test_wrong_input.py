"""Wrong input to the programs, as a user types it: one message, status 2, nothing written.

Each runs in a fork of an interpreter where importing jax fails, so none of it can have compiled.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import jax
import pytest
import virtual
from forks import Start, forks

from experiments.serving import check
from pdjax.config import POOLS_FORM, STRATEGIES, load_config
from pdjax.core import checksum
from pdjax.core.events import Failed
from pdjax.core.request import Request, SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.py"
LONGEST = 448 + 32 - 1  # of the quickstart, in cached tokens


@pytest.fixture(scope="module")
def without_jax(tmp_path_factory) -> dict[str, str]:
  """An environment where `import jax` ends the program with a traceback."""
  folder = tmp_path_factory.mktemp("stub")
  (folder / "jax.py").write_text("raise SystemError('jax was imported')")
  return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.fixture(scope="module")
def start(without_jax) -> Iterator[Start]:
  with forks("experiments.serving", env=without_jax) as start:
    yield start


TRACE = "arrival_s,prompt_tokens,output_tokens\n"
FILES = {
  "bad.csv": TRACE + "0.0,10,5\n0.5,ten,5\n",
  "lengths.csv": "num_prefill_tokens,num_decode_tokens\n8,4\n",
  "blocks.jsonl": '{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[0,1]}\n',
  "ticks.jsonl": '{"timestamp":3000,"input_length":9,"output_length":1,"hash_ids":[0]}\n',
  "no_trace.csv": "a,b\n1,2\n",
  "long.csv": TRACE + "0.0,10,5\n0.5,100,5\n",
  "empty.csv": TRACE,
  "no_function.py": "x = 1\n",
  "garbage.gguf": "this is no model",
  "a_file": "",
  "hosts.toml": 'secret_file = "a_file"\n[[hosts]]\naddress = "10.0.0.1:7001"\n',
  "hosts_without_secret.toml": 'secret_file = "secret"\n[[hosts]]\naddress = "10.0.0.1:7001"\n',
  "hosts_without_port.toml": 'secret_file = "a_file"\n[[hosts]]\naddress = "10.0.0.1"\n',
}

# name: (program, arguments, what the message must hold)
CASES = {
  "a profile of a simulation": (
    "run",
    ["--backend=sim", "--profile=here"],
    ["--profile=here", "--backend=jax"],
  ),
  "advice on no devices": (
    "advise",
    ["--model=llama3-8b", "--workload=sharegpt"],
    ["--hardware is missing"],
  ),
  "advice about no traffic": (
    "advise",
    ["--model=llama3-8b", "--hardware=a100", "--devices=2"],
    ["--workload=NAME or --trace=FILE"],
  ),
  "an SLO of no time": (
    "advise",
    [
      "--model=llama3-8b",
      "--hardware=a100",
      "--devices=2",
      "--workload=sharegpt",
      "--ttft_slo_s=0",
    ],
    ["--ttft_slo_s=0.0 must be positive"],
  ),
  "a replay of nothing": (
    "validate",
    ["--model=llama3-8b", "--hardware=a100"],
    ["--model=llama3-8b", "--requests=FILE is missing"],
  ),
  "a budget below the rows": (
    "bench_engine",
    ["--model=tiny", "--token_budget=1"],
    ["--token_budget=1 cannot hold a decode of --num_rows=16"],
  ),
  "no such policy to measure": (
    "bench_simulator",
    ["--requests=long.csv", "--policy=saratih"],
    ["unknown policy 'saratih'", "did you mean sarathi"],
  ),
  "half of a policy to measure": (
    "bench_simulator",
    ["--requests=long.csv", "--policy=prefill_only"],
    ["prefill_only", "half of a request"],
  ),
  "a search on the engine": (
    "search",
    ["--goal=capacity", "--model=tiny", "--backend=jax"],
    ["--backend=jax", "searches simulate"],
  ),
  "pools for a search of pools": (
    "search",
    ["--goal=placement", "--pools=2xmixed"],
    ["--pools=2xmixed", "--goal=placement", "leave it out"],
  ),
  "budgets of whole prompts": (
    "search",
    ["--goal=budget", "--strategies=continuous"],
    ["continuous", "prefill_first", "takes them whole"],
  ),
  "no such figure": (
    "reproduce",
    ["--figure=distserve/fig88"],
    ["unknown figure 'distserve/fig88'", "did you mean distserve/fig8"],
  ),
  "no figure at all": ("reproduce", [], ["--figure=NAME is missing", "--list"]),
  "no room in the cache": (
    "compare",
    ["--model=tiny", "--set", "cache.max_len=64"],
    ["workload.lengths", "448 prompt, 32 output", f"{LONGEST} tokens", "holds 64", "cache.max_len"],
  ),
  "a policy for half of a request": (
    "compare",
    ["--model=tiny", "--set", "scheduler.policy=prefill_only"],
    ["scheduler.policy=prefill_only", "half of a request", "sarathi"],
  ),
  "unknown policy": (
    "compare",
    ["--model=tiny", "--set", "scheduler.policy=saratih"],
    ["unknown policy 'saratih'", "did you mean sarathi"],
  ),
  "an option that a policy does not have": (
    "run",
    ["--backend=sim", "--set", "scheduler.options=deadline.safty=2"],
    ["deadline", "'safty'", "did you mean safety", "ttft_s"],
  ),
  "an option of the wrong type": (
    "run",
    ["--strategy=orca", "--set", "scheduler.options=deadline.safety=much"],
    ["deadline", "safety='much'", "type float"],
  ),
  "a rate of nothing": (
    "compare",
    ["--model=tiny", "--set", "workload.rate_rps=1e-300"],
    ["workload.rate_rps=1e-300"],
  ),
  "budget below the rows": (
    "compare",
    ["--model=tiny", "--set", "scheduler.token_budget=4"],
    ["strategy chunked", "token_budget=4", "16 running", "at least num_rows=16"],
  ),
  "prompt above the budget of whole prompts": (
    "compare",
    ["--model=tiny", "--set", "scheduler.prefill_budget=100"],
    ["448 prompt", "token_budget=100", "scheduler.prefill_budget"],
  ),
  "model": ("compare", ["--model=smolm2-135m"], ["smolm2-135m", "did you mean smollm2-135m"]),
  "model to simulate": (
    "run",
    ["--backend=sim", "--model=llama-3-8b"],
    ["'llama-3-8b'", "did you mean llama3-8b"],
  ),
  "hardware": ("run", ["--backend=sim", "--hardware=a10"], ["'a10'", "did you mean a100"]),
  "hardware that the engine does not need": (
    "run",
    ["--model=tiny", "--hardware=h10"],
    ["'h10'", "did you mean h100"],
  ),
  "hardware too small": (
    "run",
    ["--backend=sim", "--model=llama3-70b", "--hardware=a100"],
    ["llama3-70b does not fit on a100", "85.0 GB"],
  ),
  "strategies": (
    "compare",
    ["--strategies=continuous,chunk"],
    ["unknown strategy 'chunk'", "did you mean chunked"],
  ),
  "no strategies": ("compare", ["--strategies="], ["strategies is empty"]),
  "a strategy twice": ("compare", ["--strategies=chunked,chunked"], ["names one twice"]),
  "strategy": ("run", ["--strategy=chunk"], ["unknown strategy 'chunk'", "did you mean chunked"]),
  "arrivals": (
    "compare",
    ["--set", "workload.arrivals=poison"],
    ["unknown arrivals 'poison'", "did you mean poisson"],
  ),
  "arrivals of a trace without one": (
    "compare",
    ["--set", "workload.arrivals=trace"],
    ["needs --trace=FILE"],
  ),
  "link": ("compare", ["--set", "link=nvlnk"], ["'nvlnk'", "did you mean nvlink"]),
  "link rate": ("compare", ["--set", "link=0gbps"], ["'0gbps'", "10gbps"]),
  "backend": ("compare", ["--backend=gpu"], ["backend='gpu' must be 'jax' or 'sim'"]),
  "hosts to simulate": (
    "compare",
    ["--backend=sim", "--hosts=hosts.toml"],
    ["hosts='hosts.toml' goes with backend='jax'"],
  ),
  "hosts pinned from here": (
    "compare",
    ["--hosts=hosts.toml", "--processes", "--pin"],
    ["pin=True pins processes of this machine"],
  ),
  "no start-up file": ("run", ["--model=tiny", "--hosts=none.toml"], ["none.toml"]),
  "a start-up file of another form": (
    "compare",
    ["--model=tiny", "--hosts=empty.csv"],
    ["empty.csv is no start-up file", "pdjax/remote/hosts.py"],
  ),
  "hosts without a port": (
    "compare",
    ["--model=tiny", "--hosts=hosts_without_port.toml"],
    ["'10.0.0.1' must be HOST:PORT"],
  ),
  "a secret that was never made": (
    "compare",
    ["--model=tiny", "--hosts=hosts_without_secret.toml"],
    ["hosts_without_secret.toml", "secret_file secret is not there", "chmod 600"],
  ),
  "a secret that is none": (
    "compare",
    ["--model=tiny", "--hosts=hosts.toml"],
    ["a_file", "others can read the secret: chmod 600"],
  ),
  "name to set": (
    "compare",
    ["--set", "sheduler.token_budget=64"],
    ["sheduler", "did you mean scheduler"],
  ),
  "name of a part to set": (
    "compare",
    ["--set", "workload.rate_rp=1"],
    ["workload.rate_rp", "did you mean rate_rps"],
  ),
  "value to set": ("compare", ["--set", "num_devices=two"], ["num_devices=two", "int"]),
  "no value to set": ("compare", ["--set", "num_devices"], ["num_devices", "path=value"]),
  "rate 0": ("compare", ["--set", "workload.rate_rps=0"], ["workload.rate_rps=0.0", "positive"]),
  "rate below 0": ("compare", ["--set", "workload.rate_rps=-2"], ["-2.0", "positive"]),
  "load 0": ("compare", ["--set", "workload.load=0"], ["workload.load=0.0", "positive"]),
  "no requests": (
    "compare",
    ["--set", "workload.num_requests=0"],
    ["workload.num_requests=0", "at least 1"],
  ),
  "temperature": (
    "compare",
    ["--set", "sampling.temperature=-1"],
    ["sampling.temperature=-1.0", "positive"],
  ),
  "trace without a name": ("compare", ["--trace="], ["--trace= is empty"]),
  "trace missing": ("compare", ["--trace=none.csv"], ["none.csv", "No such file"]),
  "trace with a bad row": (
    "compare",
    ["--trace=bad.csv"],
    ["bad.csv:3", "prompt_tokens='ten'", "whole number"],
  ),
  "trace without rows": ("compare", ["--trace=empty.csv"], ["empty.csv", "no rows"]),
  "trace of no known kind": (
    "compare",
    ["--trace=no_trace.csv"],
    ["no_trace.csv:1", "no trace of a known kind", "TIMESTAMP,ContextTokens", "found: a, b"],
  ),
  "trace with other blocks": (
    "compare",
    ["--trace=blocks.jsonl"],
    ["blocks.jsonl:1", "2 hash_ids", "input_length=9 are 1 blocks of 512"],
  ),
  "a scale that breaks the blocks": (
    "run",
    ["--trace=ticks.jsonl", "--set", "workload.length_scale=10"],
    ["ticks.jsonl: length_scale=10 must divide the blocks of 512"],
  ),
  "nothing within the limit": (
    "run",
    ["--trace=ticks.jsonl", "--set", "workload.trace_limit_s=2"],
    ["ticks.jsonl: the first request arrives at 3.0 s, not in 2.0"],
  ),
  "arrivals to spread that are not there": (
    "run",
    ["--trace=lengths.csv", "--set", "workload.trace_spread_s=3"],
    ["lengths.csv: workload.trace_spread_s=3.0 needs arrivals", "lengths only"],
  ),
  "a trace's option without a trace": (
    "run",
    ["--set", "workload.trace_speed=2"],
    ["workload.trace_speed=2.0 needs --trace=FILE"],
  ),
  "speed 0": (
    "run",
    ["--trace=ticks.jsonl", "--set", "workload.trace_speed=0"],
    ["workload.trace_speed=0.0", "positive"],
  ),
  "scale 0": (
    "run",
    ["--set", "workload.length_scale=0"],
    ["workload.length_scale=0", "at least 1"],
  ),
  "workload": ("run", ["--workload=sharegtp"], ["'sharegtp'", "did you mean sharegpt"]),
  "workload and trace": (
    "run",
    ["--workload=arxiv", "--trace=ticks.jsonl"],
    ["--trace=ticks.jsonl and --workload=arxiv", "one of them"],
  ),
  "trace too long for the cache": (
    "compare",
    ["--model=tiny", "--trace=long.csv", "--set", "cache.max_len=96"],
    ["long.csv:3", "100 prompt, 5 output", "104 tokens", "holds 96"],
  ),
  "one device for two roles": (
    "compare",
    ["--model=tiny", "--set", "num_devices=1"],
    ["disaggregated", "at least 2 devices", "num_devices=1"],
  ),
  "devices left over": (
    "compare",
    ["--model=tiny", "--set", "num_devices=6", "--set", "tp=4"],
    ["num_devices=6 is no multiple of tp=4"],
  ),
  "role of a pool": (
    "compare",
    ["--backend=sim", "--pools=2xprefil:tp2,1xdecode:tp4"],
    ["unknown role 'prefil'", "did you mean prefill", f"write {POOLS_FORM}"],
  ),
  "pools that nobody takes over from": (
    "run",
    ["--model=tiny", "--pools=2xprefill:tp2"],
    ["pools='2xprefill:tp2'", "need a decode pool", f"write {POOLS_FORM}"],
  ),
  "hardware before the rest": (
    "run",
    ["--backend=sim", "--pools=1xprefill@a100:tp2,1xdecode"],
    ["'a100:tp2' of '1xprefill@a100:tp2' is no name of hardware", f"write {POOLS_FORM}"],
  ),
  "hardware of a pool": (
    "run",
    ["--backend=sim", "--pools=1xprefill@a10,1xdecode@h100"],
    ["unknown hardware 'a10'; did you mean a100"],
  ),
  "hardware that is only simulated": (
    "run",
    ["--model=tiny", "--pools=1xprefill@a100,1xdecode@h100"],
    ["prefill0 runs on @a100, but the engine runs on this machine's devices", "--backend=sim"],
  ),
  "a model that does not fit on the hardware of one pool": (
    "run",
    ["--backend=sim", "--model=llama3-8b", "--pools=1xprefill@h100,1xdecode@tpu-v5e"],
    ["llama3-8b does not fit on tpu-v5e"],
  ),
  "more stages than layers": (
    "run",
    ["--backend=sim", "--model=llama3-8b", "--pools=1xprefill:pp33,1xdecode"],
    ["prefill0: 32 layers cannot be cut into 33 parts"],
  ),
  "pools on other devices": (
    "compare",
    ["--model=tiny", "--pools=1xprefill:tp2,1xdecode", "--set", "num_devices=4"],
    ["have 3 devices, but num_devices=4", "compared on equal devices"],
  ),
  "pools that no other strategy can match": (
    "compare",
    ["--backend=sim", "--pools=1xprefill:tp2,1xdecode", "--set", "tp=2"],
    ["have 3 devices, which continuous, chunked, disaggregated cannot have too"],
  ),
  "pools and a strategy": (
    "run",
    ["--pools=1xprefill,1xdecode", "--strategy=chunked"],
    ["--pools=1xprefill,1xdecode and --strategy=chunked", "one of them"],
  ),
  "heads left over in one pool": (
    "run",
    ["--backend=sim", "--model=llama3-8b", "--pools=1xprefill,1xdecode:tp3"],
    ["llama3-8b", "num_heads=32 is no multiple of the 3 devices"],
  ),
  "heads left over": (
    "run",
    ["--backend=sim", "--model=llama3-8b", "--set", "num_devices=6", "--set", "tp=3"],
    ["llama3-8b", "num_heads=32 is no multiple of the 3 devices"],
  ),
  "gguf missing": ("compare", ["--model=none.gguf"], ["none.gguf does not exist"]),
  "no weights": (
    "compare",
    ["--model=llama3-8b", "--backend=jax"],
    ["'llama3-8b' has no weights", "tiny, smollm2-135m", "Hugging Face", "--backend=sim"],
  ),
  "stray argument": ("compare", ["continuous"], ["unexpected arguments ['continuous']", "--name="]),
  "unknown flag": ("run", ["--strategies=chunked"], ["strategies", "strategy"]),
  "config missing": ("compare", ["--config=none.py"], ["none.py does not exist"]),
  "config without get_config": (
    "compare",
    ["--config=no_function.py"],
    ["no_function.py has no function get_config()"],
  ),
  "pages for a layout without": (
    "run",
    ["--backend=sim", "--set", "cache.num_pages=3"],
    ["cache.num_pages=3", "cache.layout=paged"],
  ),
  "out is empty": ("run", ["--backend=sim", "--out="], ["--out is empty"]),
  "out is a file": ("compare", ["--model=tiny", "--out=a_file"], ["a_file", "is a file"]),
  "out is below a file": ("run", ["--backend=sim", "--out=a_file/x"], ["a_file is a file"]),
}


@pytest.fixture
def folder(tmp_path):
  for name, text in FILES.items():
    (tmp_path / name).write_text(text)
  return tmp_path


def check_refused(done, folder, parts) -> None:
  assert done.returncode == 2, done.stderr
  assert done.stdout == ""
  lines = done.stderr.splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
  for part in parts:
    assert part in lines[0]
  assert sorted(p.name for p in folder.iterdir()) == sorted(FILES), "something was written"


ONE_OF_EACH = {program: case for case, (program, *_) in CASES.items()}.values()


@pytest.mark.parametrize(
  "case", [pytest.param(name, marks=[pytest.mark.quick] * (name in ONE_OF_EACH)) for name in CASES]
)
def test_wrong_input_ends_with_one_message_before_jax_is_imported(case, folder, start):
  program, argv, parts = CASES[case]
  done = start(f"experiments.{program}", *argv, cwd=folder)
  check_refused(done, folder, parts)


def test_a_file_that_is_no_model_is_refused_before_jax_is_imported(folder, start):
  pytest.importorskip("gguf", reason="needs the extra [hf]")
  done = start("experiments.compare", "--model=garbage.gguf", cwd=folder)
  check_refused(done, folder, ["garbage.gguf", "no readable GGUF"])


def test_a_gguf_without_the_extra_says_what_to_install(folder, without_jax, tmp_path_factory):
  stub = tmp_path_factory.mktemp("no_gguf")
  (stub / "gguf.py").write_text("raise ImportError('no gguf')")
  env = without_jax | {"PYTHONPATH": f"{stub}{os.pathsep}{without_jax['PYTHONPATH']}"}
  with forks(env=env) as start:
    done = start("experiments.compare", "--model=garbage.gguf", cwd=folder)
  check_refused(done, folder, ["pip install 'pdjax[hf]'"])


def test_more_devices_than_jax_has_are_refused(tmp_path):
  """As on a machine with few GPUs, or where JAX has started with fewer CPU devices."""
  too_many = len(jax.devices()) + 1
  config = load_config(QUICKSTART, ["model=tiny", f"num_devices={too_many}"])
  with pytest.raises(ValueError, match=rf"{too_many} devices asked for, but JAX sees"):
    check(config, tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_pools_on_a_platform_that_is_not_here_are_refused(tmp_path, platform):
  if platform == jax.default_backend():
    pytest.skip(f"there is a {platform}")
  config = load_config(QUICKSTART, ["model=tiny", f"pools=prefill@cpu,decode@{platform}"])
  with pytest.raises(ValueError, match=f"pools on @{platform}, but JAX sees no {platform} here"):
    check(config, tmp_path / "out")


@pytest.mark.quick
def test_an_empty_prompt_is_no_request():
  with pytest.raises(ValueError, match="request 5: empty prompt"):
    make_request(5, ())


@pytest.mark.quick
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_token_id_outside_the_vocabulary_is_refused_and_0_is_inside(strategy):
  """The request fails alone: the others are served."""
  size = checksum.VOCAB_SIZE
  prompts = [(0,), (3, 0, size - 1), (3, -1), (size, 3), (5, 6)]
  requests = [make_request(i, ids) for i, ids in enumerate(prompts)]
  log = virtual.run(virtual.make_cluster(strategy), requests)
  failed = {e.request_id: e.reason for e in log if isinstance(e, Failed)}
  assert failed.keys() == {2, 3}
  assert f"token id -1 is outside the vocabulary [0, {size})" in failed[2]
  assert f"token id {size} is outside" in failed[3]
  good = [requests[i] for i in (0, 1, 4)]
  tokens = virtual.tokens_of(log)
  assert {r.request_id: tokens[r.request_id] for r in good} == virtual.expected(good)


def make_request(request_id: int, ids: tuple[int, ...]) -> Request:
  return Request(
    request_id=request_id,
    arrival_s=0.0,
    num_prompt_tokens=len(ids),
    prompt_ids=ids,
    sampling=SamplingParams(max_tokens=3),
  )


@pytest.mark.quick
@pytest.mark.parametrize("layout", ["slots", "paged"])
def test_a_request_exactly_as_long_as_the_cache_runs(tmp_path, layout):
  """One token less and it is refused, for every strategy."""
  room = ["backend=sim", f"cache.layout={layout}", "cache.page_size=1"]
  check(load_config(QUICKSTART, [*room, f"cache.max_len={LONGEST}"]), tmp_path)
  by_default = check(load_config(QUICKSTART, room), tmp_path).world.pages
  assert by_default.pages_per_row == LONGEST
  for strategy in STRATEGIES:
    less = [*room, f"cache.max_len={LONGEST - 1}", f"strategies={strategy}"]
    with pytest.raises(ValueError, match=f"{LONGEST} tokens, but the pool holds {LONGEST - 1}"):
      check(load_config(QUICKSTART, less), tmp_path)
