"""Latency targets by name, as published. `--slo` of `experiments.search` takes them.

distserve-*  DistServe, OSDI'24, table 1: TTFT and TPOT that 90 or 99 % of the requests meet.
sarathi-*    Sarathi-Serve, OSDI'24, table 3: P99 of the time between tokens, five (strict) and 25
             (relaxed) decode steps of 32 rows at 4,096 tokens on the devices of its table 1. The
             paper has no TTFT target; that of the experiment stays.
"""

from __future__ import annotations

from pdjax.config import SloConfig

SLOS: dict[str, SloConfig] = {
  "distserve-chatbot-13b": SloConfig(ttft_s=0.25, tpot_s=0.1),
  "distserve-chatbot-66b": SloConfig(ttft_s=2.5, tpot_s=0.15),
  "distserve-chatbot-175b": SloConfig(ttft_s=4.0, tpot_s=0.2),
  "distserve-code-66b": SloConfig(ttft_s=0.125, tpot_s=0.2),
  "distserve-summarization-66b": SloConfig(ttft_s=15.0, tpot_s=0.15),
  "sarathi-mistral-7b-strict": SloConfig(tpot_s=0.1),
  "sarathi-mistral-7b-relaxed": SloConfig(tpot_s=0.5),
  "sarathi-yi-34b-strict": SloConfig(tpot_s=0.2),
  "sarathi-yi-34b-relaxed": SloConfig(tpot_s=1.0),
  "sarathi-llama2-70b-strict": SloConfig(tpot_s=1.0),
  "sarathi-llama2-70b-relaxed": SloConfig(tpot_s=5.0),
  "sarathi-falcon-180b-strict": SloConfig(tpot_s=1.0),
  "sarathi-falcon-180b-relaxed": SloConfig(tpot_s=5.0),
}
