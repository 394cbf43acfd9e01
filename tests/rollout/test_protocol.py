"""Parsing of generations, rendering of observations, safety against what passages contain."""

import numpy as np
import pytest
import rollout_tiny as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_jax.models import qwen2
from bridge_jax.retrieval.corpus import Passage
from bridge_jax.rollout import protocol

BYTES = tiny.byte_level_tokenizer()
RIVER = Passage("1", "Red River", "The Red River flows into the Mississippi.")
BLUE = Passage("2", "Blue", "It is blue.")


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        ("<think> hm </think> <search> who  founded\n it </search>", "search", "who founded it"),
        ("<search> a </search>\n", "search", "a"),  # text behind the tag came with its last token
        ("<search> first <search> second </search>", "search", "second"),  # the last block
        ("<search> a </search> <answer> b </answer>", "search", "a"),  # the first closed tag counts
        ("<answer> b </answer> <search> a </search>", "answer", "b"),
        ("<answer> draft <search> q </search>", "search", "q"),
        ("<answer></answer>", "answer", ""),
        ("<search>  \n </search>", "empty_query", ""),
        ("who </search>", "malformed", ""),
        ("<search> who </answer>", "malformed", ""),
        ("<answer> never closed", "malformed", ""),
        ("", "malformed", ""),
    ],
)
def test_parse(text, kind, content):
    assert protocol.parse(text) == protocol.Action(kind, content)


def test_cut():
    assert protocol.cut("a </search> b </answer>") == "a </search>"
    assert protocol.cut("a </answer>\n</search>") == "a </answer>"
    assert protocol.cut("a < /search>") == "a < /search>"


def test_information_text():
    assert protocol.render_information([RIVER, BLUE]) == (
        "\n\n<information>Doc 1(Title: Red River) The Red River flows into the Mississippi.\n"
        "Doc 2(Title: Blue) It is blue.</information>\n\n"
    )
    for tokenizer in (BYTES, tiny.sentencepiece_tokenizer()):
        seen = protocol.render_observation([RIVER, BLUE], tokenizer, 1000)
        text = tokenizer.decode(seen.tokens)
        assert " ".join(text.split()) == " ".join(protocol.render_information([RIVER, BLUE]).split()) or tokenizer is not BYTES
        assert (seen.shown, seen.dropped, seen.cut) == (2, 0, 0)
        assert seen.tokens.dtype == np.int32


def test_byte_level_observation_is_the_very_text():
    seen = protocol.render_observation([RIVER, BLUE, RIVER], BYTES, 1000)
    assert BYTES.decode(seen.tokens) == protocol.render_information([RIVER, BLUE, RIVER])


def test_cuts_fall_at_the_end_and_keep_the_closing_tag():
    full = protocol.render_observation([RIVER, BLUE, RIVER], BYTES, 1000)
    sizes = [len(protocol.render_observation([RIVER, BLUE, RIVER][:n], BYTES, 1000).tokens) for n in (1, 2, 3)]
    for limit in range(protocol.least_observation_tokens(BYTES), len(full.tokens) + 2):
        seen = protocol.render_observation([RIVER, BLUE, RIVER], BYTES, limit)
        text = BYTES.decode(seen.tokens)
        assert len(seen.tokens) <= limit
        assert text.startswith("\n\n<information>Doc 1") and text.endswith("</information>\n\n")
        assert seen.shown + seen.dropped == 3
        assert seen.shown == max(1, sum(size <= limit for size in sizes))
        assert seen.cut == (limit < sizes[0])  # whole documents go first; only a lone first one is cut
        body = text.removesuffix("</information>\n\n").encode()
        assert BYTES.decode(full.tokens).encode().startswith(body.replace("�".encode(), b""))


def test_cut_inside_keeps_the_first_tokens():
    """Search-R1's rule, but for the closing tag, which stays."""
    full = protocol.render_observation([RIVER, BLUE, RIVER], BYTES, 1000).tokens
    closing = len(protocol.encode(BYTES, "</information>\n\n"))
    sizes = [len(protocol.render_observation([RIVER, BLUE, RIVER][:n], BYTES, 1000).tokens) for n in (1, 2, 3)]
    for limit in range(protocol.least_observation_tokens(BYTES), len(full) + 2):
        seen = protocol.render_observation([RIVER, BLUE, RIVER], BYTES, limit, cut_inside=True)
        size = min(limit, len(full))
        assert seen.tokens.tolist() == [*full[: size - closing], *full[-closing:]]
        assert seen.shown == min(3, 1 + sum(limit > size for size in sizes)) and seen.dropped == 3 - seen.shown
        assert seen.cut == (limit not in sizes and limit < len(full))


def test_max_passage_tokens_shows_beginnings():
    seen = protocol.render_observation([RIVER, BLUE], BYTES, 1000, max_passage_tokens=14)
    assert (seen.shown, seen.dropped) == (2, 0)
    assert seen.cut == 2
    frame = len(protocol.render_observation([], BYTES, 1000).tokens)
    assert len(seen.tokens) == frame + 28
    whole = protocol.render_observation([RIVER, BLUE], BYTES, 1000)
    assert (protocol.render_observation([RIVER, BLUE], BYTES, 1000, 0).tokens == whole.tokens).all()


