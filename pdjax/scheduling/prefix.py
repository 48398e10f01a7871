"""Keys of whole pages, chained: equal keys mean equal tokens from the first position on.

The hash chain of vLLM's and Mooncake's prefix caches (FAST'25, section 4.1): the key of a page is a
digest of the key before it and of the page's own tokens.
"""

from __future__ import annotations

import hashlib
from array import array

from pdjax.core.sequence import Sequence

_KEY_BYTES = 16  # 128 bits: a chance meeting of two prefixes is out of the question


def extend_keys(seq: Sequence, num_tokens: int, page_size: int) -> None:
  """Appends to `seq.page_keys` those of its whole pages within the first `num_tokens`.

  Where only lengths are known there are none.
  """
  keys = seq.page_keys
  for i in range(len(keys), num_tokens // page_size):
    ids = seq.known_ids(i * page_size, (i + 1) * page_size)
    if ids is None:
      return
    content = (keys[-1] if keys else b"") + array("q", ids).tobytes()
    keys.append(hashlib.blake2b(content, digest_size=_KEY_BYTES).digest())
