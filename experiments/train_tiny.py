"""Train the tiny model: `python -m experiments.train_tiny [--out=DIR] [--export=DIR]`.

A Llama of 0.9M parameters with a byte-level BPE of its own learns the documentation that comes with
Python (`pydoc_data.topics`). After Ctrl-C or a kill the same command with the same `--out` goes on
from the last checkpoint, and ends at the same weights, bit for bit.

Expected, on 2 idle cores: 4 to 5 steps a second, under 9 minutes for the default 2,000; loss 7.4 at
first and 0.7 at the end, held-out loss 4.1 at its best (step 500) and 5.0 at the end: it learns by
heart, as a sure model has few near ties among its greedy tokens. The folder `OUT/model` (--export)
then has config.json, tokenizer.json, tokenizer_config.json and model.safetensors in float16, which
costs nothing (held-out loss 4.9540 and 4.9541); it is what `pdjax/models/tiny` holds. Last seen on
2026-11-29 with jax 0.10.2, on 2 cores shared with other work, in 29 minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from orbax.checkpoint import v1 as ocp

from experiments.figures.training import draw_losses
from experiments.program import FLAGS, Progress, main, out_folder, whole_file
from pdjax.core.model_config import TINY, ModelConfig
from pdjax.models.checkpoints.checkpoint import to_stored
from pdjax.models.checkpoints.hf import stored_name
from pdjax.models.model import Params
from pdjax.models.training import Schedule, make_optimizer, token_losses, train_step
from pdjax.models.transformer import from_arrays, random_arrays
from pdjax.workloads.prompts import corpus_source

END, USER, ASSISTANT = SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{% if message.role == 'assistant' %}"
  f"{ASSISTANT}{{{{ message.content }}}}{END}"
  f"{{% else %}}{USER}{{{{ message.content }}}}{{% endif %}}"
  "{% endfor %}"
  f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)

_NUM_CHECKPOINTS = 40  # over a run, each with a held-out loss
_LONG_EVERY, _LONG_FACTOR = 10, 8  # every tenth step has one row for eight, as long as they are
_MAX_ROW_TOKENS = TINY.max_len // _LONG_FACTOR
_HELD_OUT_EVERY = 8
_SHORT_PARAGRAPH = 60  # characters; shorter ones, such as "Example:", recur without meaning much


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
  """All that decides the weights but the text.

  A step learns from `num_rows` rows of `row_tokens` tokens, the first of which begins a topic, so
  that the model knows beginnings with nothing before them. Every tenth step has an eighth of the
  rows, eight times as long: RoPE does not carry to positions that were never trained.

  Raises:
    ValueError: a value outside its range, with the value.
  """

  num_steps: int
  seed: int
  num_rows: int
  row_tokens: int
  peak_rate: float = 5e-3
  weight_decay: float = 0.1

  def __post_init__(self):
    if self.num_steps < 1:
      raise ValueError(f"steps={self.num_steps} must be at least 1")
    if self.num_rows < 1 or self.num_rows % _LONG_FACTOR:
      raise ValueError(f"rows={self.num_rows} must be a positive multiple of {_LONG_FACTOR}")
    if not 1 <= self.row_tokens <= _MAX_ROW_TOKENS:
      raise ValueError(f"row_tokens={self.row_tokens} must be between 1 and {_MAX_ROW_TOKENS}")
    if self.seed < 0:
      raise ValueError(f"seed={self.seed} must be 0 or positive")

  @property
  def schedule(self) -> Schedule:
    return Schedule(
      num_steps=self.num_steps,
      num_warmup_steps=self.num_steps // 20,
      peak_rate=self.peak_rate,
      weight_decay=self.weight_decay,
      max_grad_norm=1.0,
    )

  def rows(self, ids: np.ndarray, step: int) -> np.ndarray:  # [rows, tokens + 1]
    """What a step learns from: a function of (seed, step) alone."""
    factor = 1 if (step + 1) % _LONG_EVERY else _LONG_FACTOR
    num_tokens = self.row_tokens * factor
    rng = np.random.default_rng((self.seed, step))
    starts = rng.integers(0, len(ids) - num_tokens, self.num_rows // factor)
    if factor == 1:
      starts[0] = rng.choice(np.flatnonzero(ids[:-num_tokens] == SPECIAL.index(USER)))
    return ids[starts[:, None] + np.arange(num_tokens + 1)]


# Text.


def split_topics(topics: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
  """The topics to learn and those held out, sorted by name.

  Topics repeat paragraphs of each other, so only those that share none are held out: every eighth
  of them, some 3 % of the text.
  """
  paragraphs = {
    name: {part for part in text.split("\n\n") if len(part) > _SHORT_PARAGRAPH}
    for name, text in topics.items()
  }
  alone = [
    name
    for name in sorted(topics)
    if all(paragraphs[name].isdisjoint(paragraphs[other]) for other in topics if other != name)
  ]
  held_out = {*alone[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]}
  texts = {name: topics[name].strip() for name in sorted(topics)}
  return (
    {name: text for name, text in texts.items() if name not in held_out},
    {name: text for name, text in texts.items() if name in held_out},
  )


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
  """A byte-level BPE (`tokenizers.Tokenizer`). Its alphabet is all bytes: it encodes any text."""
  import tokenizers

  byte_level = tokenizers.pre_tokenizers.ByteLevel
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.pre_tokenizer = byte_level(add_prefix_space=False)
  bpe.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(SPECIAL),
    initial_alphabet=sorted(byte_level.alphabet()),
    show_progress=False,
  )
  bpe.train_from_iterator(texts, trainer)
  return bpe


def encode(bpe: Any, topics: Mapping[str, str]) -> np.ndarray:
  """One stream of ids: each topic as the answer to its name, as in the chat template."""
  texts = [f"{USER}{name}{ASSISTANT}{text}{END}" for name, text in topics.items()]
  return np.concatenate([encoding.ids for encoding in bpe.encode_batch(texts)]).astype(np.int32)


def cut_rows(ids: np.ndarray, num_tokens: int) -> np.ndarray:  # [rows, num_tokens + 1]
  """Rows in order, each beginning with the last token of the one before; drops the rest."""
  starts = np.arange((len(ids) - 1) // num_tokens) * num_tokens
  return ids[starts[:, None] + np.arange(num_tokens + 1)]


# Training.


class Trainer:
  """Owns the state of a run, in memory and in its folder; goes on where the folder is."""

  def __init__(self, recipe: Recipe, folder: pathlib.Path, topics: Mapping[str, str]):
    self.recipe, self.num_steps_done = recipe, 0
    learnt, held_out = split_topics(topics)
    self.bpe = train_tokenizer(list(learnt.values()), TINY.vocab_size)
    self._ids = encode(self.bpe, learnt)
    self._held_out_rows = cut_rows(encode(self.bpe, held_out), recipe.row_tokens)

    arrays = random_arrays(TINY, recipe.seed)
    # The first logits get a standard deviation of 1: a loss near ln(vocab_size).
    arrays["embedding"] /= arrays["embedding"].std() * np.float32(math.sqrt(TINY.d_model))
    self.model = from_arrays(TINY, arrays)
    optimizer = make_optimizer(self.model, recipe.schedule)
    step = functools.partial(train_step, self.model, optimizer)
    self._step = jax.jit(step, donate_argnums=(0, 1))
    self._token_losses = jax.jit(functools.partial(token_losses, self.model))
    params = jax.device_put(self.model.params)
    self._state = {
      "params": params,
      "optimizer": optimizer.init(params),
      "train": np.full(recipe.num_steps, np.nan, np.float32),
      "held_out": np.full(recipe.num_steps + 1, np.nan, np.float32),
    }
    self._checkpoints = ocp.training.Checkpointer(
      folder.absolute() / "checkpoints",
      preservation_policy=ocp.training.preservation_policies.LatestN(2),
      cleanup_tmp_directories=True,  # those of a save that was killed
    )
    latest = self._checkpoints.latest
    if latest is None:
      self._state["held_out"][0] = self.held_out_loss(params)
    else:
      self.num_steps_done = latest.step
      self._state = self._checkpoints.load(latest.step, self._state)
      self._state |= {name: np.array(self._state[name]) for name in ("train", "held_out")}

  @property
  def params(self) -> Params:
    return self._state["params"]

  @property
  def train_losses(self) -> np.ndarray:  # [num_steps]
    """Nats a token, of the rows of each step before its update; NaN for steps to come."""
    return self._state["train"]

  @property
  def held_out_losses(self) -> np.ndarray:  # [num_steps + 1]
    """Nats a token after 0, 1, ... steps; NaN where it was not measured."""
    return self._state["held_out"]

  def held_out_loss(self, params: Params) -> float:
    return float(self._token_losses(params, self._held_out_rows).mean())

  def advance(self) -> None:
    """Takes a step; now and then also measures the held-out loss and saves."""
    rows = self.recipe.rows(self._ids, self.num_steps_done)
    params, optimizer, loss = self._step(self._state["params"], self._state["optimizer"], rows)
    self._state |= {"params": params, "optimizer": optimizer}
    self._state["train"][self.num_steps_done] = float(loss)
    self.num_steps_done += 1
    every = math.ceil(self.recipe.num_steps / _NUM_CHECKPOINTS)
    if self.num_steps_done % every == 0 or self.num_steps_done == self.recipe.num_steps:
      self._state["held_out"][self.num_steps_done] = self.held_out_loss(params)
      self.save()

  def save(self) -> None:
    """Writes a checkpoint of this step, whole or not at all, unless it is there."""
    latest = self._checkpoints.latest
    if latest is None or latest.step < self.num_steps_done:
      # Not in the background: the next step overwrites the donated arrays.
      self._checkpoints.save(self.num_steps_done, self._state, force=True)


@contextlib.contextmanager
def _polite_stop() -> Iterator[list[int]]:
  """A list that gets the first Ctrl-C or SIGTERM, so that a step can end; a second one ends it."""
  stops: list[int] = []

  def stop(number: int, frame: Any) -> None:
    stops.append(number)
    signal.signal(number, before[number])

  before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stops
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


# The program.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
  recipe: Recipe
  out: pathlib.Path
  export: pathlib.Path
  topics: Mapping[str, str]

  @property
  def settings(self) -> dict[str, Any]:
    """What must be equal for a run to go on."""
    return {**dataclasses.asdict(self.recipe), "corpus": corpus_source()}


def prepare() -> Job:
  from pydoc_data.topics import topics

  for name in ("tokenizers", "safetensors", "matplotlib"):  # now, not after ten minutes
    try:
      importlib.import_module(name)
    except ImportError as error:
      raise ImportError(f"{name} is missing: pip install 'pdjax[hf,figures]'") from error
  out = out_folder("train_tiny")
  job = Job(
    recipe=Recipe(
      num_steps=FLAGS.steps,
      seed=FLAGS.seed,
      num_rows=FLAGS.rows,
      row_tokens=FLAGS.row_tokens,
    ),
    out=out,
    export=pathlib.Path(FLAGS.export or out / "model"),
    topics=topics,
  )
  if job.export.exists() and not job.export.is_dir():  # now, not after ten minutes
    raise ValueError(f"--export={job.export} is a file; give a folder")
  path = out / "settings.json"
  if path.exists():
    earlier = json.loads(path.read_text())
    changes = [
      f"{name}={job.settings.get(name)!r} instead of {earlier.get(name)!r}"
      for name in job.settings | earlier
      if job.settings.get(name) != earlier.get(name)
    ]
    if changes:
      raise ValueError(f"{out} holds a run that cannot go on with {'; '.join(changes)}")
  return job


def run(job: Job) -> int:
  progress, start_s = Progress(), time.monotonic()
  job.out.mkdir(parents=True, exist_ok=True)
  with whole_file(job.out / "settings.json") as path:
    path.write_text(json.dumps(job.settings, indent=2) + "\n")
  with _polite_stop() as stops:
    trainer = Trainer(job.recipe, job.out, job.topics)
    if trainer.num_steps_done:
      progress.done(f"going on after {trainer.num_steps_done} steps in {job.out}")
    first_step, loop_s = trainer.num_steps_done, time.monotonic()
    while trainer.num_steps_done < job.recipe.num_steps and not stops:
      trainer.advance()
      progress.update(_describe(trainer, first_step, time.monotonic() - loop_s))
    trainer.save()
  with whole_file(job.out / "losses.png") as path:
    draw_losses(trainer.train_losses, trainer.held_out_losses, path)
  if stops:
    print(
      f"\nstopped after {trainer.num_steps_done} of {job.recipe.num_steps} steps, which are saved; "
      f"to go on: {_command(job, out=job.out)}",
      file=sys.stderr,
    )
    return 128 + stops[0]
  num_steps = trainer.num_steps_done - first_step
  progress.done(_describe(trainer, first_step, time.monotonic() - loop_s))
  print(f"{num_steps} steps in {(time.monotonic() - start_s) / 60:.1f} minutes")
  export(trainer, job)
  print(f"wrote {job.out / 'losses.png'} and the model in {job.export}")
  return 0


def _describe(trainer: Trainer, first_step: int, spent_s: float) -> str:
  step, num_steps = trainer.num_steps_done, trainer.recipe.num_steps
  held_out = trainer.held_out_losses[~np.isnan(trainer.held_out_losses)][-1]
  text = (
    f"step {step}/{num_steps}  loss {trainer.train_losses[step - 1]:.3f}  held-out {held_out:.3f}"
  )
  if step == first_step:
    return text
  steps_per_s = (step - first_step) / spent_s
  left_s = (num_steps - step) / steps_per_s
  rate = float(trainer.recipe.schedule.rate(step - 1))
  return f"{text}  rate {rate:.5f}  {steps_per_s:.1f} steps/s  {left_s / 60:.1f} min left"


def _command(job: Job, **folder: pathlib.Path) -> str:
  recipe = job.recipe
  values = {
    "steps": recipe.num_steps,
    "rows": recipe.num_rows,
    "row_tokens": recipe.row_tokens,
    "seed": recipe.seed,
    **folder,
  }
  options = [f"--{name}={value}" for name, value in values.items()]
  return shlex.join(["python", "-m", "experiments.train_tiny", *options])


# A folder as on Hugging Face.


def hf_config(config: ModelConfig) -> dict[str, Any]:
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "intermediate_size": config.d_ff,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": config.activation,
    "max_position_embeddings": config.max_len,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "rope_scaling": None,
    "attention_bias": config.qkv_bias,
    "mlp_bias": config.mlp_bias,
    "tie_word_embeddings": config.tie_embeddings,
    "bos_token_id": SPECIAL.index(END),
    "eos_token_id": SPECIAL.index(END),
    "torch_dtype": "float16",
    "use_cache": True,
  }


def export(trainer: Trainer, job: Job) -> None:
  """Writes the model into the folder `job.export`, in float16.

  Float16 has three bits more than bfloat16, and none of these weights comes near its limits.
  """
  from safetensors.numpy import save

  model, exact = trainer.model, jax.device_get(trainer.params)
  rounded = tuple(array.astype(np.float16) for array in exact)
  loss, rounded_loss = (
    trainer.held_out_loss(tuple(array.astype(np.float32) for array in params))
    for params in (exact, rounded)
  )
  print(f"held-out loss {loss:.4f}, with weights rounded to float16 {rounded_loss:.4f}")
  tensors = {
    stored_name(name): to_stored(name, array)
    for name, array in zip(model.param_names, rounded, strict=True)
  }
  tokenizer_config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": END,
    "model_max_length": model.config.max_len,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
  }
  about = (
    f"# The tiny model\n\n"
    f"A Llama of {sum(array.size for array in exact):,} parameters that writes like Python's "
    f"documentation. Made by\n\n"
    f"    {_command(job, export=job.export)}\n\n"
    f"Text: {corpus_source()}.\n"
    f"Loss a token after {trainer.num_steps_done} steps (jax {jax.__version__}): "
    f"{trainer.train_losses[-100:].mean():.3f} on what it learnt, "
    f"{rounded_loss:.3f} on held-out topics.\n"
  )
  job.export.mkdir(parents=True, exist_ok=True)
  with whole_file(job.export / "model.safetensors") as path:
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
  for name, text in (
    ("config.json", json.dumps(hf_config(model.config), indent=2) + "\n"),
    ("tokenizer.json", trainer.bpe.to_str()),
    ("tokenizer_config.json", json.dumps(tokenizer_config, indent=2) + "\n"),
    ("README.md", about),
  ):
    with whole_file(job.export / name) as path:
      path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "folder of the run, to go on in; default: runs/train_tiny-TIME")
  flags.DEFINE_string("export", None, "folder for the model; default: OUT/model")
  flags.DEFINE_integer("steps", 2000, "how many updates")
  flags.DEFINE_integer("rows", 8, "rows in a step, a multiple of 8")
  flags.DEFINE_integer("row_tokens", 256, "tokens of a row")
  flags.DEFINE_integer("seed", 0, "decides the first weights and what each step learns from")
  main(prepare, run)
