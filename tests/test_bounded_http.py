"""HTTP answers that end: over sockets, which trickle, go on for ever and talk nonsense."""

import socket
import threading
import time

import pytest
import requests
from raw_server import HEAD, saying

from bridge_jax import bounded_http

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n"


def get(url, timeout=0.4, largest=1 << 20):
    return bounded_http.send(bounded_http.open_session(), "GET", url, timeout=timeout, largest=largest)


@pytest.mark.parametrize("at_once", [b"", HEAD, CHUNKED], ids=["headers", "body", "chunk"])
def test_a_server_that_trickles_is_left_at_the_deadline(at_once):
    began = time.monotonic()
    with saying(at_once, (b"" if at_once else HEAD) + 1000 * b"x") as url, pytest.raises(requests.ReadTimeout):
        get(url)
    assert 0.3 < time.monotonic() - began < 5  # at 0.05 s a byte it would be 50 s


def test_a_slow_answer_within_the_deadline_is_whole():
    with saying(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"hello", pause=0.02) as url:
        answer = get(url, timeout=20)
    assert (answer.status_code, answer.content, answer.text) == (200, b"hello", "hello")


def test_every_answer_of_a_kept_connection_has_a_deadline_of_its_own():
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    def answer():
        connection, _ = server.accept()
        with connection:
            for _ in range(4):
                connection.recv(1 << 16)
                time.sleep(0.4)
                connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as server, bounded_http.open_session() as session:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(4):
            assert bounded_http.send(session, "GET", url, timeout=1.3, largest=2).content == b"ok"
        thread.join(5)


def test_an_answer_without_end_is_left():
    with (
        saying(b"HTTP/1.1 200 OK\r\n\r\n" + (1 << 18) * b"x", 1000 * b"x") as url,
        pytest.raises(bounded_http.BadAnswer, match="more than 100,000 bytes"),
    ):
        get(url, timeout=20, largest=100_000)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 308 Go\r\nLocation: http://[\r\n",
        b"HTTP/1.1 308 Go\r\nLocation: ftp://x/\r\n",
        b"HTTP/1.1 308 Go\r\nLocation: /\r\nConnection: close\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2, 3\r\n",
        b"no http\r\n",
    ],
)
def test_whatever_fails_is_of_one_kind(head):
    with saying(head + b"\r\n") as url, pytest.raises(requests.RequestException):
        get(url, timeout=5)
