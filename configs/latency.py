"""Latency models by name: what says how long steps take in a simulation (`--set latency=NAME`).

roofline            each operator by a smooth roofline, as the entry of `configs/hardware.py` is
                    fitted; attention of prompts and of decodes are two kernels
one_kernel          the same where one kernel does both, as in vLLM; RTX PRO 6000 and RTX 4090
silicon_vllm        operators as measured under that engine: tables of aiconfigurator-core (extra
silicon_trtllm      `[silicon]`); A100, H100, H200, L40S, B200 and what else it has
silicon_sglang
distserve           DistServe's linear form of OPT-13B and 66B on A100, its coefficients as
distserve_vllm      shipped, of its own engine and of vLLM 0.2.3; with the host time that
                    simdistserve adds, as in VALIDATION.md;
distserve_profiled  as they were profiled, before they were scaled to runs (`configs/linear.py`):
distserve_vllm_profiled
                    vLLM's pad prompts, those as shipped have that in their factors
distserve_synthetic what was never published: OPT-175B, by the shipped coefficients of OPT-66B on as
distserve_vllm_synthetic
                    many devices and the sizes of both (`configs/linear.py: scaled_fit`)
niyama              Niyama's linear form, Llama-3-8B on an A100
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from configs.linear import NIYAMA, SIMDISTSERVE, distserve_fit, pads_prompts, scaled_fit
from configs.models import MODELS
from pdjax.core.model_config import ModelConfig
from pdjax.sim.hardware import Device, Link
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.linear import DistServeForm
from pdjax.sim.roofline import Roofline
from pdjax.sim.silicon import Silicon

# Names of configs/hardware.py that aiconfigurator-core has by another.
SYSTEMS = {
  "a100": "a100_sxm",
  "a100-vllm": "a100_sxm",
  "h100": "h100_sxm",
  "h200": "h200_sxm",
  "b200": "b200_sxm",
  "rtx-pro-6000": "rtx_pro_6000_server",
}

Make = Callable[[ModelConfig, Device, int, int, Link], LatencyModel]
"""Of a model on a pool: its devices, how many in a stage, how many stages, what joins those of one.

Raises:
  ValueError: nothing is known of this model on these devices.
"""


def roofline(
  model: ModelConfig,
  device: Device,
  tp: int,
  pp: int,
  link: Link | None,
  *,
  one_kernel: bool = False,
) -> Roofline:
  """Each operator by a smooth roofline, as the hardware's entry is fitted."""
  width = device.bytes_per_value
  return Roofline(
    model=model,
    device=device,
    tp=tp,
    link=link,
    one_kernel=one_kernel,
    bytes_per_weight=width,
    bytes_per_kv=width,
    bytes_per_activation=width,
  )


def silicon(
  model: ModelConfig, device: Device, tp: int, pp: int, link: Link, *, backend: str
) -> Silicon:
  """Operators as measured under an engine (aiconfigurator-core)."""
  system = SYSTEMS.get(device.name, device.name)
  fit = device.fit
  return Silicon(
    model=model,
    system=system,
    backend=backend,
    tp=tp,
    link=link,
    host_s=fit.host_s if fit else 0.0,
    host_row_s=fit.host_row_s if fit else 0.0,
  )


def distserve(
  model: ModelConfig,
  device: Device,
  tp: int,
  pp: int,
  link: Link,
  *,
  system: str = "distserve",
  shipped: bool = True,
  is_synthetic: bool = False,
) -> DistServeForm:
  """DistServe's linear form of OPT-13B and 66B on A100, or made from the latter's for another."""
  _check_a100(device, "DistServe's coefficients are")
  if is_synthetic:
    like = MODELS["opt-66b"]
    fit = scaled_fit(distserve_fit(system, like.name, tp), model, like)
  else:
    fit = distserve_fit(system, model.name, tp, shipped=shipped)
  return DistServeForm(
    fit=fit, pp=pp, pads_prompts=pads_prompts(system, shipped=shipped), **SIMDISTSERVE
  )


def niyama(model: ModelConfig, device: Device, tp: int, pp: int, link: Link) -> LatencyModel:
  """Niyama's linear form of Llama-3-8B on an A100."""
  _check_a100(device, "Niyama's coefficients are")
  if (model.name, tp, pp) != ("llama3-8b", 1, 1):
    raise ValueError(
      f"latency=niyama is of llama3-8b on one device, not of {model.name} with tp={tp}, pp={pp}"
    )
  return NIYAMA


def _check_a100(device: Device, what: str) -> None:
  if not device.name.startswith("a100"):
    raise ValueError(f"{what} of an A100, not of hardware={device.name}")


LATENCY: dict[str, Make] = {
  "roofline": roofline,
  "one_kernel": functools.partial(roofline, one_kernel=True),
  **{
    f"silicon_{name}": functools.partial(silicon, backend=name)
    for name in ("vllm", "trtllm", "sglang")
  },
  "distserve": distserve,
  "distserve_vllm": functools.partial(distserve, system="vllm"),
  "distserve_profiled": functools.partial(distserve, shipped=False),
  "distserve_vllm_profiled": functools.partial(distserve, system="vllm", shipped=False),
  "distserve_synthetic": functools.partial(distserve, is_synthetic=True),
  "distserve_vllm_synthetic": functools.partial(distserve, system="vllm", is_synthetic=True),
  "niyama": niyama,
}
