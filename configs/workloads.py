"""Workloads by name: drawn from published figures, for where their traces are not. `--workload`.

None is a recording: prompt and output are drawn independently, arrivals from a process, and nothing
is known of shared prefixes. With the file there is `--trace`. Lengths are tokens of each source's
own tokenizer. `experiments.run --list` shows them.

What the points are, and how far the means of many draws are from the published ones:

  sharegpt      Sarathi-Serve's lengths of openchat_sharegpt4 (file of its branch niyama_asplos2026,
                30,731 rows), nine quantiles: prompt -1 %, output -2 %. Together at most 8,192.
  arxiv         Sarathi-Serve, OSDI'24, table 2: medians and 90th percentiles. The ends are chosen
                to give its standard deviations, 3,638 and 101 (the table has the second under
                ShareGPT). Together at most 16,384.
  azure-conv    Azure's LLM inference trace 2023 (CC-BY-4.0), conversation, 19,366 rows, nine
                quantiles of the file: prompt 0 %, output +1 %. Gaps nearly Poisson.
  azure-code    its code trace, 8,819 rows: median, p90, p99 and longest, and a shortest prompt that
                gives the mean; output +20 % (what lies between p99 and the longest is rare). Whole
                minutes without a request, then 67 in a second: gaps with a cv of 13. A few hundred
                requests are a burst or two, whatever rate was asked for.
  mooncake-conversation
                Mooncake's FAST'25 conversation trace (Apache-2.0), 12,031 rows, nine quantiles of
                the file: prompt +6 %, output 0 %. Arrivals are taken as Poisson: the trace has
                them in ticks of 3 s.
  humaneval     DistServe, OSDI'24, figure 7: quantiles of its histograms, whose bins are 51 tokens
                wide: prompt +1 %, output +4 %. Together at most the 2,048 of OPT.
  longbench     outputs by the edges of the bins of the same figure, with a shortest of two tokens
                (one and that before all texts) and in the first bin, where four fifths are, six in
                the middle: 12 on average, as the published mean asks for (0 to 51 alike would be
                26); output 0 %. Prompts as DistServe's script makes them (0-prepare-dataset.py): a
                uniform number of the context's tokens, cut where it and the answer would be more
                than 2,040; its bounds are those that the figure shows, not the script's defaults:
                prompt +1 %.
"""

from __future__ import annotations

from pdjax.workloads.lengths import Quantiles
from pdjax.workloads.synthetic import Synthetic

_SARATHI_SHARES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_TRACE_SHARES = (0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
_CODE_SHARES = (0, 0.5, 0.9, 0.99, 1)
_ARXIV_SHARES = (0, 0.5, 0.9, 1)
_HISTOGRAM_SHARES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)


def _points(shares: tuple[float, ...], *lengths: int) -> tuple[tuple[float, int], ...]:
  return tuple(zip(shares, lengths, strict=True))


_ALL = (
  Synthetic(
    name="sharegpt",
    source="Sarathi-Serve's ShareGPT lengths",
    lengths=Quantiles(
      prompt_tokens=_points(_SARATHI_SHARES, 1, 74, 580, 1730, 3734, 5696, 6563, 7434, 8141),
      output_tokens=_points(_SARATHI_SHARES, 2, 84, 228, 415, 628, 834, 920, 998, 1024),
      max_total_tokens=8192,
    ),
  ),
  Synthetic(
    name="arxiv",
    source="arXiv summarization in Sarathi-Serve's table 2",
    lengths=Quantiles(
      prompt_tokens=_points(_ARXIV_SHARES, 2500, 7059, 12_985, 16_000),
      output_tokens=_points(_ARXIV_SHARES, 80, 208, 371, 450),
      max_total_tokens=16_384,
    ),
  ),
  Synthetic(
    name="azure-conv",
    source="Azure's 2023 conversation trace",
    lengths=Quantiles(
      prompt_tokens=_points(_TRACE_SHARES, 2, 29, 207, 396, 1020, 1189, 2735, 4142, 14_050),
      output_tokens=_points(_TRACE_SHARES, 7, 16, 54, 85, 129, 395, 424, 601, 1000),
    ),
    arrivals="gamma",
    cv=1.09,
  ),
  Synthetic(
    name="azure-code",
    source="Azure's 2023 code trace",
    lengths=Quantiles(
      prompt_tokens=_points(_CODE_SHARES, 71, 1469, 5188, 7436, 7437),
      output_tokens=_points(_CODE_SHARES, 1, 13, 55, 252, 1899),
    ),
    arrivals="gamma",
    cv=13.15,
  ),
  Synthetic(
    name="mooncake-conversation",
    source="Mooncake's conversation trace",
    lengths=Quantiles(
      prompt_tokens=_points(
        _TRACE_SHARES, 891, 894, 964, 2307, 6909, 15_367, 27_367, 85_400, 126_195
      ),
      output_tokens=_points(_TRACE_SHARES, 1, 3, 24, 157, 350, 472, 597, 1119, 2000),
    ),
  ),
  Synthetic(
    name="humaneval",
    source="HumanEval in DistServe's figure 7",
    lengths=Quantiles(
      prompt_tokens=_points(_HISTOGRAM_SHARES, 51, 82, 114, 148, 201, 288, 495, 665),
      output_tokens=_points(_HISTOGRAM_SHARES, 1, 15, 37, 80, 138, 200, 444, 563),
      max_total_tokens=2048,
    ),
  ),
  Synthetic(
    name="longbench",
    source="LongBench in DistServe's figure 7",
    lengths=Quantiles(
      prompt_tokens=((0, 1536), (1, 2048)),
      output_tokens=_points(
        (0, 0.4, 0.7995, 0.8335, 0.858, 0.883, 0.915, 0.935, 0.942, 0.9675, 0.981, 0.9965, 1),
        *(2, 6, 51, 102, 205, 307, 409, 563, 614, 716, 768, 870, 1228),
      ),
      max_total_tokens=2040,
      cuts_prompts=True,
    ),
  ),
)

WORKLOADS: dict[str, Synthetic] = {workload.name: workload for workload in _ALL}
