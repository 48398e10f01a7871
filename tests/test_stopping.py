"""Answers end where their text says, however it is cut into tokens; the ended leave nothing."""

import collections
import dataclasses
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import expected, make_cluster, make_requests, run

from pdjax.config import STRATEGIES
from pdjax.core import checksum
from pdjax.core.plan import TokenLogprobs
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import length_or_stop
from pdjax.serving.inbox import Inbox
from pdjax.stopping import Detokeniser, Stopper, with_eos
from pdjax.tokenizer import ByteTokenizer

pytestmark = pytest.mark.quick
UNFINISHED = "\ufffd"


class Pieces:
  """A tokenizer whose ids are places in a list of strings."""

  def __init__(self, pieces):
    self._pieces, self.vocab_size = list(pieces), len(pieces)

  def decode(self, ids):
    return "".join(self._pieces[i] for i in ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  text: str
  ids: tuple[int, ...]
  reason: str | None
  streamed: tuple[tuple[str, int], ...]


def answer(tokenizer, ids, *, max_tokens=None, **sampling) -> Answer:
  """What a scheduler makes of these tokens: they come one by one until one ends the request."""
  sampling = SamplingParams(max_tokens=max_tokens or len(ids) + 1, **sampling)
  seq = Sequence(Request(request_id=0, arrival_s=0.0, num_prompt_tokens=1, sampling=sampling))
  stopper, streamed, reason = Stopper(tokenizer), [], None
  for i in ids:
    seq.output_ids.append(i)
    seq.output_logprobs.append(TokenLogprobs(logprob=-float(i)))
    reason = stopper(seq)
    if reason is not None:
      seq.cut()
      break
    streamed.append(stopper.settled(seq))
  text, num_tokens = stopper.settled(seq)
  if reason is not None:
    assert num_tokens == len(seq.output_ids), "all is settled once a request has ended"
  for (a, n), (b, m) in zip(streamed, [*streamed[1:], (text, num_tokens)]):
    assert b.startswith(a) and n <= m, "what was told is taken back"
  assert [-p.logprob for p in seq.output_logprobs] == seq.output_ids, "logprobs are cut alike"
  return Answer(
    text=text, ids=tuple(seq.output_ids), reason=reason, streamed=tuple(map(tuple, streamed))
  )


# Stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("pieces", "stop", "text", "num_kept"),
  [
    (["one", " STOP", "x"], ["STOP"], "one ", 2),  # within a token, which also has text to keep
    (["one", "STOP", "x"], ["STOP"], "one", 1),  # one whole token
    (["one", "ST", "O", "P", "x"], ["STOP"], "one", 1),  # several whole tokens
    (["one S", "TO", "P two", "x"], ["STOP"], "one ", 1),  # begins and ends in the middle
    (["STOP", "x"], ["STOP"], "", 0),  # the first token
    (["a STOP", "x"], ["STOP"], "a ", 1),
    (["xa", "b", "c", "x"], ["abc", "ab"], "x", 1),  # the shorter is complete first
    (["xabc", "x"], ["abc", "ab"], "x", 1),
    (["xabcd", "x"], ["c", "abcd"], "xab", 1),  # likewise within a token
    (["xa", "bc", "x"], ["bc", "abc", "c"], "x", 1),  # of those that end together the longest
    (["aab", "x"], ["ab"], "a", 1),
    (["a", "a", "b", "x"], ["ab"], "a", 1),
    (["", "x", "", "y", "z"], ["y"], "x", 2),  # a token without text right before the cut
  ],
)
def test_text_ids_and_logprobs_are_cut_at_the_stop_string(pieces, stop, text, num_kept):
  ids = range(len(pieces))
  got = answer(Pieces(pieces), ids, stop=tuple(stop))
  assert (got.text, got.ids, got.reason) == (text, tuple(ids[:num_kept]), "stop")
  # It wins over length at the same token, and one token less is too few for it.
  num_read = next(n for n in ids if any(s in "".join(pieces[: n + 1]) for s in stop)) + 1
  at_length = answer(Pieces(pieces), ids, stop=tuple(stop), max_tokens=num_read)
  assert dataclasses.replace(got, streamed=()) == dataclasses.replace(at_length, streamed=())
  if num_read > 1:
    short = answer(Pieces(pieces), ids, stop=tuple(stop), max_tokens=num_read - 1)
    assert short.reason == "length" and short.text == "".join(pieces[: num_read - 1])


