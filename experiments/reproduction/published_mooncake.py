"""What Mooncake published, of the numbers that are drawn or compared here.

F is the paper (FAST'25), T its technical report (arXiv 2407.00079). T's recorded trace (23,608
requests, 7,590 prompt tokens on average) is not at hand; of F's the conversation and the synthetic
trace are (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0).
"""

from __future__ import annotations

# F, Figure 5: mean TTFT in seconds by scheduler, conversation trace.
FIG5_TTFT_S = {"global cache": 3.07, "local cache": 3.58, "load": 5.27, "random": 19.65}

# T, Figure 8: the same with 8 prefill and 8 decode nodes, its own trace.
TR_FIG8_TTFT_S = {"global cache": 6.26, "local cache": 14.36, "load": 60.41, "random": 92.07}
TR_TOKENS_PER_S = 23_608 * 7590 / 3600  # of prompts, in that trace of an hour

# F, Figure 9: the share of the highest hit rate that a node's 3M tokens reach; which trace is which
# was inferred from their order by the reference.
FIG9_SHARE = {"conversation": 0.41, "synthetic": 0.46}
NODE_TOKENS = 3_000_000
# F, Table 2 (the README of the traces has it): cache ratio of each trace, no limit.
CACHE_RATIO = {"conversation": 0.40, "synthetic": 0.66}

# T, Table 1: hit rates of blocks of 512 tokens by eviction rule and capacity in blocks (None: all).
TABLE1_BLOCKS = (None, 100_000, 50_000, 30_000, 10_000, 1000)
TABLE1 = {
  "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
  "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
  "length": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}

# F, Figure 13: in words.
FIG13_KNEE_GBPS = 100
FIG13_TTFT_S = 2.0  # below this from there on

# T, section 7: rejected of 23,000 requests at twice the speed, 8 prefill and 8 decode nodes.
TR_REJECTED = {"after_prefill": 4183, "early": 3771, "predicted": 3589}
TR_NUM_REQUESTS = 23_000

# T, Figure 13: share of requests within the TBT target, 10 + 10 nodes against 20 of vLLM.
TR_FIG13_TBT_SHARE = {"Mooncake": 1.0, "vLLM": 0.57}
TR_FIG13_GAIN_PERCENT = 75

# T, Figure 12: more requests than vLLM within targets, the least and the most of its points.
TR_FIG12_GAIN_PERCENT = (50, 525)
