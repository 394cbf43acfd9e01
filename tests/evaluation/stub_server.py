"""A chat endpoint in this process, over real HTTP: what it answers is a function of the request, and it can be made to fail."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub:
    """answer: request body -> text, or (status, body, headers) to fail with. Requests that came are kept, with their headers."""

    def __init__(self, answer):
        self.answer = answer
        self.requests, self.headers = [], []
        self.together, self.most = 0, 0
        self.lock = threading.Lock()

    def handle(self, body, headers):
        with self.lock:
            self.requests.append(body)
            self.headers.append(headers)
            self.together += 1
            self.most = max(self.most, self.together)
        try:
            said = self.answer(body)
        except AssertionError as error:  # a test's own: not a failure to be tried again
            said = 418, {"error": f"assertion failed: {error}"}, {}
        finally:
            with self.lock:
                self.together -= 1
        if isinstance(said, tuple):
            return said
        read = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": read, "completion_tokens": len(said.split())}
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}, {}


@contextlib.contextmanager
def serve(answer, port=0):
    """-> (the stub, its address up to /v1)."""
    stub = Stub(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            status, content, headers = stub.handle(body, dict(self.headers))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
