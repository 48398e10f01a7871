"""Searches in simulation: which rate, which placement, which token budget meets the targets.

    python -m experiments.search --goal=capacity [--config=...] [--strategies=continuous,chunked]
    python -m experiments.search --goal=goodput --share=0.99 [--separate] [--slo=NAME]
    python -m experiments.search --goal=placement --affinity=low --nodes=4 --devices_per_node=8
    python -m experiments.search --goal=budget --strategies=chunked [--model=...] [--hardware=...]
    python -m experiments.search --goal=replan --trace=FILE [--window_s=60] [--threshold=0.3]
    python -m experiments.search --goal=replan --events=runs/compare-.../events.jsonl

capacity   the highest rate with P99 ITL within the TPOT SLO and a median queue of at most 2 s
           (Sarathi-Serve's rule), of each strategy of the experiment
goodput    the highest rate at which a share of the requests meets both SLOs (DistServe); with
           --separate each SLO by such a share, as P90 TTFT and P90 TPOT in DistServe's code
placement  pools, their tensor and pipeline parallelism and numbers by DistServe's algorithm 1
           (--affinity=high) or 2 (low), beside colocated pools tuned on as many devices
budget     the token budget of chunked prefill, in tiles of 128, for the ITL target
replan     a placement for the first window of a trace or of the first run of a log, and again when
           the rate or lengths drift

Probes of capacity and budget are Sarathi-Serve's, 2,048 requests or half an hour. Those of the
others are as long as --least_s and --requests_per_device say, and goodputs that are reported, not
those of replan or of recorded arrivals, are held against runs four times as long.
--quick has short probes and believes them: rates come out too high (16.0 a second for 9.7, once).

--jobs=N runs probes in N processes, --ray=ADDRESS on a Ray cluster (local starts one; extra [ray];
a trace has to be at the same path on its machines).
Finished probes are kept in OUT/probes.jsonl: the same command with the same --out goes on where it
was interrupted. Writes search.json and pictures. Exit status 1: nothing reaches the target, or a
probe failed; 2: wrong input; 130: interrupted, with what was found until then.
"""

from __future__ import annotations

import dataclasses
import pathlib

from absl import flags

from configs.hardware import link
from configs.slos import SLOS
from experiments.program import (
  FLAGS,
  config_from_flags,
  define_flags,
  main,
  out_folder,
)
from experiments.searching.budgeting import BudgetGoal
from experiments.searching.carrying_out import carry_out
from experiments.searching.goals import Asked, Goal, StrategiesGoal, with_slo
from experiments.searching.placing import AFFINITIES, PlacementGoal
from experiments.searching.replanning import ReplanGoal
from experiments.sweep import Sweep, as_configured, make_sweep
from experiments.traffic import read_traffic
from pdjax.analysis.placement import Nodes
from pdjax.analysis.replan import Seen, seen_in
from pdjax.analysis.targets import Attainment, Stalls, Target
from pdjax.config import ExperimentConfig
from pdjax.core.events import read_events
from pdjax.core.names import pick

GOALS = ("capacity", "goodput", "placement", "budget", "replan")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
  """A search that can begin."""

  name: str
  goal: Goal
  config: ExperimentConfig
  out: pathlib.Path
  sweep: Sweep


def prepare() -> Prepared:
  name = pick({goal: goal for goal in GOALS}, FLAGS.goal, "goal")
  if FLAGS.backend not in (None, "sim"):
    raise ValueError(f"--backend={FLAGS.backend}: searches simulate; leave it out")
  if FLAGS.jobs < 1:
    raise ValueError(f"--jobs={FLAGS.jobs} must be at least 1")
  if FLAGS.jobs > 1 and FLAGS.ray is not None:
    raise ValueError(f"--jobs={FLAGS.jobs} and --ray={FLAGS.ray}: give one of them")
  link(FLAGS.node_link)
  if FLAGS.pools is not None and name in ("placement", "replan"):
    raise ValueError(f"--pools={FLAGS.pools}: pools are what --goal={name} searches; leave it out")
  out = out_folder("search").absolute()  # processes elsewhere read what replanning writes there
  changes = {} if FLAGS.strategies is None else {"strategies": _split(FLAGS.strategies)}
  if FLAGS.strategies is not None and FLAGS.pools is None:
    changes["pools"] = None
  config = _searchable(config_from_flags(backend="sim"), **changes)
  goal = _GOALS[name](config, out)
  sweep = make_sweep(jobs=FLAGS.jobs, ray=FLAGS.ray, begin=as_configured(FLAGS.config))
  return Prepared(name=name, goal=goal, config=config, out=out, sweep=sweep)


