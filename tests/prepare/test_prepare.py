"""`prepare`: what it reads out of each kind of file, what it refuses, what it writes."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_jax import config as configuration
from bridge_jax.data.qa import load_questions
from bridge_jax.errors import UserError
from bridge_jax.prepare import __main__ as prepare
from bridge_jax.prepare import chunks, documents, questions
from bridge_jax.retrieval.corpus import Corpus

HANDBOOK = Path(__file__).parents[2] / "notebooks" / "handbook"


def texts(document):
    return [(section.heading, *section.paragraphs) for section in document.sections]


def read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return documents.read_document(path, name)


# ---- documents ----------------------------------------------------------------------------------------------------------------


def test_markdown(tmp_path):
    found = read(
        tmp_path,
        "a.md",
        "---\ntitle: no text\n---\n# The *Guide*\n\nOne\nline with [a link](http://x.y) and `code`.\n\n## Part\n\n* first\n"
        "* second\n\n"
        "```\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    )
    assert found.title == "The Guide"
    assert texts(found) == [
        ("", "One line with a link and code."),
        ("Part", "first", "second", "x = 1", "a", "b", "1", "2"),
    ]


def test_html_keeps_the_text_and_drops_the_furniture(tmp_path):
    found = read(
        tmp_path,
        "a.html",
        "<html><head><title>T &amp; U</title></head><body><nav>Home</nav><main><h1>Head</h1><div>One <b>bo</b>ld\n\nword."
        "<script>no()</script></div><h2>Part</h2><p>Two<br>lines</p><table><tr><td>a</td><td>b</td></tr></table></main>"
        "<footer>Foot</footer></body></html>",
    )
    assert found.title == "T & U"
    assert texts(found) == [("", "One bold word."), ("Part", "Two lines", "a b")]


def test_html_in_its_own_encoding(tmp_path):
    page = "<html><head><meta charset='iso-8859-1'></head><body><h1>Caf\xe9</h1><p>Cr\xe8me.</p></body></html>".encode("latin-1")
    assert texts(read(tmp_path, "a.htm", page)) == [("", "Crème.")]


def pdf(lines):
    """The smallest file that shows these lines."""
    shown = "".join(f"({line}) Tj 0 -14 Td " for line in lines)
    stream = f"BT /F1 12 Tf 72 720 Td {shown}ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + b"xref\n0 6\n0000000000 65535 f \n%strailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (table, len(out))


def test_pdf(tmp_path):
    found = read(tmp_path, "my_paper.pdf", pdf(["The light-", "house of Skerry", "is tall."]))
    assert (found.title, texts(found)) == ("my paper", [("", "The lighthouse of Skerry is tall.")])
    with pytest.raises(UserError, match=r"broken\.pdf: not a readable PDF"):
        read(tmp_path, "broken.pdf", b"%PDF-1.4 and nothing else")


def test_faulty_files_are_named_all_at_once(tmp_path, capsys, monkeypatch):
    """And what the PDF library mutters comes as one line a file, not on stderr."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("Rome is old.")
    (folder / "b.pdf").write_bytes(pdf(["Oslo is cold."]).replace(b"startxref\n", b"startxref\n7"))  # found again by its marks
    (tmp_path / "q.csv").write_text("question,answer\na?,old\nb?,cold\n")
    assert command(tmp_path / "out", corpus=folder, asked=tmp_path / "q.csv") == 0
    told = capsys.readouterr()
    assert told.err == "" and told.out.count("damaged: b.pdf was read all the same (") == 1
    assert "one question is held out" in told.out
    (folder / "c.txt").write_bytes(b"x\xff")
    (folder / "d.pdf").write_bytes(b"%PDF-1.4 and nothing else")
    (folder / "e.jsonl").write_text('{"id": 1}\n')
    for shown, more in ((20, ""), (2, "... and 1 more")):
        monkeypatch.setattr(prepare, "FAULTS", shown)
        assert command(tmp_path / "out", "--force", corpus=folder, asked=tmp_path / "q.csv") == 1
        told = capsys.readouterr()
        named = [path in told.err for path in (f"{folder}/c.txt: not UTF-8", f"{folder}/d.pdf: not a", f"{folder}/e.jsonl, line 1")]
        assert named == [True, True, shown > 2] and more in told.err and told.out == ""
        assert len(told.err.splitlines()) == 1 + min(3, shown) + bool(more)


