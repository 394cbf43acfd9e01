"""Row parsers and file readers: every public format gives the same internal row, and a bad row is refused by name."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_jax.data.formats import ANSWER_SEPARATOR, PARSERS, Question, RowError, canonical_name, detect_format
from bridge_jax.data.qa import load_questions, read_file
from bridge_jax.errors import UserError
from bridge_jax.prepare.questions import read_questions

FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(str.strip)
plain = words.filter(lambda w: ANSWER_SEPARATOR not in w and "<answer>" not in w)
golds_lists = st.lists(plain, min_size=1, max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def rows_of(identity, question, golds):
    """The same question as each format writes it. NumPy arrays are what pandas makes of parquet's lists."""
    model = {"style": "rule", "ground_truth": {"target": np.array(golds, dtype=object)}}
    joined = {"style": "rule", "ground_truth": ANSWER_SEPARATOR.join(golds)}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
    return {
        "flashrag": {"id": identity, "question": question, "golden_answers": golds, "metadata": {"type": "x"}},
        "search_r1": {"id": identity, "question": question, "golden_answers": golds, "data_source": "set", "reward_model": model},
        "verl": {"prompt": messages, "data_source": "Set", "reward_model": joined, "extra_info": {"index": identity}},
        "r1_searcher": {"idx": identity, "question": question, "answer": golds[0] if len(golds) == 1 else golds},
    }


@given(words, plain, golds_lists)
def test_every_format_gives_the_same_question(identity, question, golds):
    expected = Question(identity, question, tuple(golds), (), "set")
    for name, row in rows_of(identity, question, golds).items():
        assert detect_format(row) == name
        assert PARSERS[name](row, "set", 1) == expected


@given(st.sampled_from(sorted(PARSERS)), st.data())
def test_a_damaged_row_is_a_row_error_or_a_whole_question(name, data):
    """Any JSON value in any place: never another exception, never a question without text or golds."""
    row = rows_of("1", "who?", ["a", "b"])[name]
    field = data.draw(st.sampled_from(sorted(row)))
    value = data.draw(json_values)
    if isinstance(row[field], dict) and data.draw(st.booleans()):
        row = row | {field: row[field] | {data.draw(st.sampled_from(sorted(row[field]))): value}}
    else:
        row = row | {field: value}
    try:
        question = PARSERS[detect_format(row)](row, "set", 1)
    except RowError as error:
        assert error.field and error.problem and error.mend and "\n" not in error.field
    else:
        assert question.question.strip() and question.golds and all(isinstance(g, str) and g.strip() for g in question.golds)


@pytest.mark.parametrize(
    "golds, field",
    [
        ([], "golden_answers"),
        ("Paris", "golden_answers"),
        (["Paris", 3], "golden_answers[1]"),
        (["Paris", None], "golden_answers[1]"),
        (["  "], "golden_answers[0]"),
        (["\ud800"], "golden_answers[0]"),
        (None, "golden_answers"),
        ({"a": 1}, "golden_answers"),
    ],
)
def test_golds_must_be_a_non_empty_list_of_non_empty_strings(tmp_path, golds, field):
    path = tmp_path / "q.jsonl"
    good = {"id": "1", "question": "q?", "golden_answers": ["a"]}
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({"id": "2", "question": "q?", "golden_answers": golds}) + "\n")
    with pytest.raises(UserError) as caught:
        load_questions(path)
    message = str(caught.value)
    assert str(path) in message and "line 3" in message and f"'{field}'" in message and ";" in message and "\n" not in message


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"question": "q", "golden_answers": ["a"]}', "'id' is missing"),
        ('{"id": "2", "golden_answers": ["a"]}', "'question' is missing"),
        ('{"id": "2", "question": " ", "golden_answers": ["a"]}', "'question' is empty"),
        ('{"id": "1", "question": "q", "golden_answers": ["a"]}', "'1' was used on line 1 already"),
        ('{"id": "2", "question": "q", "golden_answers": ["a"], "metadata": {"gold_ids": "4"}}', "'metadata.gold_ids'"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, said):
    path = tmp_path / "q.jsonl"
    path.write_text('{"id": "1", "question": "q?", "golden_answers": ["a"]}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2") as caught:
        load_questions(path)
    assert said in str(caught.value)


def test_bytes_that_are_not_text_are_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"id": "1", "question": "\xff", "golden_answers": ["a"]}\n')
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        load_questions(path)


def test_only_newline_ends_a_line(tmp_path):
    """U+2028, U+0085, vertical tab and form feed are text, a carriage return before the newline and a BOM are not."""
    question = "one\u2028two\u2029three\u0085four"
    row = {"id": "1", "question": question, "golden_answers": ["x\u2028y"]}
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + (json.dumps(row, ensure_ascii=False) + "\r\n" + json.dumps(row | {"id": "2"})).encode())
    loaded = load_questions(path)
    assert [q.question for q in loaded] == [question, question] and loaded[0].golds == ("x\u2028y",)


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.parquet"])
def test_empty_files_are_refused(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"id": pa.array([], pa.string())}), path)
    else:
        path.write_bytes(gzip.compress(b"\n") if name.endswith("gz") else b"\n")
    with pytest.raises(UserError, match="is empty"):
        load_questions(path)


