"""The judge against a stub that behaves, babbles, and goes down; agreement against closed forms."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_server import serve

from bridge_jax import judge as command
from bridge_jax.endpoint import Endpoint
from bridge_jax.errors import UserError
from bridge_jax.evaluation.judge import agreement, judge, prompt_of, read_verdict


def record(id, text, **more):
    trace = [{"kind": "information", "text": "a secret passage"}, {"kind": "generated", "text": text}]
    return {"id": id, "dataset": "nq", "question": f"Who is {id}?", "prediction": "x", "trace": trace, "em": 1.0, **more}


PREDICTIONS = {
    "nq": [record("a", "GRADE 4"), record("b", "GRADE 1"), record("c", "BABBLE")],
    "medqa": [record("d", "GRADE 2", options={"A": "yes", "B": "no"})],
}


def grade(body):
    """Grades by the trace; of babble it answers nonsense first, and JSON when asked again; SILENT is never graded."""
    text = body["messages"][0]["content"]
    if "SILENT" in text or ("BABBLE" in text and len(body["messages"]) == 1):
        return "I'd say it is rather good."
    score = 3 if "BABBLE" in text else int(text.split("GRADE ")[1][0])
    return f'Here: {{"why": "because", "score": {score}}}'


def test_grades_without_the_passages():
    with serve(grade) as (stub, url):
        found = judge(Endpoint(url, "m"), PREDICTIONS)
    texts = [body["messages"][0]["content"] for body in stub.requests]
    assert len(texts) == 5 and not any("secret" in text for text in texts) and all("[passages]" in text for text in texts)
    assert any("Who is d?\nA. yes\nB. no" in text for text in texts)
    assert found["datasets"]["nq"]["quality"] == pytest.approx(25 * (4 + 1 + 3) / 3)
    assert found["averages"]["overall"]["quality"] == pytest.approx(25 * ((4 + 1 + 3) / 3 + 2) / 2)
    assert (found["datasets"]["nq"]["unjudged"], found["agreement"], found["down"]) == (0, None, None)
    assert found["scores"]["nq"]["a"] == {"votes": [4], "why": ["because"]}


def test_nonsense_is_asked_again_once_and_then_counted():
    with serve(grade) as (stub, url):
        found = judge(Endpoint(url, "m"), {"nq": [record("a", "SILENT"), record("b", "GRADE 0")]})
    assert len(stub.requests) == 3 and found["datasets"]["nq"]["unjudged"] == 1 and found["datasets"]["nq"]["quality"] == 0.0
    with pytest.raises(UserError, match="--votes"):
        judge(Endpoint(url, "m"), PREDICTIONS, votes=0)


def test_votes_are_asked_apart():
    turn = itertools.count()

    def wavering(body):
        return json.dumps({"why": "", "score": next(turn) % 2 + 2})

    with serve(wavering) as (stub, url):
        found = judge(Endpoint(url, "m", concurrency=1), {"nq": PREDICTIONS["nq"][:2]}, votes=3)
    assert len(stub.requests) == 6 and {body["temperature"] for body in stub.requests} == {0.7}
    assert found["scores"]["nq"]["a"]["votes"] == [2, 3, 2] and found["agreement"]["questions"] == 2


def test_the_command_goes_on_where_its_judge_left(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    rows = [record(f"q{n}", f"GRADE {n % 5}") for n in range(10)]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"datasets": {}, "predictions": {"nq": rows}}))
    calls = itertools.count()

    def leaving(body):
        return (500, {}, {}) if next(calls) >= 6 else grade(body)

    flags = [f"--result={path}", "--model=a/judge", "--concurrency=1", "--retries=0"]
    with serve(leaving) as (_, url):
        assert command.main([*flags, f"--endpoint={url}"]) == 1
        out = " ".join(capsys.readouterr().out.split())
        assert "the judge was left" in out and url in out
    kept = json.loads((tmp_path / "result.judge-a-judge.json").read_text())
    assert kept["down"] and len(kept["scores"]["nq"]) == 4  # whole batches; the other two answers are kept as well
    assert len((tmp_path / "result.judge-a-judge.requests.jsonl").read_text().splitlines()) == 6
    with serve(grade, port=int(url.split(":")[2].split("/")[0])) as (stub, url):
        assert command.main([*flags, f"--endpoint={url}"]) == 0
        assert command.main([*flags, f"--endpoint={url}"]) == 0  # nothing is asked again
        assert len(stub.requests) == 4
    kept = json.loads((tmp_path / "result.judge-a-judge.json").read_text())
    assert kept["datasets"]["nq"]["quality"] == pytest.approx(50.0) and kept["endpoint"]["requests"] == 0
    path.write_text("{}")
    assert command.main([*flags, f"--endpoint={url}"]) == 2
    assert "not the result of an evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"why": "x", "score": 4}', (4, "x")),
        ('```json\n{"score": 0, "why": "x"}\n```', (0, "x")),
        ('{"why": "x", "score": 5}', None),
        ('{"why": "x", "score": true}', None),
        ('{"why": "x", "score": 2.5}', None),
        ('{"score": 2}', None),
        ('{"why": 1, "score": 2}', None),
        ("score: 3", None),
        ("", None),
    ],
)
def test_read_verdict(text, expected):
    assert read_verdict(text) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_read_verdict_never_raises(text):
    assert read_verdict(text) is None or text


def test_a_trace_with_braces_and_none():
    row = record("a", "GRADE {question} {trace}")
    assert "GRADE {question} {trace}" in prompt_of(row)
    assert "(nothing)" in prompt_of(row | {"trace": []})


def test_agreement_by_hand():
    assert agreement([[1], [2]]) is None
    got = agreement([[4, 4], [0, 1], [2, 4]])
    assert (got["exact"], got["within_one"], got["questions"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3), 3)
    # Krippendorff's alpha from coincidences, written out
    units, values = [[4, 4], [0, 1], [2, 4]], np.asarray([4, 4, 0, 1, 2, 4], float)
    observed = np.mean([(a - b) ** 2 for unit in units for a, b in (unit, unit[::-1])])
    expected = np.mean([(values[i] - values[j]) ** 2 for i in range(6) for j in range(6) if i != j])
    assert got["alpha"] == pytest.approx(1 - observed / expected)
    assert agreement([[3, 3], [3, 3]])["alpha"] is None and agreement([[0, 0], [4, 4]])["alpha"] == 1.0
