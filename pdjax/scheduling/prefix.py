"""Keys of whole pages, chained: equal keys mean equal tokens from the first position on.

The hash chain of vLLM's and Mooncake's prefix caches (FAST'25, section 4.1): the key of a page is a
digest of the key before it and of the page's own tokens.
"""

from __future__ import annotations

import hashlib
from array import array

from pdjax.core.request import Request
from pdjax.core.sequence import Sequence

_KEY_BYTES = 16  # 128 bits: a chance meeting of two prefixes is out of the question


def extend_keys(seq: Sequence, num_tokens: int, page_size: int) -> None:
  """Appends to `seq.page_keys` those of its whole pages within the first `num_tokens`.

  Where token ids are not known, the prompt's `prefix_hashes` stand for them; where those are not
  known either there are no keys.
  """
  keys, request = seq.page_keys, seq.request
  for i in range(len(keys), num_tokens // page_size):
    start, end = i * page_size, (i + 1) * page_size
    content = seq.known_ids(start, end)
    if content is None:
      if request.prefix_hashes is None or end > request.num_prompt_tokens:
        return
      content = _blocks(request, start, end)
    digest = hashlib.blake2b(keys[-1] if keys else b"", digest_size=_KEY_BYTES)
    digest.update(array("q", content).tobytes())
    keys.append(digest.digest())


def _blocks(request: Request, start: int, end: int) -> list[int]:
  """The pieces of blocks that make up positions [start, end): hash, offset, tokens of each."""
  pieces, size = [], request.prefix_block_tokens
  while start < end:
    block, offset = divmod(start, size)
    num_tokens = min(end - start, size - offset)
    pieces += [request.prefix_hashes[block], offset, num_tokens]
    start += num_tokens
  return pieces