def test_text_that_may_begin_a_stop_string_is_held_back_while_streaming():
  got = answer(Pieces(["on", "e S", "TO", "R", "e ST", "OP"]), range(6), stop=("STOP", "nope"))
  told = [("o", 1), ("one ", 2), ("one ", 2), ("one STOR", 4), ("one STORe ", 5)]
  assert list(got.streamed) == told
  assert (got.text, got.ids) == ("one STORe ", (0, 1, 2, 3, 4))
  got = answer(Pieces(["on", "e S"]), range(2), max_tokens=2, stop=("STOP",))
  assert (got.text, got.reason) == ("one S", "length"), "what was held back is told at the end"


def cut_letter_by_letter(text, stop, first):
  """Where `text` is cut when its letters come one by one; `first` is where a stop may begin."""
  for end in range(1, len(text) + 1):
    begins = [end - len(s) for s in stop if text[:end].endswith(s) and end - len(s) >= first]
    if begins:
      return min(begins), end
  return None


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
  st.lists(st.text("abc", max_size=3), min_size=1, max_size=12),
  st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
  st.integers(0, 6),
  st.integers(1, 14),
)
def test_the_cut_is_that_of_the_text_letter_by_letter(pieces, stop, min_tokens, max_tokens):
  """So it does not depend on token borders. At least `min_tokens` tokens are kept."""
  min_tokens = min(min_tokens, max_tokens)
  got = answer(Pieces(pieces), range(len(pieces)), stop=tuple(stop), min_tokens=min_tokens,
               max_tokens=max_tokens)  # fmt: skip
  pieces = pieces[:max_tokens]
  begins = [len("".join(pieces[:i])) for i in range(len(pieces))]
  cut = None
  if min_tokens <= len(pieces):
    first = begins[min_tokens - 1] + 1 if min_tokens else 0
    cut = cut_letter_by_letter("".join(pieces), stop, first)
  if cut is None:
    assert got.text == ("".join(pieces) if got.reason else got.text)
    assert got.reason == ("length" if len(pieces) == max_tokens else None)
    return
  begin, end = cut
  assert got.reason == "stop" and got.text == "".join(pieces)[:begin]
  assert got.ids == tuple(i for i in range(len(pieces)) if begins[i] < begin)
  assert len(got.ids) >= min_tokens
  num_read = sum(b < end for b in begins) if end > begins[-1] else None
  assert num_read is None or len(got.streamed) <= num_read


# Stop ids --------------------------------------------------------------------------------------


def test_a_stop_id_is_the_last_token_but_no_text():
  pieces = Pieces(["one", " two", "<end>"])
  got = answer(pieces, [0, 1, 2, 0], stop_ids=(2,))
  assert (got.text, got.ids, got.reason) == ("one two", (0, 1, 2), "stop")
  assert answer(pieces, [2, 0], stop_ids=(2,)).text == "", "the first token counts too"
  assert answer(pieces, [0, 2], stop_ids=(2,), max_tokens=2).reason == "stop", "it wins"
  got = answer(pieces, [0, 2, 0], stop_ids=(2,), stop=("<end>",))
  assert (got.text, got.ids) == ("one", (0, 2)), "its text is no stop string"
  got = answer(pieces, [0, 2, 0], max_tokens=3)
  assert (got.text, got.reason) == ("one<end>one", "length"), "without the id it is text"


def test_no_stop_counts_before_min_tokens_others():
  ids = [5, 7, 7, 5, 7, 5]
  for min_tokens, end in ((0, 2), (1, 2), (2, 3), (3, 5), (4, 5), (5, None)):
    sampling = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop_ids=(7, 2**40))
    seq = Sequence(Request(request_id=0, arrival_s=0.0, num_prompt_tokens=1, sampling=sampling))
    reasons = [seq.output_ids.append(i) or length_or_stop(seq) for i in ids]
    assert reasons.index("stop") + 1 == end if end else not any(reasons)


def test_end_of_text_joins_the_stop_ids_unless_it_is_ignored():
  plain = SamplingParams(max_tokens=4, stop_ids=(3,))
  assert with_eos(plain, (7, 3)) == dataclasses.replace(plain, stop_ids=(3, 7))
  assert with_eos(plain, ()) == with_eos(plain, (3,)) == plain
  deaf = dataclasses.replace(plain, ignore_eos=True)
  assert with_eos(deaf, (7,)) == deaf
  full = SamplingParams(max_tokens=4, min_tokens=1, stop_ids=tuple(range(8)))
  with pytest.raises(ValueError, match="8 stop ids at most, not 9"):
    with_eos(full, (99,))


