"""One strategy, on the engine or in simulation, with the report and files of `compare`.

python -m experiments.run [--strategy=chunked] [--config=...] [--backend=jax|sim] [--set a.b=c]
"""

from __future__ import annotations

from absl import flags

from experiments.compare import run
from experiments.program import FLAGS, config_from_flags, define_flags, main, out_folder
from experiments.serving import Checked, check


def prepare() -> tuple[Checked, None]:
  config = config_from_flags(strategies=(FLAGS.strategy,))
  return check(config, out_folder("run")), None


if __name__ == "__main__":
  define_flags("configs/quickstart.py")
  flags.DEFINE_string("strategy", "chunked", "continuous, chunked or disaggregated")
  main(prepare, run)
