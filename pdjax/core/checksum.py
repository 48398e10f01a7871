"""The checksum model: a stand-in for a transformer whose every token can be computed by hand.

K of a token is its id plus one, V that times an odd constant; attention is an integer sum over the
positions up to the query's, each weighted by its position; the next token is a hash of the sum. So
the next token depends on every cached token *and its place*: one wrong page gives a wrong token.
It has no weights. `pdjax.models.checksum` runs it through the real engine, `pdjax.sim` in virtual
time; this file says what both must give.
"""

from __future__ import annotations

from collections.abc import Sequence

VOCAB_SIZE = 997
V_FACTOR = 2654435761  # odd, so V of different ids differ modulo 2**32
_MASK = 0xFFFFFFFF


def key(token_id: int) -> int:
  return token_id + 1


def value(token_id: int) -> int:
  return (token_id + 1) * V_FACTOR & _MASK


def attend(keys: Sequence[int], values: Sequence[int]) -> int:
  """The sum over cached positions 0, 1, ... modulo 2**32."""
  total = 0
  for j, (k, v) in enumerate(zip(keys, values, strict=True)):
    total += k * (2 * j + 1) + v * (2 * j + 3)
  return total & _MASK


def next_token(total: int) -> int:
  """Hashes an attention sum to a token id (the 32-bit mixer `lowbias32`)."""
  total ^= total >> 16
  total = total * 0x7FEB352D & _MASK
  total ^= total >> 15
  total = total * 0x846CA68B & _MASK
  total ^= total >> 16
  return total % VOCAB_SIZE


def generate(prompt_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
  """The tokens that any correct engine gives after `prompt_ids`."""
  ids = list(prompt_ids)
  for _ in range(num_tokens):
    ids.append(next_token(attend([key(i) for i in ids], [value(i) for i in ids])))
  return tuple(ids[len(prompt_ids) :])