# Text ------------------------------------------------------------------------------------------


def pieces_of(tokenizer, ids):
  """The text after each token; checks that it only grows."""
  detokeniser, texts = Detokeniser(tokenizer), []
  for end in range(1, len(ids) + 1):
    detokeniser.read(ids, end)
    assert detokeniser.text.startswith(texts[-1] if texts else "")
    texts.append(detokeniser.text)
  return texts


BYTES = ByteTokenizer(300)
TEXT = st.text(st.sampled_from("aé€😀中 \n") | st.characters(codec="utf-8"), max_size=60)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(TEXT)
def test_text_comes_in_whole_characters(text):
  """As soon as their last byte is there; an unfinished one is never shown."""
  ids = BYTES.encode(text)
  texts = pieces_of(BYTES, ids)
  for end, got in enumerate(texts, 1):
    want = bytes(ids[:end]).decode(errors="ignore")
    if UNFINISHED in text:  # waits as if it were unfinished
      assert want.startswith(got)
    else:
      assert got == want


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 260, 999])
                | st.integers(0, 299), max_size=150))  # fmt: skip
def test_bytes_that_are_no_text_are_replaced_as_by_decoding_all_at_once(ids):
  """Only characters that may still become one are left out, at most three. Some ids are unknown."""
  known = [i for i in ids if i < 300]
  whole = BYTES.decode(known)
  for end, got in zip(range(1, len(ids) + 1), pieces_of(BYTES, ids)):
    now = BYTES.decode([i for i in ids[:end] if i < 300])
    assert now.startswith(got) and len(now) - len(got) <= 3 and whole.startswith(got)
    assert set(now[len(got) :]) <= {UNFINISHED}


def test_reading_all_at_once_gives_the_same():
  ids = (*BYTES.encode("naïve €5 😀" * 30), 0xF0, 0x9F)
  detokeniser = Detokeniser(BYTES)
  detokeniser.read(ids, len(ids))
  assert detokeniser.text == pieces_of(BYTES, ids)[-1] == "naïve €5 😀" * 30


def test_a_token_costs_the_same_late_in_a_text_as_early():
  class Counting(ByteTokenizer):
    num_decoded = 0

    def decode(self, ids):
      self.num_decoded += len(ids)
      return super().decode(ids)

  for ids in (BYTES.encode("a é😀" * 200), [0xFF, 0x80] * 800):
    tokenizer = Counting(300)
    pieces_of(tokenizer, ids)
    assert tokenizer.num_decoded < 70 * len(ids)


@pytest.fixture(scope="module")
def tokenizers():
  return pytest.importorskip("tokenizers", reason="needs the extra [hf]")


class Wrapped:
  def __init__(self, inner):
    self._inner, self.vocab_size = inner, inner.get_vocab_size()

  def encode(self, text):
    return self._inner.encode(text, add_special_tokens=False).ids

  def decode(self, ids):
    return self._inner.decode(list(ids), skip_special_tokens=False)


TEXTS = [
  "Grüße, 世界! 😀😀 naïve café — ok",
  "    def f(x):\n\treturn x ** 2  # 中文註解",
  "日本語" * 30,
]


def test_a_byte_level_bpe_gives_its_text_piece_by_piece(tokenizers):
  """Its merges cross the borders of characters."""
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=330, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
  )
  inner.train_from_iterator(TEXTS, trainer)
  tokenizer = Wrapped(inner)
  for text in TEXTS:
    ids = tokenizer.encode(text)
    texts = pieces_of(tokenizer, ids)
    assert texts[-1] == text and not any(UNFINISHED in t for t in texts)
    assert len(set(texts)) > len(ids) // 3, "it comes as it is known"


