"""Numbers of Sarathi-Serve (OSDI'24, arXiv 2403.02310), its artifact, SARATHI (2023), and of Vidur.

Where a comment says "read" they were read off plots by eye, good to 10 or 20 %. The others are
printed in the text, a table or on a bar, or stand in files that were published with the artifact
(github.com/microsoft/sarathi-serve, Apache-2.0) or with Vidur (github.com/microsoft/vidur, MIT).
"""

from __future__ import annotations

# Figure 1b, read: P99 of the gaps (s) of Yi-34B by requests a second; and as the artifact's authors
# measured it again, whose numbers are exact.
FIG1B_READ = {"vLLM": {0.55: 0.5, 1.0: 1.35}, "Sarathi": {0.55: 0.3, 1.0: 0.3}}
FIG1B_ARTIFACT = {"vLLM": {0.55: 1.39, 1.0: 2.05}, "Sarathi": {0.55: 0.52, 1.0: 0.54}}
# Figure 1a as the artifact draws it, read: seconds to the last token, and to vLLM's first.
FIG1A_MAKESPAN_S = {"vLLM": 565.0, "Sarathi": 505.0}
FIG1A_FIRST_TOKEN_S = 66.0

# Figure 3, read: tokens a second of Mistral-7B at a prompt of 1,024, by batch.
FIG3_PREFILL = {1: 4500.0, 8: 5500.0}
FIG3_DECODE = {1: 20.0, 64: 820.0}

# Figure 4, read: milliseconds of a step of Mistral-7B.
FIG4_PREFILL_MS = {128: 32.0, 2048: 145.0}
FIG4_DECODE_MS = {1: 15.0, 64: 22.0}
FIG4_LINEAR_MS = {"1 decode": 13.0, "128 prompt tokens": 17.0}
FIG4_LINEAR_SHARE = 0.8  # at least, section 3.1

# Figure 5, read: (tokens, FLOP/byte) of LLaMA2-70B's linear operators over four A100s.
FIG5_MARKS = {"decode": (30, 50.0), "Sarathi": (600, 500.0), "prefill": (1000, 800.0)}

# Figure 6, read: milliseconds of LLaMA2-70B's linear operators on A100s, by tokens.
FIG6_READ_MS = {
  2: {128: 60.0, 2048: 450.0, 4096: 1000.0},
  4: {128: 30.0, 2048: 300.0, 4096: 520.0},
}
# The same as measured: sums of the medians of the four products in Vidur's
# mlp file of meta-llama/Llama-2-70b-hf on the A100, times 80 layers.
FIG6_VIDUR_MS = {
  2: {1: 42.3, 32: 45.7, 64: 47.4, 128: 58.7, 256: 84.6, 264: 117.0, 512: 161.3, 1024: 330.8,
      2048: 601.8, 4096: 1175.2},
  4: {1: 22.7, 32: 24.1, 64: 24.6, 128: 30.6, 256: 47.0, 264: 56.9, 512: 83.0, 1024: 169.2,
      2048: 304.0, 4096: 581.0},
}  # fmt: skip
TILE_JUMP = 1.32  # section 4.3: time at 257 tokens over that at 256

# Figure 9: a step with a whole prompt over decodes alone, at most (printed); with a chunk (read).
FIG9_MOST_PROMPT, FIG9_MOST_CHUNK = 28.3, 3.7

# Figures 10 and 11: capacity over Orca's, on the bars: ShareGPT strict, relaxed; arXiv strict,
# relaxed. That these labels mean this is inferred: it agrees with all that the text says.
OVER_ORCA = {
  "Mistral-7B": (2.78, 2.15, 1.82, 1.97),
  "Yi-34B": (4.00, 2.44, 1.69, 1.94),
  "LLaMA2-70B": (5.54, 6.31, 4.60, 3.00),
  "Falcon-180B": (4.69, 5.62, 4.20, 2.75),
}
# The text's: capacity over vLLM's; Falcon's relaxed one is 1.48.
OVER_VLLM = {"Mistral-7B": 2.6, "Yi-34B": 3.7, "LLaMA2-70B": 4.3, "Falcon-180B": 3.6}
OVER_VLLM_FALCON_RELAXED = 1.48
# Read: Sarathi's requests a second on ShareGPT, strict and relaxed.
SARATHI_RPS = {
  "Mistral-7B": (2.05, 2.25),
  "Yi-34B": (1.14, 1.28),
  "LLaMA2-70B": (None, 0.83),
  "Falcon-180B": (0.62, 0.75),
}

