"""One strategy, on the engine or in simulation, with the report and files of `compare`.

    python -m experiments.run [--strategy=chunked] [--config=...] [--backend=jax|sim] [--set a.b=c]
    python -m experiments.run --list

`--backend=sim` imports no jax and starts at once. `--list` names what can be named.
"""

from __future__ import annotations

from absl import flags

from experiments.catalogue import catalogue
from experiments.compare import check_with_twin, run
from experiments.program import FLAGS, config_from_flags, define_flags, main
from experiments.serving import Checked
from pdjax.config import STRATEGIES


def prepare() -> tuple[Checked, Checked | None] | None:
  if FLAGS.list:
    return None
  return check_with_twin(config_from_flags(strategies=(FLAGS.strategy,)), "run")


def run_or_list(prepared: tuple[Checked, Checked | None] | None) -> int:
  if prepared is not None:
    return run(prepared)
  print(catalogue())
  return 0


if __name__ == "__main__":
  define_flags("configs/quickstart.py")
  flags.DEFINE_string("strategy", "chunked", f"one of {', '.join(STRATEGIES)}")
  flags.DEFINE_bool(
    "list", False, "name strategies, policies, routers, workloads, models, hardware; run nothing"
  )
  main(prepare, run_or_list)
