"""The corpus returns what was written, whatever it is, and refuses what is not a passage by file, line and field."""

import csv
import gzip
import io
import json
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bridge_jax.errors import UserError
from bridge_jax.retrieval import corpus as corpora
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.passages import Passage

GOOD = b'{"id": "a", "contents": "x"}\n'
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


def write(folder, form, rows):
    """The rows in a file of one of the forms that are read."""
    if form == "dpr":
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter="\t", lineterminator="\n")
        writer.writerows([("id", "text", "title"), *((i, x, t) for i, t, x in rows)])
        data = text.getvalue().encode()
    elif form == "medrag":
        lines = [{"id": i, "title": t, "content": x, "contents": f"{t}. {x}"} for i, t, x in rows]
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    else:
        data = "".join(json.dumps({"id": i, "contents": f'"{t}"\n{x}'}) + "\n" for i, t, x in rows).encode()
    suffix = {"dpr": "tsv"}.get(form, "jsonl")
    (folder / f"{form}.{suffix}").write_bytes(data)
    (folder / f"{form}.{suffix}.gz").write_bytes(gzip.compress(data))
    return folder / f"{form}.{suffix}", folder / f"{form}.{suffix}.gz"


no_return = anything.filter(lambda text: "\r" not in text)  # csv cannot tell a lone \r in an unquoted field from the end of a row
table_rows = st.lists(
    st.tuples(no_return.filter(str.strip), no_return.filter(lambda t: "\n" not in t), no_return.filter(str.strip)),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row[0],
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table_rows, st.sampled_from(["wiki", "medrag", "dpr"]), st.integers(1, 3))
@example([("ü\u2028", "", 'x "y"\n\tz\u2028'), ("b", '"He', "10 kB " * 2000)], "medrag", 1)
@example([("ü\u2028", "", 'x "y"\n\tz\u2028'), ("b", '"He', "10 kB " * 2000)], "dpr", 1)
def test_every_form_reads_back_what_was_written(tmp_path, monkeypatch, rows, form, run_rows):
    monkeypatch.setattr(corpora, "RUN_ROWS", run_rows)  # ids are sorted in many runs
    for file in write(tmp_path, form, rows):
        corpus = Corpus.open(file)
        assert list(corpus) == [Passage(*row) for row in rows]
        assert [corpus.row_of(i) for i, _, _ in rows] == list(range(len(rows)))
        titled = [f'"{t}"\n{x}' if t or form == "wiki" else x for _, t, x in rows]
        assert [corpus.contents(row) for row in range(len(rows))] == titled
        assert [corpus.document(row) for row in range(len(rows))] == [
            {"id": i, "contents": c} for (i, _, _), c in zip(rows, titled)
        ]


def test_many_files_are_one_corpus_in_the_order_of_their_names(tmp_path, monkeypatch):
    (tmp_path / "chunk").mkdir()
    rows = [(f"id {i}", f"T{i}", f"text {i}") for i in range(60)]
    for i, form in enumerate(("wiki", "medrag", "dpr")):
        plain, packed = write(tmp_path, form, rows[20 * i : 20 * i + 20])
        source = packed if i == 1 else plain
        source.rename(tmp_path / "chunk" / f"{i}.{source.name.partition('.')[2]}")
    monkeypatch.setattr(corpora, "RUN_ROWS", 7)
    corpus = Corpus.open(tmp_path / "chunk")
    assert list(corpus) == [Passage(*row) for row in rows]
    assert [corpus.row_of(i) for i, _, _ in rows] == list(range(60))
    alone = Corpus.open(write(tmp_path, "wiki", rows)[0])
    files = sorted((tmp_path / "chunk").iterdir())
    for other in (Corpus.open(str(tmp_path / "chunk" / "*")), Corpus.open(files), Corpus.open(corpus.path, corpus.limit), alone):
        assert other.fingerprint == corpus.fingerprint
    assert list(Corpus.open(files, limit=25)) == list(corpus)[:25]
    with pytest.raises(UserError, match=r"'id 0' is that of passages 1 and 61"):
        Corpus.open([*files, files[0]])
    files[1].write_bytes(gzip.compress(b'{"id": "new", "title": "", "content": "changed"}\n'))
    assert len(Corpus.open(files)) == 41  # a changed source is read anew
    for bad, named in ((tmp_path / "chunk" / "*.txt", "no file matches"), (tmp_path, "a folder without"), ([], "names no file")):
        if bad == tmp_path:
            [file.unlink() for file in tmp_path.iterdir() if file.is_file()]
        with pytest.raises(UserError, match=named):
            Corpus.open(bad)


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
        (b"\x1f\x8b\x08\x00", ["damaged gzip file"]),
        (gzip.compress(GOOD * 3, mtime=0)[:-12], ["damaged gzip file"]),
        (gzip.compress(GOOD + b"{}\n", mtime=0), ["line 2", "'id'", "missing"]),
        (b'{"id": "a", "title": "", "content": " "}\n', ["line 1", "'content'", "empty"]),
        (b'{"id": "a", "title": null, "content": "x"}\n', ["line 1", "'title'", "null"]),
        (GOOD + b"\n" + GOOD, ["line 3", "line 1", "'id'", "'a'"]),
        (b'{"id": 7, "contents": "x"}\n' + GOOD * 0 + b'{"id": "7", "contents": "x"}\n', ["line 2", "line 1", "'7'"]),
        (b"".join(b'{"id": "%d", "contents": "x"}\n' % (i % 900) for i in range(1000)), ["line 901", "line 1 ", "'0'"]),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else " ".join(value),
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