# Figure 12, read: capacity at the strictest and the loosest SLO drawn; printed: the two ratios.
FIG12_READ = {
  ("Mistral-7B", "Sarathi 512"): (2.0, 2.3),
  ("Mistral-7B", "Sarathi 2048"): (0.5, None),
  ("Mistral-7B", "vLLM 128"): (0.78, 1.57),
  ("Yi-34B", "Sarathi 512"): (1.14, 1.28),
  ("Yi-34B", "Sarathi 2048"): (0.2, None),
  ("Yi-34B", "vLLM 128"): (0.33, 0.78),
}
FIG12_STRICT_RATIO, FIG12_RELAXED_RATIO = 3.5, 1.65

# Figure 13a, read: median gap (s) at 8 and 128 decodes. 13b, read: capacity, strict and relaxed.
FIG13A_READ = {"TP8": {8: 0.19, 128: 0.37}, "TP4-PP2": {8: 0.085, 128: 0.15}}
FIG13B_READ = {
  "vLLM TP8": (0.14, 0.15),
  "vLLM TP4-PP2": (0.18, 0.50),
  "Sarathi TP4-PP2": (0.62, 0.75),
}
FIG13_RATIOS = (4.3, 3.6)  # strict: Sarathi over vLLM TP8, over vLLM TP4-PP2
FALCON_PROMPT_S, FALCON_DECODE_S = 1.15, 0.2  # section 3.3: a prompt of 4k, a decode step of 32

# Figure 14 as the artifact measured it: prefill time over that without chunks. Prompts of one token
# less than these.
FIG14_PROMPTS = (2048, 4096, 8192, 16_384)
FIG14_OVERHEAD = {
  512: (1.152, 1.189, 1.117, 0.995),
  1024: (1.175, 1.202, 1.109, 0.961),
  2048: (0.999, 1.024, 0.937, 0.805),
}

# The artifact's Yi-34B over two A100s, ms: prompts by tokens; decodes of about 1,020 tokens by
# batch. The prompt of 256 tokens (121.4) came first in its run and is left out.
YI_PREFILL_MS = {128: 48.1, 512: 105.6, 1024: 214.3, 2048: 366.0, 4096: 757.6, 8192: 1863.0,
                 16_384: 4408.0}  # fmt: skip
YI_DECODE_MS = {1: 46.8, 2: 47.5, 4: 48.8, 8: 69.7, 16: 77.3, 32: 87.9, 64: 127.8, 128: 189.3}
YI_PIGGYBACK_MS = {"1,024 prompt tokens": 217.2, "4 decodes": 68.1, "1,021 and 3 decodes": 217.6}
# Vidur's host timings of CodeLlama-34B over two A100s: talk between workers over Ray, a step.
RAY_MS = 6.3

# Table 2: prompt median, P90, standard deviation; output the same. The last column has 101 for
# ShareGPT and 265 for arXiv; ShareGPT's file has 265.6, so the two are taken to be swapped.
TABLE2 = {
  "sharegpt": ((1730, 5696, 2088), (415, 834, 265)),
  "arxiv": ((7059, 12_985, 3638), (208, 371, 101)),
}

# Table 4: (TTFT p50, P99 of the gaps) in seconds: ShareGPT, arXiv.
TABLE4 = {
  "hybrid_only": ((0.53, 0.68), (3.78, 1.38)),
  "simple_chunking": ((1.04, 0.17), (5.38, 0.20)),
  "chunked": ((0.76, 0.14), (3.90, 0.17)),
}

# SARATHI 2023: most that chunks of a size cost a prefill. Gains of chunks of 256 over prompts and
# decodes apart, LLaMA-13B on an A6000, requests of 1,024 tokens, by sequences a step: at a P:D of
# 14 (section 5.1.3) and of 50 (Table 4). Orca's at its best over the same, with 18 (section 5.2).
CHUNK_LOSS_2023 = {256: 0.20, 512: 0.10}
GAIN_2023 = {18: 1.27, 6: 1.33}
ORCA_GAIN_2023 = 1.11
