"""Turn any checkpoint into a folder that loads onto any mesh at the speed of the disk (Orbax).

    python -m experiments.convert --from=smollm2-135m --to=DIR [--dtype=bfloat16] [--tp=N]

`--from` is what `--model` of the other programs is: a known name, a path, or a Hugging Face repo
id. The folder has the weights, the model's shape and the tokenizer: `--model=DIR` runs it. Until it
is complete it is refused; an interrupted conversion is repeated with the same command. A model that
is too large for the host's memory and fits the devices' is converted with `--tp`.

Expected of smollm2-135m (93 MB of 4-bit GGUF): a folder of 269 MB in bfloat16 in 10 seconds on
2 cores, and the command that runs it on the last line.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any, NamedTuple

from absl import flags

from experiments.program import FLAGS, Progress, main
from pdjax.sources import resolve
from pdjax.tokenizer import check_vocabulary, load_tokenizer


class Read(NamedTuple):
  """What is about to be written."""

  model: Any  # pdjax.models.model.Model
  files: dict[str, str]
  folder: pathlib.Path


def prepare() -> Read:
  if not FLAGS.to:
    raise ValueError("--to is missing; give the folder to write, as in --to=models/mine")
  if not FLAGS["from"].value:
    raise ValueError("--from is missing; give a model by name, path or Hugging Face repo id")
  folder = pathlib.Path(FLAGS.to)
  path = resolve(FLAGS["from"].value, show=lambda line: print(line, file=sys.stderr))
  if path.resolve() == folder.resolve():
    raise ValueError(f"--from and --to are both {folder}")

  from pdjax.models.checkpoints.checkpoint import open_checkpoint
  from pdjax.models.checkpoints.orbax import check_writable, is_complete

  check_writable(folder)
  if is_complete(folder) and not FLAGS.overwrite:
    raise ValueError(f"{folder} has a model already; --overwrite replaces it")
  checkpoint = open_checkpoint(path, check_weights=FLAGS.check_weights)
  try:
    tokenizer = load_tokenizer(path)
  except ValueError as error:
    print(f"without a tokenizer: {error}", file=sys.stderr)
    files = {}
  else:
    check_vocabulary(tokenizer, checkpoint.config, path)
    files = tokenizer.files()

  target = None
  if FLAGS.tp > 1:
    from pdjax.engine.mesh import ensure_devices, make_mesh

    target = make_mesh(ensure_devices(FLAGS.tp))
  progress = Progress()
  model = checkpoint.load(
    dtype=FLAGS.dtype, target=target, show=lambda line: progress.update(f"reading {line}")
  )
  size_mb = sum(param.nbytes for param in model.params) / 1e6
  progress.done(f"read {path}: {len(model.params)} parameters, {size_mb:,.0f} MB in {FLAGS.dtype}")
  return Read(model, files, folder)


def run(read: Read) -> int:
  from pdjax.models.checkpoints.orbax import save_orbax

  print(f"writing {read.folder} ...", file=sys.stderr)
  try:
    save_orbax(read.folder, read.model, files=read.files)
  except OSError as error:  # such as a full disk
    print(f"error: {read.folder} is not complete: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print(f"\ninterrupted; {read.folder} is refused until it is converted again", file=sys.stderr)
    sys.stderr.flush()
    os._exit(130)  # Orbax writes in threads, which complain when Python ends under them
  print(f"python -m experiments.run --model={read.folder}")
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("from", None, "a known name, a path or a Hugging Face repo id")
  flags.DEFINE_string("to", None, "folder to write")
  flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "of the weights")
  flags.DEFINE_integer("tp", 1, "devices to hold the weights, instead of the host", lower_bound=1)
  flags.DEFINE_bool("overwrite", False, "replace a model that is in --to")
  flags.DEFINE_bool("check_weights", False, "refuse weights that are NaN or infinite")
  main(prepare, run)
