"""Policies by name. A new one is a new file here and a line below."""

from pdjax.scheduling.policies.decode_only import decode_only
from pdjax.scheduling.policies.prefill_first import prefill_first
from pdjax.scheduling.policies.prefill_only import prefill_only
from pdjax.scheduling.policies.sarathi import sarathi
from pdjax.scheduling.scheduler import Policy

# Their steps are all prefill or all decode, so their pools need no shapes of mixed steps.
UNMIXED = frozenset({"decode_only", "prefill_first", "prefill_only"})
# They leave half of a request to another pool.
HALF = frozenset({"decode_only", "prefill_only"})

POLICIES: dict[str, Policy] = {
  policy.__name__: policy for policy in (decode_only, prefill_first, prefill_only, sarathi)
}
