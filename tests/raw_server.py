"""A server that says bytes, over a socket: a library's server would not misbehave like this."""

import contextlib
import socket
import threading

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@contextlib.contextmanager
def saying(at_once, trickled=b"", pause=0.05):
    """-> the address of a server that answers every connection so, the second part byte by byte."""
    ended = threading.Event()

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(at_once)
            for byte in trickled:
                if ended.wait(pause):
                    return
                connection.sendall(bytes([byte]))

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
