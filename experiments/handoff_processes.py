"""The part of `bench_handoff` between processes: pages of one process in the memory of another.

Started as a program it is the source: it reads a line of JSON for each thing to do, and answers
with one. The target asks and measures, from the question to pages that are ready on its devices. A
stream of as many bytes through a loopback TCP connection between the same two processes, measured
in turn, says what the machine gives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from experiments.program import ROOT
from pdjax.core.device_group import DeviceGroup
from pdjax.engine.copies import make_copies, split_of
from pdjax.remote.protocol import WorkerSetup
from pdjax.scheduling.pages import PageConfig

HEADS, HEAD_DIM, LAYERS = 8, 64, 8  # as bench_handoff's model: 32 KiB a token in float32
NUM_REPEATS = 15
COPIES = {
  "shared_memory": 0.6,
  "transfer": 0.45,
}  # and the share of the stream's rate asked of each
PAIRS = ((1, 1), (1, 2), (2, 1))  # devices of the source, of the target


def _pieces(num_tokens: int, tp: int):
  """The shape of the pages of so many tokens on `tp` devices, by layers."""
  import jax

  from pdjax.engine.mesh import make_mesh
  from pdjax.models.model import axes_sharding

  shape = (2, LAYERS, HEADS, num_tokens, HEAD_DIM)
  sharding = axes_sharding("2 L K P h", shape, make_mesh(jax.devices()[:tp]))
  return {(0, LAYERS): jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)}


def _make_copies(kind: str):
  setup = WorkerSetup(
    model_path="",
    pages=PageConfig(num_rows=1, page_size=1, pages_per_row=1, num_pages=1),
    whole_budget=1,
    chunk_budget=1,
    uses=(),
    group=DeviceGroup(devices=(0,)),
    copies=kind,
  )
  return make_copies(setup)


def serve() -> None:
  """Answers until there is no more question."""
  import jax
  import jax.numpy as jnp

  copies = {kind: _make_copies(kind) for kind in COPIES}
  payloads: dict[tuple[int, int], Any] = {}
  for line in sys.stdin:
    ask, answer = json.loads(line), None
    match ask["do"]:
      case "make":
        (pieces,) = _pieces(ask["num_tokens"], ask["tp"]).values()
        values = jnp.arange(pieces.size, dtype=jnp.float32).reshape(pieces.shape)
        payload = jax.block_until_ready(jax.device_put(values, pieces.sharding))
        payloads = {(0, LAYERS): payload}
      case "offer":
        split = tuple((tuple(layers), tuple(map(tuple, heads))) for layers, heads in ask["split"])
        answer = copies[ask["kind"]].offer(ask["uid"], payloads, split)
      case "forget":
        copies[ask["kind"]].forget(ask["uid"])
      case "stream":
        threading.Thread(target=_stream, args=(ask["port"], ask["num_bytes"])).start()
    print(json.dumps(answer), flush=True)


def _stream(port: int, num_bytes: int) -> None:
  with socket.create_connection(("127.0.0.1", port)) as sock:
    sock.sendall(memoryview(bytearray(num_bytes)))


@contextlib.contextmanager
def source_process() -> Iterator[Callable[..., Any]]:
  """A source; calling what is given asks it something."""
  process = subprocess.Popen(
    [sys.executable, "-m", "experiments.handoff_processes"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
  )

  def ask(do: str, **what: Any) -> Any:
    print(json.dumps({"do": do, **what}), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())

  try:
    yield ask
  finally:
    process.stdin.close()
    process.wait(10)


def measure(
  ask: Callable[..., Any], tps: tuple[int, int], num_tokens: int, uids: Iterator[int]
) -> list[dict[str, Any]]:
  """The rates of each way to copy and the stream's, medians of what was measured in turn."""
  import jax

  like = _pieces(num_tokens, tps[1])
  num_bytes = sum(pieces.size * 4 for pieces in like.values())
  copies = {kind: _make_copies(kind) for kind in COPIES}
  took_s: dict[str, list[float]] = {kind: [] for kind in (*COPIES, "stream")}
  ask("make", num_tokens=num_tokens, tp=tps[0])
  for _ in range(NUM_REPEATS + 2):
    took_s["stream"].append(_stream_s(ask, num_bytes))
    for kind, own in copies.items():
      uid, start_s = next(uids), time.perf_counter()
      offer = ask("offer", kind=kind, uid=uid, split=split_of(like))
      payload = jax.block_until_ready(own.fetch(offer, like))
      took_s[kind].append(time.perf_counter() - start_s)
      _check(payload)
      del payload
      ask("forget", kind=kind, uid=uid)
  warm_s = {name: times[2:] for name, times in took_s.items()}
  return [
    {
      "copies": kind,
      "source": tps[0],
      "target": tps[1],
      "bytes": num_bytes,
      "copy_s": statistics.median(warm_s[kind]),
      "stream_s": statistics.median(warm_s["stream"]),
      "share": statistics.median(
        stream_s / own_s for stream_s, own_s in zip(warm_s["stream"], warm_s[kind], strict=True)
      ),
      "asked_share": share,
    }
    for kind, share in COPIES.items()
  ]


def _stream_s(ask: Callable[..., Any], num_bytes: int) -> float:
  """From the first byte to the last; the connection is made before."""
  memory = memoryview(bytearray(num_bytes))
  with socket.create_server(("127.0.0.1", 0)) as listener:
    ask("stream", port=listener.getsockname()[1], num_bytes=num_bytes)
    sock, _ = listener.accept()
  with sock:
    got = sock.recv_into(memory[:1])
    start_s = time.perf_counter()
    while got < num_bytes:
      got += sock.recv_into(memory[got:])
    return time.perf_counter() - start_s


def _check(payload: Mapping[Any, Any]) -> None:
  """The last values of each head, which are those of their places."""
  for pieces in payload.values():
    last = np.asarray(pieces[:, :, :, -1, -1])
    size = pieces.size
    expected = np.arange(size, dtype=np.float32).reshape(pieces.shape)[:, :, :, -1, -1]
    if not np.array_equal(last, expected):
      raise RuntimeError("a copy arrived with other values")


def measure_all(num_tokens: tuple[int, ...]) -> list[dict[str, Any]]:
  """Needs two devices of this process. Starts another and ends it."""
  uids = itertools.count()
  with source_process() as ask:
    return [row for tps in PAIRS for n in num_tokens for row in measure(ask, tps, n, uids)]


def table(rows: list[dict[str, Any]]) -> str:
  lines = [
    f"{'between processes':22}{'MiB':>5}{'stream':>8}{'copy':>8}   share of the stream (asked)"
  ]
  for row in rows:
    what = f"{row['copies']} {row['source']} -> {row['target']}"
    rates = "".join(f"{row['bytes'] / row[f'{n}_s'] / 1e9:8.1f}" for n in ("stream", "copy"))
    lines.append(
      f"{what:22}{row['bytes'] / 2**20:5.0f}{rates}   {row['share']:.0%} ({row['asked_share']:.0%})"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  serve()
