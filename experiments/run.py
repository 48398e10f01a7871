"""One strategy, on the engine or in simulation, with the report and files of `compare`.

python -m experiments.run [--strategy=chunked] [--config=...] [--backend=jax|sim] [--set a.b=c]
"""

from __future__ import annotations

from absl import flags

from experiments.compare import report_and_write
from experiments.program import FLAGS, config_from_flags, define_flags, main


def run() -> int:
  config = config_from_flags(strategies=(FLAGS.strategy,))
  return report_and_write(config, "run", also_simulate=False)


if __name__ == "__main__":
  define_flags("configs/quickstart.py")
  flags.DEFINE_string("strategy", "chunked", "continuous, chunked or disaggregated")
  main(run)
