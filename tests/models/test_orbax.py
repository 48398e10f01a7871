from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pdjax.core.model_config import ModelConfig, RopeScaling
from pdjax.models.checkpoints import orbax
from pdjax.models.checkpoints.checkpoint import open_checkpoint
from pdjax.models.checkpoints.orbax import MANIFEST, open_orbax, save_orbax
from pdjax.models.model import TENSOR_AXIS
from pdjax.models.transformer import from_arrays, param_shapes, random_arrays

pytestmark = pytest.mark.quick
ROOT = pathlib.Path(orbax.__file__).parents[3]

CONFIG = ModelConfig(
  name="small",
  num_layers=2,
  d_model=32,
  num_heads=8,
  num_kv_heads=2,
  head_dim=8,
  d_ff=64,
  vocab_size=80,
  max_len=64,
)
FILES = {"tokenizer.json": "{}", "tokenizer_config.json": "[]"}


def mesh(start: int, num_devices: int) -> Mesh:
  devices = jax.devices()[start : start + num_devices]
  if len(devices) < num_devices:
    pytest.skip("needs JAX_NUM_CPU_DEVICES=8")
  return Mesh(np.array(devices), (TENSOR_AXIS,))


@pytest.fixture(scope="module")
def arrays():
  return random_arrays(CONFIG, seed=0)


@pytest.fixture
def saved(arrays, tmp_path):
  """A folder with a model and the files of a tokenizer."""
  save_orbax(tmp_path / "model", from_arrays(CONFIG, arrays), files=FILES)
  return tmp_path / "model"


def assert_equal(model, arrays, dtype="float32", *, through="float32") -> None:
  """The parameters are `arrays`, cast as they were when saved and as they are now."""
  for name, param in zip(model.param_names, model.params, strict=True):
    wanted = arrays[name].astype(jnp.dtype(through)).astype(jnp.dtype(dtype))
    assert param.dtype == wanted.dtype and (np.asarray(param) == wanted).all(), name


def test_a_model_goes_from_one_mesh_straight_onto_others(arrays, tmp_path):
  two = from_arrays(CONFIG, arrays, target=mesh(0, 2))
  save_orbax(tmp_path / "a", two)
  four_devices = mesh(2, 4)
  four = open_orbax(tmp_path / "a").load(dtype="bfloat16", target=four_devices)
  assert_equal(four, arrays, "bfloat16")
  for mine, rule in zip(four.params, two.to(four_devices).params, strict=True):
    assert mine.sharding.is_equivalent_to(rule.sharding, mine.ndim)
  assert not all(param.is_fully_replicated for param in four.params)

  save_orbax(tmp_path / "b", four)
  for target in (mesh(0, 1), jax.devices()[0], None):
    one = open_orbax(tmp_path / "b").load(target=target)
    assert_equal(one, arrays, "float32", through="bfloat16")
    assert target is not None or isinstance(one.params[0], np.ndarray)
  assert one.cache_dtype == "float32" and four.cache_dtype == "bfloat16"


def test_a_mesh_that_cannot_hold_the_model_is_no_damage(saved):
  with pytest.raises(ValueError, match="num_heads=8 is no multiple of the 3 devices"):
    open_orbax(saved).load(target=mesh(0, 3))


def test_every_field_of_the_shape_comes_back(tmp_path):
  config = dataclasses.replace(
    CONFIG,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_len=32),
    rope_theta=5e5,
    sliding_window=16,
    first_window_layer=1,
    qkv_bias=True,
    tie_embeddings=True,
    norm="layer",
    activation="gelu",
  )
  save_orbax(tmp_path / "m", from_arrays(config, random_arrays(config, seed=1)))
  checkpoint = open_checkpoint(tmp_path / "m")
  assert checkpoint.config == config
  assert_equal(checkpoint.load(), random_arrays(config, seed=1))