def _split(names: str) -> tuple[str, ...]:
  return tuple(name.strip() for name in names.split(",") if name.strip())


def _searchable(config: ExperimentConfig, **changes) -> ExperimentConfig:
  """With the flags' SLOs and strategies; what is read in other processes, by its whole path."""
  slo, workload = config.slo, config.workload
  if workload.trace is not None:
    path = str(pathlib.Path(workload.trace).absolute())
    changes["workload"] = dataclasses.replace(workload, trace=path)
  if FLAGS.slo is not None:
    named = pick(SLOS, FLAGS.slo, "SLO")
    slo = dataclasses.replace(slo, ttft_s=named.ttft_s or slo.ttft_s, tpot_s=named.tpot_s)
  return dataclasses.replace(config, slo=slo, **changes)


# Of probes, where no flag says otherwise.
_CAPACITY = dict(num_requests=2048, most_s=1800.0)  # as Sarathi-Serve's
_QUICK = dict(requests_per_device=200, least_s=30.0)


def _asked(config: ExperimentConfig, out: pathlib.Path, target: Target) -> Asked:
  length = dict(confirms=read_traffic(config.workload).lengths is not None)  # there are more
  if FLAGS.quick or isinstance(target, Stalls):
    length = dict(_QUICK if FLAGS.quick else _CAPACITY)
  given = {
    name: getattr(FLAGS, name) for name in ("num_requests", "requests_per_device", "least_s")
  }
  given = {name: value for name, value in given.items() if value is not None}
  if given and FLAGS.num_requests is None:
    length |= dict(num_requests=None, most_s=None)  # by devices, then
  return Asked(config=config, target=target, out=out, tolerance=FLAGS.tolerance, **(length | given))


def _goodput() -> Attainment:
  return Attainment(share=FLAGS.share, part="separate" if FLAGS.separate else "joint")


def _stalls(config: ExperimentConfig) -> Stalls:
  return Stalls(itl_s=config.slo.tpot_s, queue_s=FLAGS.queue_s)


def _capacity_goal(config: ExperimentConfig, out: pathlib.Path) -> Goal:
  config = with_slo(config)
  return StrategiesGoal(_asked(config, out, _stalls(config)))


def _goodput_goal(config: ExperimentConfig, out: pathlib.Path) -> Goal:
  return StrategiesGoal(_asked(with_slo(config), out, _goodput()))


def _budget_goal(config: ExperimentConfig, out: pathlib.Path) -> Goal:
  config = with_slo(config)
  return BudgetGoal(_asked(config, out, _stalls(config)))


def _cluster() -> Nodes:
  return Nodes(num_nodes=FLAGS.nodes, devices_per_node=FLAGS.devices_per_node)


def _placement_goal(config: ExperimentConfig, out: pathlib.Path) -> Goal:
  return PlacementGoal(
    _asked(config, out, _goodput()),
    _cluster(),
    affinity=FLAGS.affinity,
    node_link=FLAGS.node_link,
    rate_rps=FLAGS.rate_rps,
    most_pools=FLAGS.most_pools,
  )


