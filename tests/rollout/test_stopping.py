"""The byte automaton against plain string search on decoded prefixes, for every kind of tokenizer."""

import itertools
import time

import numpy as np
import pytest
import rollout_tiny as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bridge_jax.rollout import protocol
from bridge_jax.rollout.stopping import byte_automaton, fold_vocabulary, stop_table

STOPS = [stop.encode() for stop in protocol.STOP_STRINGS]
AUTOMATON = byte_automaton(STOPS)


def completing_token(pieces: list[bytes]) -> tuple[int, int] | None:
    """(index of the token after which a stop string is first in the text, which stop string), by brute force."""
    text = b""
    for index, piece in enumerate(pieces):
        text += piece
        found = [(text.find(stop), which) for which, stop in enumerate(STOPS) if stop in text]
        if found:
            return index, min(found)[1]
    return None


def run_table(next_state, accepting, tokens) -> tuple[int, int] | None:
    state = 0
    for index, token in enumerate(tokens):
        state = next_state[state, token]
        if state in accepting:
            return index, accepting.index(state)
    return None


near_tags = st.sampled_from(
    [b"<", b"/", b">", b"</", b"s", b"search", b"</sea", b"rch>", b"</answer>", b"</search>", b"answer", b"<<", b"\xc3"]
)
texts = st.lists(st.one_of(near_tags, st.binary(max_size=3)), max_size=14).map(b"".join)


@settings(max_examples=400, deadline=None)
@given(texts, st.sampled_from(STOPS), texts, st.lists(st.integers(0, 60), max_size=20))
def test_any_split_of_any_text_stops_at_the_completing_token(before, stop, after, cuts):
    text = before + stop + after
    bounds = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]  # a leading 0-0 piece: an empty token
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    transitions, accepting = AUTOMATON
    table = fold_vocabulary(transitions, pieces)
    assert run_table(table, accepting, range(len(pieces))) == completing_token(pieces)
    # The first match stays, whatever is read after it.
    state = 0
    for token in range(len(pieces)):
        state = table[state, token]
    assert accepting.index(state) == completing_token(pieces)[1]


@settings(max_examples=200, deadline=None)
@given(texts)
def test_texts_without_a_tag_never_stop(text):
    transitions, accepting = AUTOMATON
    state = 0
    for byte in text:
        state = transitions[state, byte]
    assert (state in accepting) == any(stop in text for stop in STOPS)


def tokenizers():
    return {
        "byte_level": tiny.byte_level_tokenizer(),
        "sentencepiece": tiny.sentencepiece_tokenizer(),
        "words": tiny.word_tokenizer(),
        "characters": characters(),
    }


def characters():
    alphabet = {char: index for index, char in enumerate(map(chr, range(32, 127)))}
    backend = Tokenizer(models.WordLevel(alphabet | {"[UNK]": len(alphabet)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "words", "characters"])
def test_random_ids_agree_with_the_tokenizers_own_decoding(name):
    tokenizer = tokenizers()[name]
    vocab = len(tokenizer)
    table = stop_table(tokenizer, vocab)
    pieces = dict(tokenizer.get_vocab())
    likely = [i for token, i in pieces.items() if any(part in token for part in ("<", ">", "/", "search", "answer", "▁"))] or [0]
    rng = np.random.default_rng(0)
    stopped = 0
    for _ in range(300):
        ids = np.where(rng.random(20) < 0.8, rng.choice(likely, 20), rng.integers(0, vocab, 20)).tolist()
        tag = tokenizer(protocol.STOP_STRINGS[rng.integers(2)], add_special_tokens=False)["input_ids"]
        if rng.random() < 0.5:
            at = int(rng.integers(20))
            ids[at:at] = tag
        expected = None
        for index in range(len(ids)):
            text = tokenizer.decode(ids[: index + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found = [(text.find(stop), which) for which, stop in enumerate(protocol.STOP_STRINGS) if stop in text]
            if found:
                expected = index, min(found)[1]
                break
        assert run_table(table.next_state, table.accepting, ids) == expected
        stopped += expected is not None
    assert stopped > (0 if name == "characters" else 20)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "words"])
def test_decoding_is_the_tokenizers(name):
    tokenizer = tokenizers()[name]
    text = "the <search> who founded </search> red river"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert stop_table(tokenizer, len(tokenizer)).decode(ids) == tokenizer.decode(ids) == text


def test_byte_level_keeps_bytes_apart():
    """A character split over tokens decodes whole, and half of one does not disturb the matcher."""
    tokenizer = tiny.byte_level_tokenizer()
    table = stop_table(tokenizer, len(tokenizer))
    ids = tokenizer("né 中 </search>", add_special_tokens=False)["input_ids"]
    assert table.decode(ids) == "né 中 </search>"
    half = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    tag = tokenizer("</search>", add_special_tokens=False)["input_ids"]
    assert run_table(table.next_state, table.accepting, half + tag) == (len(half + tag) - 1, 0)


def test_added_tokens_are_literal_text():
    tokenizer = tiny.byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("</search>", special=False)])
    ids = tokenizer("a</search>", add_special_tokens=False)["input_ids"]
    table = stop_table(tokenizer, len(tokenizer))
    assert run_table(table.next_state, table.accepting, ids) == (len(ids) - 1, 0)


def test_ids_beyond_the_tokenizer_change_nothing():
    tokenizer = tiny.word_tokenizer()
    table = stop_table(tokenizer, len(tokenizer) + 7)
    assert table.next_state.shape[1] == len(tokenizer) + 7
    states = np.arange(table.next_state.shape[0])
    assert (table.next_state[:, len(tokenizer) :] == states[:, None]).all()


def test_a_large_vocabulary_takes_seconds():
    rng = np.random.default_rng(0)
    pieces = [bytes(rng.integers(0, 256, n)) for n in rng.integers(1, 16, 152_000)]
    transitions, _ = byte_automaton(STOPS)
    began = time.monotonic()
    table = fold_vocabulary(transitions, pieces)
    assert time.monotonic() - began < 10
    for token in rng.integers(0, len(pieces), 50):
        for state in range(len(transitions)):
            expected = state
            for byte in pieces[token]:
                expected = transitions[expected, byte]
            assert table[state, token] == expected


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_real_tokenizers(name):
    from bridge_jax.models import hub, qwen2

    folder = hub.resolve(name)
    tokenizer = qwen2.load_tokenizer(folder)
    table = stop_table(tokenizer, qwen2.config_from_folder(folder).vocab_size)
    tails = ["", "\n", "\n\n", ".", " and so on", "</answer>", "<|im_end|>", "é"]
    for before in ("", "x", "<", "</", "</sea", "<search> who 中 ", "</search ", "1 <"):
        for tag in protocol.STOP_STRINGS:
            for tail in tails:
                ids = tokenizer(before + tag + tail, add_special_tokens=False)["input_ids"]
                assert table.decode(ids) == before + tag + tail
                expected = next(n for n in range(len(ids)) if tag in tokenizer.decode(ids[: n + 1]))
                assert run_table(table.next_state, table.accepting, ids) == (expected, protocol.STOP_STRINGS.index(tag))