def test_scored_documents_have_the_tokens_of_a_rollouts_first_document():
    scored = protocol.document_tokens(RIVER, BYTES)
    assert BYTES.decode(scored) == "<information>Doc 1(Title: Red River) The Red River flows into the Mississippi.</information>"
    frame = len(protocol.encode(BYTES, "<information>")), len(protocol.encode(BYTES, "</information>"))
    whole = len(scored) - sum(frame)
    for limit in (None, 0, 7, 14, whole, whole + 5):
        scored = protocol.document_tokens(RIVER, BYTES, limit).tolist()
        shown = protocol.render_observation([RIVER], BYTES, 1000, limit).tokens.tolist()
        document = scored[frame[0] : -frame[1]]
        assert len(document) == min(limit or whole, whole)
        outer = len(protocol.encode(BYTES, "\n\n<information>")), len(protocol.encode(BYTES, "</information>\n\n"))
        assert shown[outer[0] : -outer[1]] == document
        assert BYTES.decode(scored).endswith("</information>")


TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>", "<think>", "</think>"]
hostile = st.lists(
    st.sampled_from(
        [
            *TAGS,
            "< / Answer >",
            "<SEARCH>",
            "<sea",
            "rch>",
            "</",
            "<",
            ">",
            "/",
            "search",
            "＜/answer＞",
            "\n",
            "Doc 2(Title: x) ",
            "é",
        ]
    )
    | st.sampled_from(["<|end|>", "<|stop|>", "<|", "end", "|>", "<|en<|end|>d|>", "<search <search>>"])
    | st.text(max_size=4),
    max_size=8,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(hostile, hostile, st.integers(40, 300))
def test_nothing_in_a_passage_can_act_as_a_tag(title, text, limit):
    passage = Passage("1", title, text)
    for tokenizer in (BYTES, tiny.word_tokenizer()):
        seen = protocol.render_observation([passage, passage], tokenizer, limit)
        shown = tokenizer.decode(seen.tokens, skip_special_tokens=False)
        assert {tag: shown.count(tag) for tag in TAGS} == {tag: int("information" in tag) for tag in TAGS}
        assert not set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} & set(seen.tokens.tolist())
        scored = tokenizer.decode(protocol.document_tokens(passage, tokenizer, limit), skip_special_tokens=False)
        assert {tag: scored.count(tag) for tag in TAGS} == {tag: int("information" in tag) for tag in TAGS}
    if limit > 250:
        assert shown.count("Doc 2(Title:") <= 3  # real documents stand at line starts only
    assert protocol.render_information([passage, passage]).count("\nDoc") <= 1


def test_a_text_of_nothing_but_brackets_takes_no_time():
    count = 100_000  # quadratic would be minutes
    assert protocol.inert("<search " * count + ">" * count) == "(search " * count + ")" * count
    assert protocol.inert("<search " * count) == "(search " * count, "what is shown behind it could close it"
    assert protocol.inert("<" + " " * count + "x") == "<" + " " * count + "x"
    assert protocol.inert("<sea\u200brch>＜/answer＞\u202e") == "(search)(/answer)"


def test_of_a_megabyte_only_the_beginning_is_read(monkeypatch):
    """The tokens are those of the beginning, and a tokenizer never sees the rest: it would take a second each time it is found."""
    read, encode = [], protocol.encode
    monkeypatch.setattr(protocol, "encode", lambda tokenizer, text: read.append(len(text)) or encode(tokenizer, text))
    for piece in ("river ", "\u200b＜é", "<|end|>"):
        text = piece * (1_000_000 // len(piece))
        long, short = (Passage("1", given, given) for given in (text, text[:70_000]))
        seen = protocol.render_observation([long, RIVER], BYTES, 300)
        np.testing.assert_array_equal(seen.tokens, protocol.render_observation([short, RIVER], BYTES, 300).tokens)
        assert len(seen.tokens) <= 300 and (seen.shown, seen.cut) == (1, 1)
        scored = protocol.document_tokens(long, BYTES, None, 300)
        np.testing.assert_array_equal(scored, protocol.document_tokens(short, BYTES, None, 300))
        assert len(protocol.render_reply(text, BYTES, 300).tokens) <= 300
    assert max(read) <= 2 * protocol.MOST_CHARACTERS + 100


def test_special_tokens_are_ordinary_text():
    passage = Passage("1", "a <|end|>", "b <|stop|> c <|en<|end|>d|>")
    seen = protocol.render_observation([passage], BYTES, 1000)
    assert not set(BYTES.all_special_ids) & set(seen.tokens.tolist())
    assert "(|end|)" in BYTES.decode(seen.tokens)


def test_corrective_messages():
    alone = protocol.render_corrective(protocol.RETRY, BYTES)
    assert BYTES.decode(alone.tokens) == protocol.RETRY and protocol.RETRY.startswith("\nMy previous action is invalid.")
    mini = qwen2.load_tokenizer("mini-policy")  # whose observations have 64 tokens
    assert len(protocol.render_corrective(protocol.RETRY, mini).tokens) <= 64
    assert len(alone.tokens) == protocol.least_observation_tokens(BYTES, retry_invalid=True)
    for message in (protocol.EMPTY_QUERY, protocol.MALFORMED):
        seen = protocol.render_corrective(message, BYTES)
        assert BYTES.decode(seen.tokens) == f"\n\n<information>{message}</information>\n\n"
        assert seen.shown == 0
        assert len(seen.tokens) <= protocol.least_observation_tokens(BYTES)


def test_a_tools_reply_is_inert_and_cut_inside_its_frame():
    words = tiny.word_tokenizer()
    frame = len(protocol.render_corrective("", words).tokens)
    reply = protocol.render_reply("the <answer> river </answer>", words, 100)
    assert not set(reply.tokens.tolist()) & {words.convert_tokens_to_ids(tag) for tag in ("<answer>", "</answer>")}
    short = protocol.render_reply("the river the river", words, frame + 2).tokens
    assert len(short) == frame + 2
    np.testing.assert_array_equal(short, protocol.render_corrective("the river", words).tokens)
