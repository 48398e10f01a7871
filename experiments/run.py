"""One strategy, on the engine or in simulation, with the report and files of `compare`.

    python -m experiments.run [--strategy=chunked] [--config=...] [--backend=jax|sim] [--set a.b=c]

`--backend=sim` imports no jax and starts at once.
"""

from __future__ import annotations

from absl import flags

from experiments.compare import check_with_twin, run
from experiments.program import FLAGS, config_from_flags, define_flags, main
from experiments.serving import Checked


def prepare() -> tuple[Checked, Checked | None]:
  return check_with_twin(config_from_flags(strategies=(FLAGS.strategy,)), "run")


if __name__ == "__main__":
  define_flags("configs/quickstart.py")
  flags.DEFINE_string("strategy", "chunked", "continuous, chunked or disaggregated")
  main(prepare, run)
