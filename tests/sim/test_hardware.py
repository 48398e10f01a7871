"""Links and the catalogues of devices, links and models."""

import pytest

from configs.hardware import FITTED_FROM, HARDWARE, LINKS, link
from configs.models import MODELS
from pdjax.sim.hardware import Device, Fit, Link, parse_link

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  "text, bytes_per_s", [("10gbps", 1.25e9), ("400Gbps", 50e9), (" 2.5gbps ", 0.3125e9)]
)
def test_a_rate_in_gigabits_becomes_bytes(text, bytes_per_s):
  assert parse_link(text).bytes_per_s == pytest.approx(bytes_per_s)
  assert link(text) == parse_link(text)


@pytest.mark.parametrize("text", ["10", "10gb/s", "gbps", "-1gbps", "0gbps", "1.2.3gbps"])
def test_what_is_no_rate_is_refused_with_its_text(text):
  with pytest.raises(ValueError, match="gbps"):
    parse_link(text)


def test_a_copy_takes_latency_and_bytes_over_rate():
  assert Link(name="l", latency_s=0.5, bytes_per_s=100.0).copy_s(300) == 3.5


def test_links_are_found_by_name_or_the_near_ones_are_named():
  assert link("nvlink") is LINKS["nvlink"]
  with pytest.raises(ValueError, match=r"unknown link.*'nvlnk'; did you mean nvlink"):
    link("nvlnk")


def test_impossible_hardware_is_refused():
  with pytest.raises(ValueError, match="bytes_per_s=0"):
    Link(name="l", latency_s=0.0, bytes_per_s=0)
  with pytest.raises(ValueError, match="memory_bytes=-1"):
    Device(name="d", peak_flops_per_s=1, peak_bytes_per_s=1, memory_bytes=-1)


@pytest.mark.parametrize(
  ("curve", "said"),
  [
    (((8, 1e-5),), "two or more, ascending"),
    (((16, 1e-5), (8, 2e-5)), "two or more, ascending"),
    ((), "two or more, ascending"),
    (((8, -1e-5), (16, 2e-5)), "must be positive"),
    (((8, 1e-5), (16, 3e-5), (32, 2e-5)), "not fall"),
  ],
)
def test_a_curve_of_all_reduces_that_cannot_go_on_is_refused(curve, said):
  with pytest.raises(ValueError, match=f"all_reduces.* 4 devices.*{said}"):
    Fit(all_reduce_share=0.5, all_reduce_launch_s=1e-5, all_reduces=((4, curve),))
  with pytest.raises(ValueError, match="all_reduces without all_reduce_share"):
    Fit(all_reduces=((4, ((8, 1e-5), (16, 2e-5))),))


def test_entries_carry_the_name_they_are_listed_under():
  for table in (HARDWARE, LINKS, MODELS):
    assert all(entry.name == name for name, entry in table.items())


def test_a_device_that_was_not_measured_says_so():
  calibrated = {name for name, device in HARDWARE.items() if device.is_calibrated}
  assert calibrated == {*FITTED_FROM, "cpu"}  # by steps of this engine
  assert HARDWARE["h100"].label == "h100"
  assert HARDWARE["b200"].label == "b200 (uncalibrated)"


def test_the_a100_balances_at_153_flop_per_byte():
  assert HARDWARE["a100"].ridge_flop_per_byte == pytest.approx(153, abs=0.5)


# Parameter counts as the model cards or the papers give them, in 1e9; DistServe's table 1 has the
# OPT weights as 26, 132 and 350 GB in 16 bits.
@pytest.mark.parametrize(
  "name, billions",
  [("smollm2-135m", 0.1345), ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama2-7b", 6.74),
   ("llama2-70b", 68.98), ("mistral-7b", 7.24), ("yi-34b", 34.39), ("opt-13b", 12.85),
   ("opt-66b", 65.7), ("opt-175b", 175.0), ("falcon-180b", 179.5)],
)  # fmt: skip
def test_models_have_their_published_number_of_parameters(name, billions):
  assert MODELS[name].num_params / 1e9 == pytest.approx(billions, rel=0.004)


def test_kv_of_smollm2_and_opt_66b_has_its_published_size():
  # references: 11,520 values a token; DistServe section 3.3: 1.13 GB (GiB) for 512 tokens
  assert MODELS["smollm2-135m"].kv_bytes_per_token() == 23_040
  assert MODELS["opt-66b"].kv_bytes_per_token() * 512 / 2**30 == pytest.approx(1.13, abs=0.01)
