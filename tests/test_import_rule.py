"""Who may import whom (DESIGN.md, section 3)."""

import ast
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick
ROOT = pathlib.Path(__file__).parent.parent
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
JAX_PARTS = {"kernels", "models", "engine"}

# core <- scheduling <- serving <- { engine, sim } <- experiments
# core <- workloads, metrics                    kernels, core <- models <- engine
# workloads, metrics, sim <- analysis           tokenizer <- workloads, engine
ARROWS = {
  "core": (),
  "kernels": (),
  "tokenizer": ("core",),
  "sources": ("core",),
  "scheduling": ("core",),
  "serving": ("scheduling",),
  "workloads": ("core", "tokenizer"),
  "metrics": ("core",),
  "models": ("kernels", "core"),
  "remote": ("serving",),
  "engine": ("serving", "models", "tokenizer", "remote"),
  "sim": ("serving",),
  "analysis": ("workloads", "metrics", "sim"),
  "config": ("core", "workloads", "scheduling"),
  "deployment": ("config", "serving"),
  "stopping": ("scheduling",),
}
DOORS = {"__init__", "llm"}  # what a user comes in by: may import every part


def reachable(part):
  return {part}.union(*(reachable(other) for other in ARROWS[part]))


def imports(path):
  """The full names of all modules that a file imports, wherever in the file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative imports hide what is imported"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path):
  return path.relative_to(ROOT / "pdjax").parts[0].removesuffix(".py")


def files(*folders):
  return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_table_knows_every_part():
  assert {part_of(path) for path in files("pdjax")} - DOORS <= ARROWS.keys()


def test_jax_is_imported_only_under_kernels_models_and_engine():
  found = {
    f"{path.relative_to(ROOT)} imports {name}"
    for path in files("pdjax", "configs")
    for name in imports(path)
    if name.split(".")[0] in JAX
    and not (path.is_relative_to(ROOT / "pdjax") and part_of(path) in JAX_PARTS)
  }
  assert not found
  users = {part_of(p) for p in files("pdjax") for n in imports(p) if n.split(".")[0] == "jax"}
  assert {"models", "engine"} <= users, "the search finds nothing"


def test_engine_and_sim_never_import_each_other():
  assert "sim" not in reachable("engine") and "engine" not in reachable("sim")
  for part, other in (("engine", "sim"), ("sim", "engine")):
    for path in files(f"pdjax/{part}"):
      assert not [name for name in imports(path) if name.startswith(f"pdjax.{other}")]


def test_every_part_imports_only_what_its_arrows_reach():
  found = {
    f"{path.relative_to(ROOT)} imports {name}"
    for path in files("pdjax")
    for name in imports(path)
    if name.startswith("pdjax.") and part_of(path) not in DOORS
    if name.split(".")[1] not in reachable(part_of(path))
  }
  assert not found


def test_the_library_imports_neither_configs_nor_experiments():
  found = {
    f"{path.relative_to(ROOT)} imports {name}"
    for path in files("pdjax")
    for name in imports(path)
    if name.split(".")[0] in {"configs", "experiments", "tests"}
  }
  assert not found


def test_configs_import_no_experiments():
  for path in files("configs"):
    assert not [name for name in imports(path) if name.split(".")[0] == "experiments"]


def test_simulation_serving_and_metrics_load_no_jax():
  """In a fresh interpreter, as what they import might import it in turn."""
  modules = ["pdjax", "pdjax.config", "configs.models", "configs.hardware"]
  for part in sorted(ARROWS.keys() - JAX_PARTS):
    for path in files(f"pdjax/{part}"):
      modules.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
  assert {"pdjax.sim.sim_executor", "pdjax.serving.loop", "pdjax.metrics.latency"} <= {*modules}
  program = (
    f"import importlib, sys\n"
    f"for name in {modules!r}: importlib.import_module(name)\n"
    f"print(sorted({{name.split('.')[0] for name in sys.modules}} & {JAX!r}))"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
