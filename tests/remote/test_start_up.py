"""Start-up files, the secret they point to, who gets which devices, and one answer of many."""

import re

import pytest

from pdjax.core.device_group import DeviceGroup
from pdjax.remote.hosts import Host, Hosts, Together, call, read_hosts, read_secret
from pdjax.remote.protocol import ProtocolError, accept, connect, listen

pytestmark = pytest.mark.quick
SECRET = "a secret of many characters"


def secret_file(folder, text=SECRET, mode=0o600):
  path = folder / "secret"
  path.write_text(text)
  path.chmod(mode)
  return path


def start_up(folder, text):
  secret_file(folder)
  path = folder / "hosts.toml"
  path.write_text('secret_file = "secret"\n' + text)
  return path


def test_a_start_up_file_lists_hosts_and_points_to_the_secret_beside_it(tmp_path):
  path = start_up(
    tmp_path,
    '[[hosts]]\naddress = "a:1"\ndevices = 2\n[[hosts]]\naddress = "b:2"\ndata_address = "c"\n',
  )
  hosts, secret = read_hosts(path)
  assert hosts.hosts == (
    Host(address="a:1", devices=2),
    Host(address="b:2", devices=1, data_address="c"),
  )
  assert (hosts.num_devices, secret) == (3, SECRET)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "must name at least one host"),
    ('[[hosts]]\naddress = "a"\n', "'a' must be HOST:PORT"),
    ('[[hosts]]\naddress = "a:x"\n', "'a:x' must be HOST:PORT"),
    ('[[hosts]]\naddress = "a:70000"\n', "'a:70000' must be HOST:PORT"),
    ('[[hosts]]\naddress = "a:1"\ndevices = 0\n', "a:1: devices=0"),
    ('[[hosts]]\naddress = "a:1"\n[[hosts]]\naddress = "a:1"\n', "none twice"),
    ('[[hosts]]\nadress = "a:1"\n', "adress"),
    ("[[hosts", "hosts.toml is no start-up file"),
  ],
)
def test_a_start_up_file_that_says_something_else_is_refused(tmp_path, text, message):
  path = start_up(tmp_path, text or "hosts = []\n")
  with pytest.raises(ValueError, match=re.escape(message)):
    read_hosts(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused(tmp_path, mode):
  with pytest.raises(ValueError, match=f"mode {mode:03o}.*chmod 600"):
    read_secret(secret_file(tmp_path, mode=mode))


def test_a_secret_that_anyone_can_guess_is_refused(tmp_path):
  with pytest.raises(ValueError, match="holds 5 characters"):
    read_secret(secret_file(tmp_path, "12345\n"))


HOSTS = Hosts(
  secret_file="secret",
  hosts=(Host(address="a:1", devices=2), Host(address="b:1"), Host(address="c:1", devices=3)),
)


@pytest.mark.parametrize(
  ("devices", "parts"),
  [
    ((1,), [("a:1", (1,))]),
    ((2,), [("b:1", (0,))]),
    ((0, 1), [("a:1", (0, 1))]),
    ((1, 2, 3, 4), [("a:1", (1,)), ("b:1", (0,)), ("c:1", (0, 1))]),
  ],
)
def test_devices_are_those_of_one_host_after_the_other(devices, parts):
  found = HOSTS.parts_of(DeviceGroup(devices=devices))
  assert [(host.address, own) for host, own in found] == parts


@pytest.mark.parametrize(
  ("group", "message"),
  [
    (DeviceGroup(devices=(5, 6)), "device 6 is on no host: 3 hosts have 6"),
    (DeviceGroup(devices=(0, 2, 1)), "not listed host by host"),
    (DeviceGroup(devices=(1, 2), pp=2), "2 pipeline stages on a:1 and b:1"),
  ],
)
def test_a_pool_that_no_hosts_can_serve_is_refused(group, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    HOSTS.parts_of(group)


def test_nobody_at_an_address_is_one_message_that_says_what_to_start():
  with listen() as free:
    address = "{}:{}".format(*free.getsockname())
  with pytest.raises(ProtocolError, match=f"no worker waits at {address}: .*--listen={address}"):
    call(address, SECRET)


def pairs(num_pairs):
  """Connections and their other ends."""
  ours, theirs = [], []
  for _ in range(num_pairs):
    with listen() as listener:
      theirs.append(connect("{}:{}".format(*listener.getsockname())))
      ours.append(accept(listener, 5))
  return ours, theirs


def test_all_processes_are_told_the_same_and_an_answer_is_there_when_all_have_given_theirs():
  ours, theirs = pairs(2)
  together = Together(ours)
  together.send({"do": "this"})
  assert [end.receive(5) for end in theirs] == [{"do": "this"}] * 2
  theirs[1].send({"number": 1, "value": "b"})
  assert together.receive(0.1) is None
  theirs[0].send({"number": 0, "value": ["a"]})
  theirs[1].send({"number": 0, "value": ["b"]})
  theirs[0].send({"number": 1, "value": "a"})
  answers = sorted([together.receive(5), together.receive(5)], key=lambda a: a["number"])
  assert answers == [{"number": 0, "value": ["a", "b"]}, {"number": 1, "value": "a"}]
  together.close()


def test_an_error_of_one_process_is_the_error_of_all():
  ours, theirs = pairs(2)
  together = Together(ours)
  theirs[0].send({"number": 0, "value": None})
  theirs[1].send({"number": 0, "error": "no room"})
  assert together.receive(5) == {"number": 0, "error": "no room"}
  theirs[1].send({"error": "no devices"})
  assert together.receive(5) == {"error": "process 1 of the pool: no devices"}
  together.close()


def test_processes_that_disagree_on_what_they_have_lost_are_a_pool_no_longer():
  ours, theirs = pairs(2)
  together = Together(ours)
  for end, value in zip(theirs, (True, False), strict=True):
    end.send({"number": 0, "value": value})
  with pytest.raises(ProtocolError, match="disagree"):
    together.receive(5)
  together.close()


def test_the_end_of_one_process_is_the_end_of_all():
  ours, theirs = pairs(2)
  together = Together(ours)
  theirs[1].close()
  with pytest.raises(EOFError, match="process 1"):
    while True:
      together.receive(5)
  together.close()
  with pytest.raises((EOFError, OSError)):
    theirs[0].receive(5)
