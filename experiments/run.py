"""One strategy, on the engine or in simulation, with the report and files of `compare`.

    python -m experiments.run [--strategy=chunked] [--config=...] [--backend=jax|sim] [--set a.b=c]
    python -m experiments.run --pools=2xprefill:tp2,1xdecode:tp4 [...]
    python -m experiments.run --list

`--backend=sim` imports no jax and starts at once. `--list` names what can be named.
"""

from __future__ import annotations

import dataclasses

from absl import flags

from experiments.catalogue import catalogue
from experiments.compare import check_with_twin, define_run_flags, run_as_asked
from experiments.program import FLAGS, config_from_flags, main
from experiments.serving import Checked
from pdjax.config import STRATEGIES


def prepare() -> tuple[Checked, Checked | None] | None:
  if FLAGS.list:
    return None
  strategy, pools = FLAGS.strategy, FLAGS.pools
  if pools is not None and strategy is not None:
    raise ValueError(f"--pools={pools} and --strategy={strategy}: give one of them")
  config = config_from_flags(strategies=(strategy or "chunked",) if pools is None else ())
  if config.pools is not None and strategy is None:
    config = dataclasses.replace(config, strategies=())
  elif config.pools is not None:
    config = dataclasses.replace(config, pools=None)
  return check_with_twin(config, "run")


def run_or_list(prepared: tuple[Checked, Checked | None] | None) -> int:
  if prepared is not None:
    return run_as_asked(prepared)
  print(catalogue())
  return 0


if __name__ == "__main__":
  define_run_flags()
  flags.DEFINE_string("strategy", None, f"chunked (default), or of {', '.join(STRATEGIES)}")
  flags.DEFINE_bool(
    "list", False, "name strategies, policies, routers, workloads, models, hardware; run nothing"
  )
  main(prepare, run_or_list)
