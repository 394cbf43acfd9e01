"""The endpoint's client over real HTTP: retries, refusals, the cache, what is counted, and where the key never goes."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time

import pytest
from raw_server import HEAD, saying
from stub_server import serve

from bridge_jax import endpoint as endpoints
from bridge_jax.endpoint import Endpoint, EndpointDown
from bridge_jax.errors import INTERRUPTED, UserError
from bridge_jax.rollout.generators import EndpointGenerator


def ask(text, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 16, **more}


def echo(body):
    return body["messages"][-1]["content"].upper()


def failing(times, failure, then=echo):
    left = {"n": times}

    def answer(body):
        left["n"] -= 1
        return failure if left["n"] >= 0 else then(body)

    return answer


def test_answers_in_order_several_at_a_time(tmp_path):
    def slow(body):
        time.sleep(0.05)
        return echo(body)

    with serve(slow) as (stub, url):
        endpoint = Endpoint(url, "m", concurrency=4, price=(2.0, 10.0))
        said = endpoint.complete_many([ask(f"word {n}", stop=("x", "y")) for n in range(12)])
    assert [one.text for one in said] == [f"WORD {n}" for n in range(12)]
    assert 2 <= stub.most <= 4
    assert stub.requests[0]["model"] == "m" and stub.requests[0]["temperature"] == 0.0 and stub.requests[0]["stop"] == ["x", "y"]
    spent = endpoint.spent()
    assert (spent["requests"], spent["retries"], spent["prompt_tokens"], spent["tokens"]) == (12, 0, 24, 24)
    assert spent["dollars"] == pytest.approx((24 * 2 + 24 * 10) / 1e6)


@pytest.mark.parametrize(
    "failure",
    [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "0.01"}),
        (503, b"<html>busy</html>", {}),
        (200, b"no json", {}),
        (200, {"choices": []}, {}),
        (200, b"[" * 5000, {}),
        (503, b"[" * 5000, {}),
        (200, b'{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 1e999}}', {}),
        (200, b"no gzip", {"Content-Encoding": "gzip"}),
        (200, b"no json", {"Content-Type": "application/json; charset=undefined"}),
        (307, {}, {"Location": "ftp://x/"}),
        (429, {}, {"Retry-After": "nan"}),
    ],
)
def test_what_passes_is_tried_again(failure):
    with serve(failing(2, failure)) as (stub, url):
        endpoint = Endpoint(url, "m", first_wait=0.001, retries=2)
        assert endpoint.complete_many([ask("a")])[0].text == "A"
    assert len(stub.requests) == 3 and endpoint.spent()["retries"] == 2


def test_redirects_without_end_are_a_failure():
    with serve(lambda body: (307, {}, {"Location": "/v1/chat/completions"})) as (_, url):
        endpoint = Endpoint(url, "m", retries=1, first_wait=0.001)
        with pytest.raises(EndpointDown, match="failed 2 times, at last with TooManyRedirects"):
            endpoint.complete_many([ask("a")])


def test_a_server_that_trickles_or_does_not_end_is_a_failure(monkeypatch):
    monkeypatch.setattr(endpoints, "LARGEST", 1000)
    with serve(lambda body: (200, 1001 * b" ", {})) as (_, url), pytest.raises(EndpointDown, match="more than 1,000 bytes"):
        Endpoint(url, "m", retries=0).complete_many([ask("a")])
    with saying(HEAD, 1000 * b" ") as url, pytest.raises(EndpointDown, match="failed 2 times, at last with ReadTimeout"):
        Endpoint(f"{url}/v1", "m", retries=1, first_wait=0.001, timeout=0.4).complete_many([ask("a")])


def test_half_a_surrogate_pair_is_replaced_and_kept(tmp_path):
    def answer(body):
        asked = body["messages"][0]["content"]
        return (400, b'{"error": "too long: \\udfff"}', {}) if asked == "long" else "a \ud800 b \U0001f600"

    with serve(answer) as (stub, url):
        said = Endpoint(url, "m", cache=tmp_path / "said.jsonl").complete_many([ask("a"), ask("long")])
        assert [(one.text, one.problem) for one in said] == [("a \ufffd b \U0001f600", ""), ("", "too long: \ufffd")]
        assert Endpoint(url, "m", cache=tmp_path / "said.jsonl").complete_many([ask("a"), ask("long")]) == said
    assert len(stub.requests) == 2


def test_a_refusal_that_is_nested_without_end_is_told():
    with serve(lambda body: (400, b"[" * 5000, {})) as (_, url), pytest.raises(UserError, match=r"refuses model 'm'.*400: \[\[\["):
        Endpoint(url, "m").complete_many([ask("a")])


def test_ctrl_c_does_not_wait_for_an_endpoint_that_hangs(tmp_path):
    program = """