def test_broken_containers_are_refused(tmp_path):
    (tmp_path / "q.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(b'{"id": "1", "question": "q", "golden_answers": ["a"]}\n')[:-9])
    (tmp_path / "q.csv").write_text("id,question\n")
    for name, said in (
        ("q.parquet", "not a parquet"),
        ("q.jsonl.gz", "gzip"),
        ("q.csv", "not one of"),
        ("none.jsonl", "no question file"),
    ):
        with pytest.raises(UserError, match=said):
            load_questions(tmp_path / name)


def test_a_parquet_file_that_is_damaged_is_named(tmp_path):
    rows = [{"id": str(n), "question": f"who is number {n}?", "golden_answers": ["somebody"]} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "good.parquet", compression="snappy")
    good = (tmp_path / "good.parquet").read_bytes()
    flipped = bytearray(good)
    flipped[good.index(b"who is number")] ^= 0xFF  # now no UTF-8
    broken = good[:4] + bytes(byte ^ 0x55 for byte in good[4:200]) + good[200:]  # pages and their headers
    for name, data, said in (("text", bytes(flipped), "not UTF-8"), ("broken", broken, "damaged parquet")):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(data)
        for read in (load_questions, read_questions):
            with pytest.raises(UserError, match=rf"{name}\.parquet, after row 0: .*{said}"):
                read(path)


def test_bad_parquet_row_is_named(tmp_path):
    rows = [{"data_source": "nq", "question": "q?", "reward_model": {"ground_truth": {"target": t}}} for t in (["a"], ["b"], [])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    with pytest.raises(UserError, match=r"row 3: field 'reward_model.ground_truth.target' is an empty list"):
        load_questions(tmp_path / "q.parquet")


def test_fixture_flashrag():
    questions = load_questions(FIXTURES / "flashrag.jsonl")
    assert len(questions) == 5
    assert questions[0] == Question(
        "2hop__574419_270105",
        "What is the seat of the county where Van Hook Township is located?",
        ("Stanley",),
        ("15893", "15900"),
        "flashrag",
    )


def test_fixture_search_r1_has_ids_that_repeat_across_sets():
    questions = load_questions(FIXTURES / "search_r1.parquet")
    assert [(q.dataset, q.id) for q in questions] == [(d, f"train_{i}") for d in ("nq", "hotpotqa") for i in range(3)]
    assert questions[0].golds == ("May 18, 2018",) and questions[3].golds == ("a spirit",)


def test_search_r1_without_question_column_reads_the_instruction():
    content = "Answer the given question. For example, <answer> Beijing </answer>. Question: who wrote it?\n"
    row = {"prompt": [{"role": "user", "content": content}], "reward_model": {"ground_truth": {"target": "x"}}, "data_source": "NQ"}
    assert PARSERS["search_r1"](row, "d", 7) == Question("row_7", "who wrote it?", ("x",), (), "nq")
    row["prompt"][0]["content"] = "no marker <answer> Beijing </answer>"
    with pytest.raises(RowError, match="without 'Question:'"):
        PARSERS["search_r1"](row, "d", 7)


def test_fixture_verl():
    questions = load_questions(FIXTURES / "verl.parquet")
    assert len(questions) == 6
    assert questions[0].dataset == "triviaqa" and questions[0].id == "tq_qg_3477" and len(questions[0].golds) == 26
    assert all(ANSWER_SEPARATOR not in gold for q in questions for gold in q.golds)


def test_fixture_r1_searcher():
    questions = load_questions(FIXTURES / "r1_searcher.jsonl")
    assert len(questions) == 4 and questions[0].id == "1" and questions[0].golds == ("james madison",)


def test_names():
    assert [canonical_name(n) for n in ("2wiki", "Bamboogle", "tq", "my_set")] == [
        "2wikimultihopqa",
        "bamboogle",
        "triviaqa",
        "my_set",
    ]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the larger public samples are not beside this checkout")
@pytest.mark.parametrize(
    "path, rows",
    [
        ("deepresearcher_qa7/test.parquet", 2232),
        ("deepresearcher_qa7/dev.parquet", 608),
        ("r1searcher/train_stage_2.jsonl", 5691),
        ("qa7/hotpotqa/test.jsonl", 5237),
        ("qa7/nq/test.jsonl", 2681),
        ("qa7/triviaqa/test.jsonl", 550),
        ("wiki_multihop/popqa/test.jsonl", 717),
        ("format_samples/flashrag_nq_test.jsonl", 17),
    ],
)
def test_whole_public_files_are_accepted(path, rows):
    assert len(read_file(SHARED / path, "set")) == rows
