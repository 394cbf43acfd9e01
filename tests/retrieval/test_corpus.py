"""The corpus returns what was written, whatever it is, and refuses what is not a passage by file, line and field."""

import json
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bridge_jax.errors import UserError
from bridge_jax.retrieval.corpus import Corpus, Passage

odd = st.sampled_from('\u2028\u2029\x85\x0b\x0c\x1c\r\n"\\\0 <>\ufeff')
anything = st.text(st.characters(exclude_categories=["Cs"]) | odd, max_size=40)
filled = anything.filter(str.strip)
title = anything.filter(lambda text: "\n" not in text and not text.endswith("\r"))
rows = st.lists(st.tuples(filled, title, anything), min_size=1, max_size=8, unique_by=lambda row: row[0])


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows, st.sampled_from(["\n", "\r\n", "\n\n", "\n \r\n"]), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 9))
@example([("a", "", "x\u2028y"), ("b", 'He said "no"', "")], "\r\n", False, True, True, 1)
@example([("a", "long", "word " * 40_000)], "\n", False, False, False, 1)
def test_reads_back_what_was_written(tmp_path, rows, end, escape, bom, final_end, limit):
    lines = [json.dumps({"extra": 1, "contents": f'"{t}"\n{x}', "id": i}, ensure_ascii=escape) for i, t, x in rows]
    data = end.join(lines) + (end if final_end else "")
    file = tmp_path / "corpus.jsonl"
    file.write_bytes((b"\xef\xbb\xbf" if bom else b"") + data.encode())
    for _ in range(2):  # scanned, then from the cached offsets
        corpus = Corpus.open(file)
        assert list(corpus) == [Passage(*row) for row in rows]
        assert [corpus.contents(row) for row in range(len(corpus))] == [f'"{t}"\n{x}' for _, t, x in rows]
        assert [corpus.row_of(i) for i, _, _ in rows] == list(range(len(rows)))
    prefix = Corpus.open(file, limit=limit)
    assert list(prefix) == list(corpus)[:limit]
    (tmp_path / "prefix.jsonl").write_text("\n".join(lines[:limit]), encoding="utf-8", newline="")
    assert prefix.fingerprint == Corpus.open(tmp_path / "prefix.jsonl").fingerprint
    assert (prefix.fingerprint == corpus.fingerprint) == (limit >= len(rows))


def test_contents_without_a_quoted_title_are_all_text(tmp_path):
    file = tmp_path / "c.jsonl"
    contents = ["no title\nsecond line", '"T"', '"', '"T"\r\nx', '"a" and "b"\nx']
    file.write_text("".join(json.dumps({"id": i, "contents": c}) + "\n" for i, c in enumerate(contents)))
    assert [(p.title, p.text) for p in Corpus.open(file)] == [
        ("", "no title\nsecond line"), ("T", ""), ("", '"'), ("T", "x"), ('a" and "b', "x"),
    ]  # fmt: skip


def test_ids_are_strings_and_unknown_ids_and_rows_are_errors(corpus_file):
    corpus = Corpus.open(corpus_file)
    with pytest.raises(KeyError):
        corpus.row_of("nobody")
    for row in (-1, len(corpus)):
        with pytest.raises(IndexError):
            corpus[row]


GOOD = b'{"id": "a", "contents": "x"}\n'


@pytest.mark.parametrize(
    "data, named",
    [
        (b"", ["holds no passage"]),
        (b"\n \n", ["holds no passage"]),
        (GOOD + b'\n{"contents": "x"}\n', ["line 3", "'id'", "missing"]),
        (GOOD + b'{"id": "b"}\n', ["line 2", "'contents'", "missing"]),
        (GOOD + b'{"id": "b", "contents": ["x"]}\n', ["line 2", "'contents'", "string"]),
        (GOOD + b'{"id": "b", "contents": null}\n', ["line 2", "'contents'", "null"]),
        (GOOD + b'{"id": true, "contents": "x"}\n', ["line 2", "'id'", "string"]),
        (GOOD + b'{"id": 1.5, "contents": "x"}\n', ["line 2", "'id'", "string"]),
        (GOOD + b'{"id": "", "contents": "x"}\n', ["line 2", "'id'", "empty"]),
        (GOOD + b'{"id": "b", "contents": " "}\n', ["line 2", "'contents'", "empty"]),
        (GOOD + b'{"id": "b", "contents": "\\ud800"}\n', ["line 2", "'contents'", "surrogate"]),
        (GOOD + b'{"id": "b", "contents": "\xff"}\n', ["line 2", "UTF-8"]),
        (GOOD + b'{"id": "b", "contents": "cut', ["line 2", "JSON"]),
        (GOOD + b"[1]\n", ["line 2", "object"]),
        (GOOD + b"[" * 100_000 + b"\n", ["line 2", "JSON"]),
        (b"\x1f\x8b\x08\x00", ["gzip", "gunzip"]),
        (GOOD + b"\n" + GOOD, ["line 3", "line 1", "'id'", "'a'"]),
        (b'{"id": 7, "contents": "x"}\n' + GOOD * 0 + b'{"id": "7", "contents": "x"}\n', ["line 2", "line 1", "'7'"]),
        (b"".join(b'{"id": "%d", "contents": "x"}\n' % (i % 900) for i in range(1000)), ["line 901", "line 1 ", "'0'"]),
    ],
)
def test_bad_files_are_refused_by_line_and_field(tmp_path, data, named):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(data)
    for _ in range(2):  # nothing of a refused file is cached
        with pytest.raises(UserError) as error:
            Corpus.open(file)
        for part in [str(file), *named]:
            assert part in str(error.value)


def test_bad_paths_and_limits(tmp_path, corpus_file):
    for path, limit in ((tmp_path / "none.jsonl", None), (tmp_path, None), (corpus_file, 0), (corpus_file, -3)):
        with pytest.raises(UserError):
            Corpus.open(path, limit)


def test_a_limit_leaves_later_rows_unread(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_bytes(GOOD + b"broken\n")
    assert len(Corpus.open(file, limit=1)) == 1


def test_a_changed_file_and_a_damaged_cache_are_read_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "c.jsonl"
    file.write_bytes(GOOD)
    first = Corpus.open(file).fingerprint
    file.write_bytes(GOOD.replace(b"x", b"y"))  # same size
    assert Corpus.open(file)[0].text == "y" and Corpus.open(file).fingerprint != first
    (cached,) = (tmp_path / "cache" / "corpora").iterdir()
    for damage in (b"", b"{}", cached.read_bytes()[:-1]):
        cached.write_bytes(damage)
        assert Corpus.open(file)[0] == Passage("a", "", "y")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, corpus_file):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="BRIDGE_JAX_CACHE"):
        Corpus.open(corpus_file)


def test_opening_again_costs_nothing_per_row(tmp_path):
    file = tmp_path / "big.jsonl"
    with open(file, "w") as out:
        out.writelines(f'{{"id": "{i}", "contents": "text {i}"}}\n' for i in range(100_000))
    Corpus.open(file)
    tracemalloc.start()
    begin = time.perf_counter()
    corpus = Corpus.open(file)
    row = corpus.row_of("77777")
    text = corpus[row].text
    seconds, memory = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (row, text) == (77777, "text 77777")
    assert memory < 200_000, "the offsets must stay in the memory-mapped file"
    assert seconds < 0.5