import signal
import sys
from pathlib import Path
from bridge_jax.endpoint import Endpoint
from bridge_jax.errors import main_guard

@main_guard
def main(url, cache):
    asked = [{"messages": [{"role": "user", "content": text}], "max_tokens": 16} for text in ("a", "hang", "down", "b", "hang")]
    Endpoint(url, "m", cache=Path(cache), concurrency=2, first_wait=50).complete_many(asked)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests in the background
sys.exit(main(*sys.argv[1:]))
"""
    ended, came = threading.Event(), threading.Semaphore(0)

    def answer(body):
        text = body["messages"][0]["content"]
        came.release()
        if text == "hang":
            ended.wait(60)
        return (500, {}, {}) if text == "down" else echo(body)

    cache = tmp_path / "said.jsonl"
    with serve(answer) as (_, url):
        command = [sys.executable, "-c", program, url, str(cache)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            try:
                assert all(came.acquire(timeout=30) for _ in range(3))  # one hangs, the other is waiting to be tried again
                assert "status 500; attempt 2" in running.stderr.readline()
                began = time.monotonic()
                running.send_signal(signal.SIGINT)
                assert running.wait(20) == 130 and time.monotonic() - began < 10  # a second; the request would take 60
                assert running.stderr.read() == f"{INTERRUPTED}\n"
            finally:
                running.kill()
                ended.set()
    assert [json.loads(line)["text"] for line in cache.read_text().splitlines()] == ["A"]


def test_a_retry_waits_as_long_as_the_server_says():
    with serve(failing(1, (429, {}, {"Retry-After": "0.3"}))) as (_, url):
        began = time.monotonic()
        Endpoint(url, "m", first_wait=0.001).complete_many([ask("a")])
    assert time.monotonic() - began >= 0.3


def test_one_that_stays_down_loses_nothing(tmp_path):
    down = {"now": False}

    def answer(body):
        return (500, {"error": "gone"}, {}) if down["now"] else echo(body)

    cache = tmp_path / "said.jsonl"
    with serve(answer) as (stub, url):
        Endpoint(url, "m", cache=cache).complete_many([ask("a"), ask("b")])
        down["now"] = True
        endpoint = Endpoint(url, "m", cache=cache, retries=1, first_wait=0.001)
        assert [one.text for one in endpoint.complete_many([ask("b"), ask("a")])] == ["B", "A"]  # known: nobody is asked
        with pytest.raises(EndpointDown, match=r"failed 2 times.*status 500.*goes on"):
            endpoint.complete_many([ask("a"), ask("c")])
        down["now"] = False
        with cache.open("a") as file:
            file.write('{"request": "half a li')  # killed while writing
        again = Endpoint(url, "m", cache=cache)
        before = len(stub.requests)
        assert [one.text for one in again.complete_many([ask("a"), ask("c"), ask("c", vote=1)])] == ["A", "C", "C"]
        assert len(stub.requests) - before == 2 and again.spent()["cached"] == 1
        assert len(Endpoint(url, "other", cache=cache).complete_many([ask("a")])) == 1 and len(stub.requests) - before == 3
    with pytest.raises(EndpointDown, match="ConnectionError"):
        Endpoint(url, "m", retries=0).complete_many([ask("a")])
    cache.write_text(cache.read_text() + "[]\n")
    with pytest.raises(UserError, match=r"said\.jsonl, line 6"):
        Endpoint(url, "m", cache=cache)


def test_refusals():
    limit = "This model's maximum context length is 4096 tokens"
    with serve(lambda body: (401, {"error": {"message": "bad key sk-secret"}}, {})) as (_, url):
        with pytest.raises(UserError, match="refuses the key") as told:
            Endpoint(url, "m", key="sk-secret").complete_many([ask("a")])
        assert "sk-secret" not in str(told.value) and "***" in str(told.value)
    with (
        serve(lambda body: (404, {"detail": "no such model"}, {})) as (_, url),
        pytest.raises(UserError, match=r"refuses model 'm'.*no such model"),
    ):
        Endpoint(url, "m").complete_many([ask("a")])

    def narrow(body):
        return (400, {"error": {"message": limit}}, {}) if "long" in body["messages"][0]["content"] else echo(body)

    with serve(narrow) as (stub, url):
        said = Endpoint(url, "m", concurrency=1).complete_many([ask("a"), ask("long"), ask("b")])
        assert [(one.text, one.finish) for one in said] == [("A", "stop"), ("", "too_long"), ("B", "stop")]
        assert said[1].problem == limit and len(stub.requests) == 3
    for flags, words in (
        ({"url": "localhost:8000"}, "http://"),
        ({"url": "https://me:hunter2@x/v1"}, "leave name and password out"),
        ({"url": "http://x/v1", "concurrency": 0}, "--concurrency"),
        ({"url": "http://x/v1", "timeout": 0}, "--timeout=0"),
        ({"url": "http://x/v1", "timeout": -1.0}, "--timeout=-1"),
        ({"url": "http://x/v1", "timeout": float("nan")}, "--timeout=nan"),
        ({"url": "http://x/v1", "timeout": float("inf")}, "--timeout=inf"),
        ({"url": "http://x/v1", "key": "sk-secret\n"}, "--key-env"),
    ):
        with pytest.raises(UserError, match=words) as told:
            Endpoint(model="m", **flags)
        assert "sk-secret" not in str(told.value)


def test_a_server_that_wants_the_other_limit():
    def answer(body):
        if "max_tokens" in body:
            return 400, {"error": {"message": "'max_tokens' is not supported: use 'max_completion_tokens'"}}, {}
        return echo(body)

    with serve(answer) as (stub, url):
        endpoint = Endpoint(url, "m", concurrency=1)
        assert [one.text for one in endpoint.complete_many([ask("a"), ask("b")])] == ["A", "B"]
    assert ["max_completion_tokens" in body for body in stub.requests] == [False, True, True]
    assert endpoint.spent()["retries"] == 0


def test_a_reasoning_models_thoughts_are_no_answer():
    said = {"a": "<think>\n\nOslo? No.\n\n</think>\n\nLyon\n\nBecause", "b": "\n\n Oslo </answer> x", "c": "<think> never done"}
    with serve(lambda body: said[body["messages"][0]["content"]]) as (stub, url):
        generator = EndpointGenerator(Endpoint(url, "m"))
        got = [reply.text for reply in generator.generate(list(said), stops=("</answer>", "\n\n"), max_tokens=9)]
    assert got == ["Lyon", "Oslo </answer>", "<think> never done"]
    assert all(body["stop"] == ["</answer>"] for body in stub.requests)


def test_the_key_is_sent_and_nowhere_else(tmp_path, caplog):
    cache = tmp_path / "said.jsonl"
    with serve(failing(1, (500, {"error": "sk-secret"}, {}))) as (stub, url), caplog.at_level(logging.DEBUG):
        endpoint = Endpoint(url, "m", key="sk-secret", cache=cache, first_wait=0.001)
        endpoint.complete_many([ask("a")])
    assert all(headers["Authorization"] == "Bearer sk-secret" for headers in stub.headers)
    assert "sk-secret" not in cache.read_text() + caplog.text + json.dumps([endpoint.describe(), endpoint.spent()])
