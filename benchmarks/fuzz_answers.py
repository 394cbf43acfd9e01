"""What servers and models answer, for `fuzz_targets.py`: chat completions, errors, a judge's scores and verdicts."""

from __future__ import annotations

import json

import requests

from bridge_jax import endpoint
from bridge_jax.evaluation import judge
from bridge_jax.retrieval import client
from bridge_jax.training import relevance

COUNT = 3  # passages in a judge's list
WORDS = [
    '{"choices": [{"message": {"content": "', '"}, "finish_reason": "length"}], "usage": {"prompt_tokens": 1', '"why": ',
    '{"error": {"message": "', '{"detail": [{"msg": "', '{"detail": "', '{"score": 4, "why": "', '"score": ',
    '"completion_tokens": ', "<scores>", "</scores>", "<sub_answer>", "</sub_answer>", "<scores>70, 0, 100</scores>", "70", ", ",
]  # fmt: skip


def answered(body: bytes, status: int) -> requests.Response:
    """As `bounded_http.send` returns it."""
    answer = requests.Response()
    answer.status_code, answer._content, answer.reason, answer.encoding = status, body, "none", "utf-8-sig"
    return answer


def check(text: str, body: bytes) -> None:
    """A body -> a reply that can be written as JSON in UTF-8, or none; words of an error; scores in their range, or none."""
    reply = endpoint._parse(answered(body, 200), 0.5)
    for said in (reply.text if reply else "", endpoint._message(answered(body, 400)), client._detail(answered(body, 503))):
        said.encode()
    if reply is not None:
        json.dumps(reply.__dict__, ensure_ascii=False, allow_nan=False).encode()
        assert reply.finish in ("stop", "length") and isinstance(reply.tokens, int)
    scores = relevance.read_scores(text, COUNT)
    assert scores is None or (len(scores) == COUNT and all(0 <= score <= 100 for score in scores))
    assert isinstance(relevance.read_sub_answer(text), str)
    verdict = judge.read_verdict(text)
    assert verdict is None or (0 <= verdict[0] <= judge.HIGHEST and isinstance(verdict[1], str))