def test_large_arrays_are_stored_in_chunks_that_a_shard_can_be_read_from(
  arrays, tmp_path, monkeypatch
):
  monkeypatch.setattr(orbax, "_CHUNK_BYTES", 1024)
  save_orbax(tmp_path / "m", from_arrays(CONFIG, arrays))
  stored = orbax.ocp.metadata(tmp_path / "m" / "params").metadata
  for name, array in stored.items():
    assert np.prod(array.storage_metadata.chunk_shape) * 4 <= 1024, name
  assert_equal(open_orbax(tmp_path / "m").load(target=mesh(0, 4)), arrays)


def test_saving_again_replaces_the_model_and_its_files(saved, arrays):
  other = {name: array + 1 for name, array in arrays.items()}
  (saved / "notes.txt").write_text("of the user")
  save_orbax(saved, from_arrays(CONFIG, other), files={"tokenizer.json": "new"})
  assert_equal(open_orbax(saved).load(), other)
  assert sorted(path.name for path in saved.iterdir()) == sorted(
    [MANIFEST, "params", "tokenizer.json", "notes.txt"]
  )


def test_a_folder_with_something_else_in_it_is_not_written_to(arrays, tmp_path):
  model = from_arrays(CONFIG, arrays)
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="has files that are not a model saved by pdjax"):
    save_orbax(tmp_path, model)
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
  with pytest.raises(ValueError, match="is a file"):
    save_orbax(tmp_path / "config.json", model)


@pytest.mark.parametrize("stage", ["before", "after"])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_interrupted_save_is_refused_until_it_is_repeated(
  arrays, saved, tmp_path, monkeypatch, stage, is_new
):
  folder = tmp_path / "new" if is_new else saved
  real = orbax.ocp.save

  def save(*arguments):
    if stage == "after":
      real(*arguments)
    raise KeyboardInterrupt

  monkeypatch.setattr(orbax.ocp, "save", save)
  with pytest.raises(KeyboardInterrupt):
    save_orbax(folder, from_arrays(CONFIG, arrays), files=FILES)
  with pytest.raises(ValueError, match=f"{folder.name}: its saving was interrupted; save it again"):
    open_checkpoint(folder)
  monkeypatch.setattr(orbax.ocp, "save", real)
  save_orbax(folder, from_arrays(CONFIG, arrays))
  assert_equal(open_checkpoint(folder).load(), arrays)
  assert sorted(path.name for path in folder.iterdir()) == ["params", MANIFEST]  # and no leftovers


@pytest.mark.once
def test_a_save_that_is_killed_is_refused_until_it_is_repeated(arrays, tmp_path):
  """Killed with Orbax's temporary folder there and hundreds of megabytes to go."""
  folder = tmp_path / "model"
  script = (
    "import dataclasses, sys\n"
    "import numpy as np\n"
    "from pdjax.models.checkpoints.orbax import save_orbax\n"
    "from pdjax.models.transformer import from_tensors, param_shapes\n"
    "from pdjax.core.model_config import TINY\n"
    "config = dataclasses.replace(TINY, d_model=512, d_ff=8192, num_layers=6, vocab_size=40_000)\n"
    "ones = ((name, np.ones(shape)) for name, shape in param_shapes(config).items())\n"
    "save_orbax(sys.argv[1], from_tensors(config, ones))\n"
  )
  saver = subprocess.Popen(
    [sys.executable, "-c", script, str(folder)], cwd=ROOT, stderr=subprocess.DEVNULL
  )
  until_s = time.monotonic() + 60
  while not any(path.is_file() for path in folder.glob("params*/**/*")):
    assert saver.poll() is None and time.monotonic() < until_s
    time.sleep(0.002)
  saver.kill()
  saver.wait()
  with pytest.raises(ValueError, match="its saving was interrupted"):
    open_checkpoint(folder)
  save_orbax(folder, from_arrays(CONFIG, arrays))
  assert_equal(open_checkpoint(folder).load(), arrays)
  assert sorted(path.name for path in folder.iterdir()) == ["params", MANIFEST]


def one_refusal(folder, **options) -> str:
  """The message of opening and loading a damaged folder."""
  with pytest.raises(ValueError) as caught:
    open_checkpoint(folder, **options).load()
  message = str(caught.value)
  assert str(folder) in message and len(message.splitlines()) == 1
  return message


