"""HTTP answers that end: each has a deadline and a largest size. For clients of servers that may be broken.

    session = open_session()
    answer = send(session, "GET", "http://localhost:8000/index", timeout=60.0, largest=1 << 20)

`requests` by itself counts its timeout anew with every byte that comes, so a server that trickles would hold a run for ever.
"""

from __future__ import annotations

import http.client
import io
import re
import time

import requests
import urllib3
from requests.adapters import HTTPAdapter

PIECE = 1 << 16


class BadAnswer(requests.RequestException):
    """An answer that cannot be read or kept; its text says why."""


def open_session() -> requests.Session:
    """A session for `send`, and for one thread."""
    session = requests.Session()
    session.max_redirects = 5  # each has the deadline anew
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter())
    return session


def send(session: requests.Session, method: str, url: str, *, timeout, largest: int, **options) -> requests.Response:
    """The whole answer, of any status.

    timeout: seconds, or (to connect, for the answer), from the request's last byte to the answer's; every redirect begins anew.
    largest: bytes of the answer's body, unpacked.

    Raises:
      requests.RequestException: there is no such answer, whatever the reason; ReadTimeout when it takes too long.
    """
    try:
        with session.request(method, url, timeout=timeout, stream=True, **options) as answer:
            body = bytearray()
            for piece in answer.iter_content(PIECE):
                body += piece
                if len(body) > largest:
                    raise BadAnswer(f"an answer of more than {largest:,} bytes")
    except requests.ConnectionError as error:
        if error.args and isinstance(error.args[0], urllib3.exceptions.ReadTimeoutError):  # what `requests` makes of it in a body
            raise requests.ReadTimeout(*error.args) from error
        raise
    except requests.RequestException:
        raise
    except (ValueError, urllib3.exceptions.HTTPError) as error:  # headers, or a redirect's address, that make no sense
        raise BadAnswer(f"an answer that cannot be read ({error})") from error
    answer._content = bytes(body)  # where `requests` keeps what it has read by itself
    answer.encoding = "utf-8-sig"  # JSON's; a charset of the server's own choice may be none, or not one of text
    return answer


def whole(text: str) -> str:
    """Half a surrogate pair, which JSON can escape and UTF-8 cannot write, becomes U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


class _UntilDeadline(io.RawIOBase):
    """A socket's bytes, up to as many seconds from now as its timeout says for each read."""

    def __init__(self, raw: io.RawIOBase, sock):
        self._raw, self._sock = raw, sock
        seconds = sock.gettimeout()
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """Made when the request is sent, with the timeout for reading set on the socket."""

    def __init__(self, sock, *args, **options):
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_UntilDeadline(self.fp.detach(), sock))


class _Plain(urllib3.connection.HTTPConnection):
    response_class = _Response


class _Secure(urllib3.connection.HTTPSConnection):
    response_class = _Response


class _Adapter(HTTPAdapter):
    def get_connection_with_tls_context(self, *args, **options):
        pool = super().get_connection_with_tls_context(*args, **options)
        pool.ConnectionCls = _Secure if pool.scheme == "https" else _Plain
        return pool
