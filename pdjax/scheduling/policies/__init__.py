"""Policies by name. A new one is a new file here and a line below."""

from pdjax.scheduling.policies.decode_only import decode_only
from pdjax.scheduling.policies.prefill_first import prefill_first
from pdjax.scheduling.policies.prefill_only import prefill_only
from pdjax.scheduling.policies.sarathi import sarathi
from pdjax.scheduling.scheduler import Policy

POLICIES: dict[str, Policy] = {
  policy.__name__: policy for policy in (decode_only, prefill_first, prefill_only, sarathi)
}