def test_a_sentencepiece_tokenizer_with_byte_fallback_gives_its_text_piece_by_piece(tokenizers):
  """Spaces belong to the words after them; one unfinished byte spoils the whole run in `decode`."""
  vocab = {f"<0x{i:02X}>": i for i in range(256)}
  for piece in ("▁", "▁the", "▁sea", "s", "a", "t", "h", "e", "n", "▁t", "▁th", "▁s", "▁se"):
    vocab[piece] = len(vocab)
  merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "s"), ("▁s", "e"), ("▁se", "a")]
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, byte_fallback=True))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
  d = tokenizers.decoders
  inner.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
  tokenizer = Wrapped(inner)
  for text in ("the sea the sea", "the 世界 sea éé€ the 😀😀", "世界" * 20 + " the sea" * 20):
    ids = tokenizer.encode(text)
    texts = pieces_of(tokenizer, ids)
    assert texts[-1] == tokenizer.decode(ids) == text
    assert not any(UNFINISHED in t for t in texts) and len(set(texts)) > len(ids) // 4
    for num_at_once in (2, 3, 7, len(ids)):  # as a stream gets them that others hold up
      detokeniser = Detokeniser(tokenizer)
      for end in [*range(num_at_once, len(ids), num_at_once), len(ids) - 1]:
        detokeniser.read(ids, end)
        assert detokeniser.text == texts[end - 1]


# In a run --------------------------------------------------------------------------------------

DIGITS = Pieces([f"{i:03d}," for i in range(checksum.VOCAB_SIZE)])


def with_stop_strings(requests, **sampling):
  """Each stops at a string that begins in its third token and ends in the fourth, if they come."""
  want, changed = expected(requests), []
  for r in requests:
    ids = want[r.request_id]
    stop = (DIGITS.decode(ids[2:4])[1:5],) if len(ids) > 3 else ()
    changed.append(
      dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, stop=stop, **sampling))
    )
  return changed


@pytest.mark.parametrize("options", [{}, {"num_pages": 24, "num_rows": 4}], ids=["", "preempting"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_stop_strings_end_requests_alike_under_every_strategy(strategy, options, steps_in_flight):
  """With the pools' books in order, at every turn."""
  requests = with_stop_strings(make_requests(25, seed=3, output=(1, 9), prompt=(1, 30)))
  all_ids, ended, sequences = expected(requests), {}, {}
  stopper = Stopper(DIGITS)

  def each_turn(turn):
    ended.update(turn.ended)
    sequences.update(turn.sequences)
    assert {i for i, _ in turn.ended} <= turn.sequences.keys()

  run(make_cluster(strategy, **options), requests, finish_reason=stopper, each_turn=each_turn,
      steps_in_flight=steps_in_flight)  # fmt: skip
  num_cut = 0
  for r in requests:
    seq, ids = sequences[r.request_id], all_ids[r.request_id]
    got = answer(DIGITS, ids, stop=r.sampling.stop, max_tokens=r.sampling.max_tokens)
    assert tuple(seq.output_ids) == got.ids
    assert ended[r.request_id] == got.reason
    assert stopper.settled(seq) == (got.text, len(got.ids))
    num_cut += len(got.ids) < len(ids)
  assert num_cut > 10


def serve_with_all_ends(strategy) -> Stopper:
  """Requests that stop, fill, fail and are cancelled; what is left of the run is its stopper."""
  requests = make_requests(40, seed=4, output=(6, 12))
  requests = [*with_stop_strings(requests[:20]), *requests[20:]]
  inbox, asked = Inbox(requests), collections.Counter()
  stopper, most, ends, told = Stopper(DIGITS), [0], [], set()

  def fails(request_id):  # at its third token
    asked[request_id] += 1
    return "on purpose" if request_id % 4 == 1 and asked[request_id] > 2 else None

  def each_turn(turn):
    for seq in turn.sequences.values():
      stopper.settled(seq)
      if seq.request_id % 4 == 0:
        inbox.cancel(seq.request_id)
    told.update(turn.sequences)
    most.append(len(stopper._states))
    ends.extend(turn.ended + turn.failed)

  cluster = make_cluster(strategy, fails=fails)
  run(cluster, inbox, finish_reason=stopper, each_turn=each_turn)
  assert {reason for _, reason in ends} == {"stop", "length", "cancelled", "on purpose"}
  assert len(told) == 40 and max(most) > 1
  return stopper


def test_nothing_is_kept_of_requests_that_finished_failed_or_were_cancelled():
  stoppers = {strategy: serve_with_all_ends(strategy) for strategy in STRATEGIES}
  gc.collect()  # once for all: it takes a second where much is loaded
  assert {strategy: len(stopper._states) for strategy, stopper in stoppers.items()} == (
    dict.fromkeys(STRATEGIES, 0)
  )
