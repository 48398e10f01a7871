"""Published coefficients of linear latency models (`pdjax/sim/linear.py`), as facts with source.

DistServe (github LLMServe/DistServe, Apache-2.0, 82831f1, simdistserve/estimators/profile_data):
profiled on an A100-80G with its own engine and with vLLM 0.2.3, fitted by its authors to relative
errors. What they ship are not the fits themselves: prompts were multiplied by 1.1 (DistServe) and
1.4 (vLLM), decodes of vLLM by 1.2, to match runs that were served (their commit 4c68ed9, "Realign
the curve"), in their simulator: so they hold with its assumptions (`pads_prompts`).
`distserve_fit` divides that out again where `shipped` is False. Not for OPT-66B on 8
devices: DistServe's row there was taken over from vLLM's profile, and vLLM's is no multiple of it.
Those of OPT-175B were withdrawn within hours; `scaled_fit` makes synthetic ones.

Niyama (github microsoft/sarathi-serve, branch niyama_asplos2026, 72339db,
sarathi/core/scheduler/deadline_scheduler.py): Llama-3-8B; the training script names its data A100.
"""

from __future__ import annotations

from operator import mul

from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.sim.linear import DistServeFit, NiyamaFit, NiyamaForm

# System, model, devices of a stage -> (a, b, c) of prompts, of fewer than 95 decodes, of more;
# ms.
_SHIPPED_MS: dict[tuple[str, str, int], tuple[tuple[float, float, float], ...]] = {
  ("distserve", "opt-13b", 1): (
    (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
    (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
    (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
  ),
  ("distserve", "opt-13b", 2): (
    (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
    (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
    (10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
  ),
  ("distserve", "opt-13b", 4): (
    (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
    (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
    (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
  ),
  ("distserve", "opt-66b", 2): (
    (43.05881348288936, 0.2742292870458432, 2.2478042467169447e-05),
    (48.288015489286245, 0.0009424343535737985, 0.12755020094383188),
    (28.727693993711597, 0.00047448475459061987, 0.29617792360743994),
  ),
  ("distserve", "opt-66b", 3): (
    (32.998230028437035, 0.19568256864690514, 1.2205248980953765e-05),
    (35.8015439512012, 0.0005845004786127403, 0.0952669764890301),
    (22.653861586978355, 0.0005358489190129727, 0.208514444037787),
  ),
  ("distserve", "opt-66b", 4): (
    (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
    (30.760284619429587, 0.000451947603788462, 0.063284195750671),
    (27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
  ),
  ("distserve", "opt-66b", 8): (
    (25.490662375045222, 0.10659177664763161, 3.3910502518615973e-06),
    (23.15511135047022, 0.00022691488497826264, 0.04800638397272423),
    (21.71772781576609, 0.0003758089655762475, 0.08978614175851013),
  ),
  ("vllm", "opt-13b", 1): (
    (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
    (23.475041008414784, 0.000592934466077393, 0.060726861260369455),
    (20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
  ),
  ("vllm", "opt-13b", 2): (
    (27.440806247810684, 0.0905453268062731, 8.452054313246025e-06),
    (24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
    (17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
  ),
  ("vllm", "opt-13b", 4): (
    (30.536322590049405, 0.05150644936810146, 4.232473132942393e-07),
    (25.90114444283343, 7.753634454230709e-05, 0.05528087160867803),
    (23.88388468859458, 0.00028400164093310935, 0.06276523831046728),
  ),
  ("vllm", "opt-66b", 2): (
    (58.3822026348141, 0.3826408030281867, -7.1141486747694485e-06),
    (57.07344137197128, 0.0036461138777547255, 0.2249373634499222),
    (26.983759428854572, 0.006200132376379982, 0.4482569479277445),
  ),
  ("vllm", "opt-66b", 3): (
    (45.74453423698261, 0.2778127747865773, 3.64624693008797e-05),
    (44.93958620555262, 0.0008096152552620141, 0.21287979591036174),
    (43.69602916834496, 0.0008402567346080152, 0.24006467608312998),
  ),
  ("vllm", "opt-66b", 4): (
    (42.965489361973944, 0.2128658422785494, 4.601017396226869e-05),
    (39.58178936012414, 0.0006945721692406896, 0.13580868185596764),
    (40.859718006896806, 0.0004264871259058686, 0.19508372547790553),
  ),
  ("vllm", "opt-66b", 8): (
    (38.931193445523604, 0.1573682229779579, 4.531676245669589e-06),
    (31.176041922273107, 0.00027556543631760213, 0.0679770397053775),
    (29.087774405517447, 0.0006027720257746419, 0.1389608688300688),
  ),
}
_SHIPPED_FACTORS = {"distserve": (1.1, 1.0), "vllm": (1.4, 1.2)}  # of prompts, of decodes
_UNSCALED = 8  # devices of a stage: see above

# What simdistserve adds to both systems' steps (same commit): 1 ms to prompts for each stage, and
# for Ray 2 ms and 0.1 us for each token of a prompt or cached before a decode.
SIMDISTSERVE = {"stage_s": 1e-3, "host_s": 2e-3, "host_token_s": 1e-7}


def distserve_fit(system: str, model: str, tp: int, *, shipped: bool = True) -> DistServeFit:
  """The coefficients of a system ("distserve", "vllm") as shipped, or as fitted before that.

  Raises:
    ValueError: nobody published them, with near matches.
  """
  names = {f"{s} {m} tp={n}": key for key in _SHIPPED_MS for s, m, n in (key,)}
  prefill, few, many = _SHIPPED_MS[pick(names, f"{system} {model} tp={tp}", "linear model")]
  by_prefill = by_decode = 1.0
  if not shipped:
    if tp == _UNSCALED:
      raise ValueError(f"{system} {model} tp={tp}: what it was fitted to is not published")
    by_prefill, by_decode = _SHIPPED_FACTORS[system]
  return DistServeFit(
    prefill_s=tuple(1e-3 / by_prefill * x for x in prefill),
    few_decodes_s=tuple(1e-3 / by_decode * x for x in few),
    many_decodes_s=tuple(1e-3 / by_decode * x for x in many),
  )


def pads_prompts(system: str, *, shipped: bool = True) -> bool:
  """Whether steps by these coefficients are computed with all prompts as long as the longest.

  vLLM 0.2.3 does so, and what was profiled, prompts of one length, does not tell. In the simulator
  that the shipped factors were chosen in a step costs the sum of its prompts' tokens and of their
  squares (simdistserve/estimators/time_estimator.py), so what padding cost those runs is in the
  factors already. DistServe's engine packs prompts.
  """
  return system == "vllm" and not shipped


def scaled_fit(fit: DistServeFit, model: ModelConfig, like: ModelConfig) -> DistServeFit:
  """The coefficients of `model` where only those of `like` are known, on as many devices.

  SYNTHETIC. Devices are taken to multiply and to read as fast for one as for the other. Constants
  are weights that are read and what a token adds is a product with them, so both grow with the
  matrices; the squares of lengths and the contexts of decodes grow with the attention of all
  layers. From OPT-13B to 66B the same devices multiply 1.3 times and read 1.4 to 1.7 times as fast:
  what is made so for a larger model may well be too slow.
  """
  weights = model.num_layers * (model.attention_params + model.mlp_params)
  weights /= like.num_layers * (like.attention_params + like.mlp_params)
  attention = model.kv_bytes_per_token() / like.kv_bytes_per_token()
  by_prefill, by_decode = (weights, weights, attention), (weights, attention, weights)
  return DistServeFit(
    prefill_s=tuple(map(mul, fit.prefill_s, by_prefill)),
    few_decodes_s=tuple(map(mul, fit.few_decodes_s, by_decode)),
    many_decodes_s=tuple(map(mul, fit.many_decodes_s, by_decode)),
    many_decodes=fit.many_decodes,
  )


NIYAMA = NiyamaForm(
  few=NiyamaFit(
    base_s=0.014936,
    token_s=5.882475e-05,
    prefill_token_s=2.247956e-05,
    decode_token_s=3.634519e-05,
    decode_key_s=1.111258e-07,
    prefill_key_s=7.554773e-07,
  ),
  many=NiyamaFit(
    base_s=0.005004,
    token_s=2.719050e-05,
    prefill_token_s=6.863043e-05,
    decode_token_s=-4.143993e-05,
    decode_key_s=1.663409e-07,
    prefill_key_s=2.727223e-06,
  ),
)
