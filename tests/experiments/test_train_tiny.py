"""Training goes on bit for bit after a kill, refuses wrong flags, and exports what it learnt."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import train_tiny
from pdjax.models.checkpoints.checkpoint import open_checkpoint

for package in ("tokenizers", "safetensors", "matplotlib"):
  pytest.importorskip(package)

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_STEPS = 16
FLAGS = (f"--steps={NUM_STEPS}", "--rows=8", "--row_tokens=32")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """Starts the program."""
  folder, env = tmp_path_factory.mktemp("started"), os.environ | {"PYTHONPATH": str(ROOT)}

  def start(*argv: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.train_tiny", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=env, **pipes)

  return start


def finish(process: subprocess.Popen) -> str:
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  return output


def saved_steps(out: pathlib.Path) -> list[int]:
  return [int(p.name) for p in out.glob("checkpoints/*") if p.name.isdecimal()]


def stop_after(process: subprocess.Popen, out: pathlib.Path, step: int, number: int) -> str:
  """Sends a signal as soon as `step` steps are saved: in the middle of a later one."""
  while max(saved_steps(out), default=0) < step:
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.005)
  process.send_signal(number)
  return process.communicate(timeout=300)[0]


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory) -> pathlib.Path:
  """The folder of a run without interruption."""
  out = tmp_path_factory.mktemp("straight")
  output = finish(start(*FLAGS, f"--out={out}"))
  assert "going on" not in output and f"step {NUM_STEPS}/{NUM_STEPS}" in output
  return out


@pytest.mark.slow
def test_a_killed_and_an_interrupted_run_end_at_the_same_bytes(start, straight, tmp_path):
  process = start(*FLAGS, f"--out={tmp_path}")
  stop_after(process, tmp_path, 2, signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL
  first = max(saved_steps(tmp_path))
  assert 2 <= first < NUM_STEPS and not (tmp_path / "model").exists()

  process = start(*FLAGS, f"--out={tmp_path}")
  output = stop_after(process, tmp_path, first + 2, signal.SIGINT)
  assert process.returncode == 128 + signal.SIGINT, output
  assert f"going on after {first} steps" in output and "Traceback" not in output
  assert (tmp_path / "losses.png").exists() and not (tmp_path / "model").exists()
  stopped, command = re.search(r"stopped after (\d+) of \d+.* to go on: (.*)", output).groups()
  second = max(saved_steps(tmp_path))
  assert first + 2 <= second == int(stopped) < NUM_STEPS

  assert command.startswith("python -m experiments.train_tiny ")
  output = finish(start(*shlex.split(command)[3:]))
  assert f"going on after {second} steps" in output
  for name in ("model.safetensors", "tokenizer.json", "config.json"):
    assert (tmp_path / "model" / name).read_bytes() == (straight / "model" / name).read_bytes()
  # the history too: the picture is drawn from it
  assert (tmp_path / "losses.png").read_bytes() == (straight / "losses.png").read_bytes()


@pytest.fixture(scope="module")
def trainer(straight):
  """The finished run, opened again."""
  recipe = train_tiny.Recipe(num_steps=NUM_STEPS, seed=0, num_rows=8, row_tokens=32)
  return train_tiny.Trainer(recipe, straight, topics)


@pytest.mark.slow
def test_the_export_is_the_trained_model_rounded(trainer, straight):
  assert trainer.num_steps_done == NUM_STEPS
  checkpoint = open_checkpoint(straight / "model")
  loaded = checkpoint.load(dtype="float16")
  assert loaded.param_names == trainer.model.param_names
  for name, got, exact in zip(loaded.param_names, loaded.params, trainer.params):
    np.testing.assert_array_equal(got, np.asarray(exact).astype(np.float16), err_msg=name)


@pytest.mark.slow
def test_losses_fall_and_all_are_kept(trainer):
  losses, held_out = trainer.train_losses, trainer.held_out_losses
  assert np.isfinite(losses).all() and losses[-3:].mean() < losses[:3].mean() - 0.3
  assert np.isfinite(held_out).all() and held_out[-1] < held_out[0] - 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
  "flags, parts",
  [
    (("--seed=1", "--rows=16"), ["seed=1 instead of 0", "rows=16 instead of 8", "cannot go on"]),
    (("--out={out}/settings.json",), ["settings.json is a file"]),
    (("--export={out}/settings.json",), ["--export", "settings.json is a file"]),
  ],
)
def test_wrong_flags_give_one_message_and_change_nothing(straight, start, flags, parts):
  before = {path: path.stat().st_mtime_ns for path in straight.rglob("*")}
  process = start(*FLAGS, f"--out={straight}", *(flag.format(out=straight) for flag in flags))
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 2
  assert output.startswith("error: ") and len(output.splitlines()) == 1
  assert all(part in output for part in parts), output
  assert {path: path.stat().st_mtime_ns for path in straight.rglob("*")} == before


@pytest.mark.parametrize(
  "field, value",
  [("num_steps", 0), ("seed", -1), ("num_rows", 12), ("num_rows", 0), ("row_tokens", 300)],
)
def test_a_recipe_names_its_wrong_value(field, value):
  fields = {"num_steps": 10, "seed": 0, "num_rows": 8, "row_tokens": 256, field: value}
  with pytest.raises(ValueError, match=f"{field.removeprefix('num_')}={value}"):
    train_tiny.Recipe(**fields)


# Text and rows.


def test_rows_are_pieces_of_the_text_by_seed_and_step():
  ids = np.arange(50_000, dtype=np.int32)
  recipe, other = (
    train_tiny.Recipe(num_steps=100, seed=seed, num_rows=8, row_tokens=128) for seed in (3, 4)
  )
  shapes = set()
  for step in range(20):
    rows = recipe.rows(ids, step)
    np.testing.assert_array_equal(rows, recipe.rows(ids, step))
    assert (np.diff(rows) == 1).all()
    assert rows[-1, 0] not in (recipe.rows(ids, step + 20)[-1, 0], other.rows(ids, step)[-1, 0])
    shapes.add(rows.shape)
  assert shapes == {(8, 129), (1, 1025)}  # now and then as many tokens in one row


def test_the_first_row_begins_a_topic():
  ids = np.full(50_000, 7, np.int32)
  begins = train_tiny.SPECIAL.index(train_tiny.USER)
  ids[[11, 20_000]] = begins
  recipe = train_tiny.Recipe(num_steps=100, seed=0, num_rows=8, row_tokens=128)
  assert all(recipe.rows(ids, step)[0, 0] == begins for step in range(9))


def test_held_out_rows_cover_the_text_once():
  ids = np.arange(1000, dtype=np.int32)
  rows = train_tiny.cut_rows(ids, 128)
  np.testing.assert_array_equal(rows[:, 1:].ravel(), ids[1 : 1 + 7 * 128])
  np.testing.assert_array_equal(rows[:, :-1].ravel(), ids[: 7 * 128])


def test_what_is_held_out_is_learnt_nowhere():
  learnt, held_out = train_tiny.split_topics(topics)
  assert learnt.keys() | held_out.keys() == topics.keys() and not learnt.keys() & held_out.keys()
  size = sum(map(len, held_out.values()))
  assert 0.01 < size / sum(map(len, topics.values())) < 0.15
  everything = "\n".join(learnt.values())
  for text in held_out.values():
    for paragraph in text.split("\n\n"):
      assert len(paragraph) <= 60 or paragraph not in everything


@pytest.fixture(scope="module")
def bpe():
  return train_tiny.train_tokenizer(["the quick brown fox " * 5, "jumps over\n  the dog"], 300)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(bpe, text):
  ids = bpe.encode(text).ids
  assert bpe.decode(ids, skip_special_tokens=False) == text


def test_training_a_tokenizer_is_deterministic():
  texts = list(topics.values())
  first, second = (train_tiny.train_tokenizer(texts, 1024).to_str() for _ in range(2))
  assert first == second
