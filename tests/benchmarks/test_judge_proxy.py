"""The proxy between a run and its judge, before a server that answers at once: what it passes on, counts and spoils."""

import http.client
import http.server
import json
import threading
import time
import urllib.parse

import judge
import pytest


@pytest.fixture
def proxy(monkeypatch):
    """-> the proxy of a server that says what it was asked, and is busy for questions of "500"."""

    class Echo(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(503 if b"500" in body else 200)
            self.end_headers()
            self.wfile.write(self.path.encode() + b" " + body)

        def log_message(self, *_):
            pass

    monkeypatch.setattr(judge, "SLOW", 0.2)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with judge.Proxy(f"http://127.0.0.1:{server.server_port}/v1") as made:
        yield made
    server.shutdown()
    server.server_close()


def ask(proxy, text):
    """-> (status, body, seconds to wait), or None where the connection was cut."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(proxy.url).netloc, timeout=10)
    try:
        connection.request("POST", "/v1/chat/completions", text)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers["Retry-After"]
    except (ConnectionError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def test_what_is_answered_is_passed_on_and_counted(proxy):
    assert ask(proxy, "a") == ask(proxy, "a") == (200, b"/v1/chat/completions a", None)
    assert ask(proxy, "b")[:2] == (200, b"/v1/chat/completions b")
    assert ask(proxy, "500")[0] == 503
    proxy.idle()
    assert proxy.answered == {b"a": 2, b"b": 1} and proxy.total() == 3 and not proxy.met


def test_every_fault_comes_in_its_turn(proxy):
    proxy.faults = True
    took, met = {}, []
    for number in range(judge.EVERY * len(judge.FAULTS)):
        began = time.monotonic()
        said = ask(proxy, f"{number}")
        if (number + 1) % judge.EVERY:
            assert said == (200, f"/v1/chat/completions {number}".encode(), None)
        else:
            met.append(said)
            took[len(met)] = time.monotonic() - began
    proxy.idle()
    cut, no_completion, slow, busy, no_choices, too_many = met
    assert cut is None
    assert no_completion[0] == 200 and no_completion[1].startswith(b"<html>")
    assert slow[:2] == (200, b"/v1/chat/completions 11") and took[3] >= 0.2
    assert busy[0] == 500 and too_many[0] == 429 and busy[2] == too_many[2] == "0.5"
    assert no_choices[0] == 200 and json.loads(no_choices[1])["choices"] == []
    assert proxy.met == dict.fromkeys(judge.FAULTS, 1)
    # Of each round of faults one is only late: what it was asked is answered.
    assert proxy.total() == len(proxy.answered) == judge.EVERY * len(judge.FAULTS) - len(judge.FAULTS) + 1


def test_a_server_that_went_away_answers_nothing(proxy):
    proxy.down = True
    assert ask(proxy, "a") is None and ask(proxy, "a") is None
    proxy.down = False
    assert ask(proxy, "a")[0] == 200
    proxy.idle()
    assert proxy.answered == {b"a": 1} and not proxy.met