def test_copies_are_told(tmp_path, capsys):
    """A copy under its own title stays: two texts may say the same about different things. One of the same title goes."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, title in (("a.txt", ""), ("b.txt", ""), ("c.md", "# T\n\n"), ("d.md", "# T\n\n")):
        (folder / name).write_text(f"{title}Rome is old.")
    (tmp_path / "q.csv").write_text("question,answer,gold\na?,old,d.md\nb?,cold,\n")
    assert command(tmp_path / "out", corpus=folder, asked=tmp_path / "q.csv") == 0
    told = capsys.readouterr().out
    assert [line.split(":")[1].split(";")[0] for line in told.splitlines() if "same text" in line] == [
        " b.txt and a.txt", " c.md and a.txt", " d.md and a.txt",
    ]  # fmt: skip
    assert [passage.id for passage in Corpus.open(tmp_path / "out" / "corpus.jsonl")] == ["a.txt#1", "b.txt#1", "c.md#1"]
    asked = {q.question: q for part in ("train", "dev") for q in load_questions(tmp_path / "out" / f"{part}.jsonl")}
    assert asked["a?"].gold_passage_ids == ("c.md#1",) and "left out" not in told
    (tmp_path / "q.csv").write_text("question,answer\na?,old\n")
    assert command(tmp_path / "out", "--force", corpus=folder, asked=tmp_path / "q.csv") == 2
    assert "one question; at least two are needed" in capsys.readouterr().err


def test_text(tmp_path):
    assert texts(read(tmp_path, "a.txt", "A title\n\nOne\nline.\n\nTwo.\n")) == [("", "One line.", "Two.")]
    with pytest.raises(UserError, match=r"b\.txt: not UTF-8 at byte 1"):
        read(tmp_path, "b.txt", b"x\xff")


def test_a_missing_library_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bs4", None)
    with pytest.raises(UserError, match=r"beautifulsoup4 is not installed.*pip install 'bridge-jax\[prepare\]'"):
        read(tmp_path, "a.html", "<p>x</p>")


# ---- passages -----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 60), max_size=8), max_size=6), st.integers(10, 50))
def test_passages_hold_every_word_once_in_order(paragraphs, words):
    """Sentences of given lengths; no passage is longer than its share and half a sentence at either end."""
    count = iter(range(10**6))
    made = [" ".join(" ".join(str(next(count)) for _ in range(n)) + "." for n in lengths) for lengths in paragraphs if lengths]
    cut = chunks.cut(made, words)
    assert " ".join(cut).split() == " ".join(made).split()
    assert all(len(text.split()) <= 2.5 * words for text in cut)
    assert len(cut) <= max(1, round(next(count) / words))


def test_passages_end_with_sentences():
    text = "A b c. D e f g. H i. J k l m n o."
    assert chunks.cut([text], 7) == ["A b c. D e f g.", "H i. J k l m n o."]


# ---- questions ----------------------------------------------------------------------------------------------------------------

CELL = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(lambda text: text.strip() and "|" not in text)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=5), st.sampled_from(",;\t"))
def test_a_table_is_read_as_it_was_written(tmp_path_factory, rows, delimiter):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([("question", "answers"), *rows])
    path = tmp_path_factory.mktemp("table") / "q.csv"
    path.write_bytes(text.getvalue().encode())
    found = [(row.question.question, row.question.golds) for row in questions.read_questions(path)]
    assert found == [(question, (answer.strip(),)) for question, answer in rows]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("q.csv", "query,answer\na,b\n", ("line 1", "no column 'question'")),
        ("q.csv", "question,answer\nwho,\n", ("line 2", "field 'answer'", "missing or empty")),
        ("q.csv", "question,answer\nwho,a\n,b\n", ("line 3", "field 'question'", "is missing")),
        ("q.csv", "question,answer\nwho, really,a\n", ("line 2", "3 cells", "double quotes")),
        ("q.csv", 'question,answer\n"two\nlines",a\nwho,a,b\n', ("line 4", "3 cells")),
        ("q.csv", "id,question,answer\n1,a,b\n1,c,d\n", ("line 3", "field 'id'", "line 2")),
        ("q.csv", "question,answer\n", ("holds no question",)),
        ("q.csv", "question,answer\rwho,a\r", ("line 1", "line ends")),
        ("q.jsonl", '{"question": "a", "answer": NaN}\n', ("line 1", "field 'answer'", "nan")),
        ("q.jsonl", '{"question": "a", "answer": []}\n', ("line 1", "field 'answer'", "empty list")),
        ("q.jsonl", '{"question": "a", "answers": ["b", 3]}\n', ("line 1", "field 'answers[1]'", "not a string")),
        ("q.jsonl", '\n{"question": 3, "answer": "b"}\n', ("line 2", "field 'question'")),
        ("q.jsonl", "[1]\n", ("line 1", "not an object")),
        ("q.jsonl", "{\n", ("line 1", "not JSON")),
        ("q.xlsx", "", ("not one of .csv",)),
    ],
)
def test_a_bad_row_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        questions.read_questions(tmp_path / name)
    assert all(word in str(caught.value) for word in (name, *words)), caught.value


def rows_of(*asked):
    return [questions.Row(questions.Question(f"q{i}", text, (gold,), (), "own"), i + 2) for i, (text, gold) in enumerate(asked)]


def test_the_split_does_not_depend_on_the_order_and_leaks_no_question():
    rows = rows_of(*((f"Who is number {i}?", "x") for i in range(40)), ("who is  NUMBER 7", "y"))
    merged, duplicates = questions.merge_duplicates(rows)
    assert duplicates == [(42, 9)]
    assert next(row for row in merged if row.line == 9).question.golds == ("x", "y")
    train, dev = questions.split(merged, 8)
    assert (len(train), len(dev)) == (32, 8)
    again = questions.split(merged[::-1], 8)
    assert {row.line for row in again[1]} == {row.line for row in dev}
    assert not {row.line for row in train} & {row.line for row in dev}


def test_answers_are_found_as_whole_words():
    passages = [
        questions.Passage(str(i), "", text) for i, text in enumerate(("An Oslo-born cat.", "The catalogue", "Old cat food"))
    ]
    rows = rows_of(("Where is the food?", "The cat"), ("born?", "oslo born"), ("is it?", "yes"), ("who?", "dog"))
    finder = questions.AnswerFinder(passages, rows)
    # "Oslo-born" becomes one word, as the exact match has it.
    assert [finder.holding(row.question) for row in rows] == [[0, 2], [], None, []]
    assert finder.likeliest(rows[0].question) == 2


# ---- the command --------------------------------------------------------------------------------------------------------------


def command(out, *more, corpus=HANDBOOK, asked=HANDBOOK / "questions.csv"):
    return prepare.main([f"--corpus={corpus}", f"--questions={asked}", f"--out={out}", *more])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "data"
    assert command(out, "--words=60") == 0
    return out


def test_the_files_are_what_the_readers_read(prepared):
    corpus, train, dev = (
        Corpus.open(prepared / "corpus.jsonl"),
        *(load_questions(prepared / f"{n}.jsonl") for n in ("train", "dev")),
    )
    assert (len(corpus), len(train), len(dev)) == (20, 33, 8)
    asked = {question.question: question for question in (*train, *dev)}
    assert asked["Who repairs the radio?"].gold_passage_ids == ("routine.pdf#2",)
    assert "Petra Lind" in corpus[corpus.row_of("routine.pdf#2")].text
    assert all(corpus.row_of(gold) >= 0 for question in asked.values() for gold in question.gold_passage_ids)


def test_the_report_says_what_is_wrong_with_the_data(prepared, capsys):
    report = json.loads((prepared / "report.json").read_text())
    assert report["documents"] == {"html": 2, "text": 2, "markdown": 2, "pdf": 1}
    assert sum(report["words_a_passage"].values()) == report["passages"] == 20
    assert report["question_duplicates"] == [{"line": 42, "same_as_line": 2}]
    assert [missing["line"] for missing in report["answers_not_in_corpus"]] == [43]
    told = "\n".join(prepare.summary(report, HANDBOOK / "questions.csv"))
    assert "98 % occur in the corpus" in told and "line 43: What is the name of the station's dog? -> Biscuit" in told


def test_what_is_no_document_is_passed_over_and_told(tmp_path):
    """Questions in the corpus' folder, and what an earlier run wrote there, are not in the corpus."""
    folder = tmp_path / "mine"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("Rome is old.")
    (folder / "sub" / "B.MD").write_text("Oslo is cold.")
    (folder / "c.docx").write_bytes(b"PK")
    (folder / ".hidden.txt").write_text("no")
    (folder / "q.jsonl").write_text('{"question": "a?", "answer": "old"}\n{"question": "b?", "answer": "cold"}\n')
    for force in ((), ("--force",)):
        assert command(folder / "out", *force, corpus=folder, asked=folder / "q.jsonl") == 0
        report = json.loads((folder / "out" / "report.json").read_text())
        assert (report["documents"], report["passed_over"]) == ({"text": 1, "markdown": 1}, ["c.docx"])
    assert [passage.id for passage in Corpus.open(folder / "out" / "corpus.jsonl")] == ["a.txt#1", "sub/B.MD#1"]