def test_a_missing_or_cut_file_is_named(saved):
  paths = [path for path in saved.rglob("*") if path.is_file() and path.name != MANIFEST]
  assert len(paths) > len(FILES) + 3
  for path in paths:
    data = path.read_bytes()
    path.unlink()
    assert f"{path.relative_to(saved)} is missing" in one_refusal(saved)
    if data:
      path.write_bytes(data[:-1])
      assert f"{len(data) - 1} bytes instead of {len(data)}" in one_refusal(saved)
    path.write_bytes(data)
  open_checkpoint(saved).load()


def damage(path: pathlib.Path) -> bytes:
  """Flips a bit; returns what was there."""
  data = path.read_bytes()
  damaged = bytearray(data)
  damaged[len(data) // 2] ^= 0x80
  path.write_bytes(damaged)
  return data


@pytest.mark.parametrize("check_weights", [True, False])
def test_wrong_bytes_are_refused_those_of_large_files_on_request(
  saved, arrays, monkeypatch, check_weights
):
  if check_weights:
    monkeypatch.setattr(orbax, "_SMALL_BYTES", 10_000)
  paths = [p for p in saved.rglob("*") if p.is_file() and p.stat().st_size and p.name != MANIFEST]
  assert max(path.stat().st_size for path in paths) > 10_000
  for path in paths:
    data = damage(path)
    message = one_refusal(saved, check_weights=check_weights)
    assert f"{path}: damaged: sha256 " in message
    path.write_bytes(data)
  assert_equal(open_checkpoint(saved, check_weights=True).load(), arrays)


def test_what_orbax_cannot_read_is_one_message(saved, monkeypatch):
  monkeypatch.setattr(orbax, "_SMALL_BYTES", -1)
  state = saved / "params" / "state"
  for path in (state / "_METADATA", state / "manifest.ocdbt"):
    data = damage(path)
    assert "params: damaged (" in one_refusal(saved)
    path.write_bytes(data)
  open_checkpoint(saved).load()


def test_opening_does_not_start_jax(saved):
  """Or a pool could no longer split the CPU into as many devices as it needs."""
  script = (
    "import sys, jax\n"
    "from pdjax.models.checkpoints.checkpoint import open_checkpoint\n"
    "checkpoint = open_checkpoint(sys.argv[1])\n"
    "jax.config.update('jax_num_cpu_devices', 3)\n"
    "print(len(jax.devices()))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", script, str(saved)], cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.stdout == "3\n", done.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "complete": true}'])
def test_a_damaged_manifest_is_named(saved, text):
  (saved / MANIFEST).write_text(text)
  assert f"{MANIFEST}: damaged" in one_refusal(saved)


def test_a_manifest_of_another_model_or_format_is_refused(saved):
  manifest = json.loads((saved / MANIFEST).read_text())
  (saved / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
  assert "format 2, and only 1 is read" in one_refusal(saved)
  config = manifest["config"] | {"num_layers": 3, "d_ff": 32}
  (saved / MANIFEST).write_text(json.dumps(manifest | {"config": config}))
  message = one_refusal(saved)
  assert "missing blocks.2.attention.q" in message
  assert "blocks.0.mlp.up has shape (32, 64), not (32, 32)" in message


def test_nan_is_refused_on_request(arrays, tmp_path):
  name = list(param_shapes(CONFIG))[-1]
  bad = arrays | {name: np.where(np.arange(arrays[name].size) == 1, np.nan, arrays[name].ravel())
                  .reshape(arrays[name].shape).astype(np.float32)}  # fmt: skip
  save_orbax(tmp_path / "m", from_arrays(CONFIG, bad))
  open_checkpoint(tmp_path / "m").load()
  message = one_refusal(tmp_path / "m", check_weights=True)
  assert f"parameter {name}: 1 of " in message


def test_other_folders_are_not_taken_for_saved_models(tmp_path):
  with pytest.raises(ValueError, match=f"is no model saved by pdjax: it has no {MANIFEST}"):
    open_orbax(tmp_path)
  assert os.listdir(tmp_path) == []