def _seen(config: ExperimentConfig) -> list[Seen]:
  path = config.workload.trace
  if (path is None) == (FLAGS.events is None):
    raise ValueError("--goal=replan needs either --trace=FILE, with arrivals, or --events=FILE")
  if path is None:
    try:
      logs = read_events(FLAGS.events)
    except UnicodeDecodeError as error:
      raise ValueError(f"{FLAGS.events}: not a log of events ({error})") from error
    return seen_in(next(iter(logs.values()), ()))
  traffic = read_traffic(dataclasses.replace(config.workload, num_requests=None))
  if traffic.lengths is not None:
    raise ValueError(f"{path}: the file has lengths only; a drift needs arrivals")
  return [Seen(row.arrival_s, *row.lengths) for row in traffic.trace.rows]


def _replan_goal(config: ExperimentConfig, out: pathlib.Path) -> Goal:
  return ReplanGoal(
    dataclasses.replace(_asked(config, out, _goodput()), confirms=False),
    _seen(config),
    _cluster(),
    affinity=FLAGS.affinity,
    node_link=FLAGS.node_link,
    width_s=FLAGS.window_s,
    threshold=FLAGS.threshold,
    least_requests=FLAGS.least_requests,
    most_changes=FLAGS.most_changes,
  )


_GOALS = {
  "capacity": _capacity_goal,
  "goodput": _goodput_goal,
  "placement": _placement_goal,
  "budget": _budget_goal,
  "replan": _replan_goal,
}


def run(prepared: Prepared) -> int:
  """Searches, prints and writes the report; returns the exit status."""
  config = prepared.config
  return carry_out(
    prepared.goal,
    prepared.sweep,
    prepared.out,
    name="search",
    title=f"{prepared.name}: {config.model} on {config.hardware}",
    config=config,
    more={"goal": prepared.name},
  )


if __name__ == "__main__":
  define_flags("configs/llama3_8b_a100.py")
  flags.DEFINE_string("goal", None, f"one of {', '.join(GOALS)}", required=True)
  flags.DEFINE_string("strategies", None, "strategies to search, separated by commas")
  flags.DEFINE_string("slo", None, f"published SLOs, one of {', '.join(SLOS)}")
  flags.DEFINE_float("share", 0.9, "of the requests that have to meet the SLOs")
  flags.DEFINE_bool("separate", False, "each SLO by that share, perhaps by different requests")
  flags.DEFINE_float("queue_s", 2.0, "median queue that still counts, for capacity")
  flags.DEFINE_integer(
    "num_requests", None, "of a probe; default: 2,048 for capacity and budget, else the next two"
  )
  flags.DEFINE_integer("requests_per_device", None, "of a probe, times its devices; default: 200")
  flags.DEFINE_float(
    "least_s", None, "for which a probe's requests come at the promised capacity; default: 150"
  )
  flags.DEFINE_bool("quick", False, "short probes, and no long runs to hold their rates against")
  flags.DEFINE_float("tolerance", 0.05, "rates are found to within this share of themselves")
  flags.DEFINE_integer("nodes", 1, "of the cluster to place on")
  flags.DEFINE_integer("devices_per_node", 8, "of each node")
  flags.DEFINE_string("node_link", "25gbe", "between nodes; inside them it is the config's link")
  flags.DEFINE_enum("affinity", "low", AFFINITIES, "low: KV caches stay inside nodes")
  flags.DEFINE_float("rate_rps", None, "place for this rate; default: fill the cluster")
  flags.DEFINE_integer(
    "most_pools", 1, "of each role side by side on the same nodes (low affinity)"
  )
  flags.DEFINE_string("events", None, "events.jsonl of a run whose traffic may have drifted")
  flags.DEFINE_float("window_s", 60.0, "of the traffic, to see a drift in")
  flags.DEFINE_float("threshold", 0.3, "by how much rate or mean lengths may differ")
  flags.DEFINE_integer("least_requests", 100, "of a window that counts")
  flags.DEFINE_integer("most_changes", 3, "after which replanning stops")
  flags.DEFINE_integer("jobs", 1, "processes to run probes in")
  flags.DEFINE_string("ray", None, "address of a Ray cluster, or local")
  main(prepare, run)