def test_nothing_is_overwritten_without_force(prepared, capsys):
    before = (prepared / "config.py").stat().st_mtime_ns
    assert command(prepared) == 2
    assert "holds corpus.jsonl" in capsys.readouterr().err
    assert (prepared / "config.py").stat().st_mtime_ns == before


def test_passages_keep_their_ids_and_guessed_golds_hold_the_answer(tmp_path):
    corpus = [
        {"id": 7, "contents": '"Rome"\nRome is old.'},
        {"id": "8", "title": "Long", "text": "word. " * 50 + "The lake is called Como."},
        {"id": "9", "title": "Rome", "text": "rome is OLD"},
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    (tmp_path / "q.csv").write_text("question,answer\nwhich lake?,Como\nis it old?,yes\n")
    assert command(tmp_path / "out", "--words=20", "--gold=answer", corpus=tmp_path / "c.jsonl", asked=tmp_path / "q.csv") == 0
    assert [passage.id for passage in Corpus.open(tmp_path / "out" / "corpus.jsonl")] == ["7", "8#1", "8#2", "8#3"]
    made = [q for part in ("train", "dev") for q in load_questions(tmp_path / "out" / f"{part}.jsonl")]
    assert {q.question: q.gold_passage_ids for q in made} == {"which lake?": ("8#3",), "is it old?": ()}


def test_a_gold_that_is_no_document_is_named(tmp_path, capsys):
    (tmp_path / "q.csv").write_text("question,answer,gold\nwho,x,stations.md\nwhat,y,\n")
    assert command(tmp_path / "out", asked=tmp_path / "q.csv") == 2
    assert "line 2: field 'gold' names 'stations.md'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_models_get_an_accelerators_settings(tmp_path):
    assert command(tmp_path / "out", "--policy=Qwen/Qwen2.5-0.5B-Instruct", "--encoder=intfloat/e5-small-v2") == 0
    config = configuration.load(tmp_path / "out" / "config.py")
    assert (config.policy.model, config.grpo.group_size, config.policy.compute_dtype) == (
        "Qwen/Qwen2.5-0.5B-Instruct",
        8,
        "bfloat16",
    )


def test_the_configuration_finds_its_data_even_after_a_move(prepared, tmp_path):
    """And what it says fits together. A run of it is notebooks/04_your_own_corpus.ipynb (tests/notebooks)."""
    config = configuration.load(shutil.copytree(prepared, tmp_path / "moved") / "config.py")
    assert Path(config.index.corpus) == tmp_path / "moved" / "corpus.jsonl"
    assert [len(load_questions(path)) for path in (*config.data.train, *config.data.eval)] == [33, 8]
    c = config.rollout
    assert c.max_response_tokens >= 3 * c.max_new_tokens + c.max_searches * c.max_observation_tokens
    assert c.max_observation_tokens >= c.shown * c.max_passage_tokens
