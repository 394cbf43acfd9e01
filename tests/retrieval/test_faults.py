"""A run whose index is on a server that is away, comes back, or answers something else; files that change under it."""

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

from bridge_jax.errors import UserError
from bridge_jax.retrieval import client as clients
from bridge_jax.retrieval import corpus as corpora
from bridge_jax.retrieval import manifest as manifests
from bridge_jax.retrieval import vectors, wire
from bridge_jax.retrieval.client import Client, RemoteIndex
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.device_index import DeviceIndex
from bridge_jax.retrieval.mapped import FileChanged
from bridge_jax.retrieval.retriever import RetrievalFault

ROWS, DIM = 20, 4
VECTORS = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
MANIFEST = manifests.Manifest("tiny", "weights", "mean", "", "", 64, DIM, ROWS, "corpus.jsonl", "passages", "exact")
HTML = b"<html><body>502 Bad Gateway</body></html>" * 3


def search(body, k):
    scores = np.frombuffer(body, "<f4").reshape(-1, DIM) @ VECTORS.T
    rows = np.argsort(-scores, axis=-1)[:, :k]
    return np.take_along_axis(scores, rows, -1), rows


class Handler(http.server.BaseHTTPRequestHandler):
    """An index server in plain Python. `says`: path -> bytes or a function of the right answer; `headers` of numbers."""

    says: ClassVar[dict] = {}
    headers_sent: ClassVar[dict] = {wire.INDEX: manifests.fingerprint(MANIFEST)}
    status = 200

    def do_GET(self):
        self.answer(self.says.get("/index", json.dumps(manifests.dataclasses.asdict(MANIFEST)).encode()), {})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        path, _, k = self.path.partition("?k=")
        if path == "/search":
            right = wire.write_hits(*search(body, int(k)))
        else:
            right = wire.write_vectors(VECTORS[np.frombuffer(body, "<i8")])
        said = self.says.get(path, right)
        self.answer(said(right) if callable(said) else said, self.headers_sent)

    def answer(self, body, headers):
        self.send_response(self.status)
        for name, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(port=0, **attributes):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), type("Own", (Handler,), attributes))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(clients, "FIRST_WAIT", 0.02)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_the_plain_server_answers_as_numpy_does():
    queries = np.eye(DIM, dtype=np.float32)
    with serving() as address:
        index = RemoteIndex(Client(address))
        scores, rows = index.search(queries, 5)
        np.testing.assert_array_equal(rows, search(queries.tobytes(), 5)[1])
        np.testing.assert_allclose(scores, search(queries.tobytes(), 5)[0])
        np.testing.assert_allclose(index.vectors(rows), VECTORS[rows], rtol=1e-2)


@pytest.mark.parametrize(
    "attributes, said",
    [
        ({"says": {"/index": HTML}}, "is no retrieval server of this project.*502 Bad Gateway"),
        ({"says": {"/index": b"[" * 5000}}, "is no retrieval server of this project"),
        ({"says": {"/index": b'{"status": "ok"}'}}, "is not an index manifest"),
        ({"says": {"/index": b"[]"}}, "is not an index manifest"),
        ({"status": 500}, "answers 500"),
        ({"status": 404}, "answers 404"),
        *[
            (
                {"says": {"/index": json.dumps(manifests.dataclasses.asdict(MANIFEST) | {name: value}).encode()}},
                f"field '{name}' is",
            )
            for name, value in (("rows", "20"), ("dim", -1), ("dim", 4.0), ("encoder_name", None), ("store", "pickle"))
        ],
    ],
)
def test_what_is_no_index_server_is_named_at_the_start(attributes, said):
    with serving(**attributes) as address, pytest.raises(UserError, match=f"{address}.*{said}"):
        RemoteIndex(Client(address, attempts=2))


def test_a_server_that_is_down_at_the_start_is_named():
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"no retrieval server: {address}.*python -m bridge_jax.serve"):
        RemoteIndex(Client(address, attempts=2))


def test_a_server_that_comes_back_is_used_again():
    port, queries = free_port(), VECTORS[:3]
    with serving(port) as address:
        index = RemoteIndex(Client(address, attempts=8))
        expected = index.search(queries, 4)
    found = []
    asking = threading.Thread(target=lambda: found.append(index.search(queries, 4)))
    asking.start()
    time.sleep(0.3)
    assert not found
    with serving(port):
        asking.join(20)
    for a, b in zip(expected, found[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_outage_is_waited_out_once_and_never_where_nothing_has_answered(monkeypatch):
    waits = []
    monkeypatch.setattr(clients, "FIRST_WAIT", 0.2)
    monkeypatch.setattr(clients.time, "sleep", waits.append)
    port = free_port()
    client = Client(f"http://127.0.0.1:{port}")

    def waited(attempts):
        waits.clear()
        with pytest.raises(RetrievalFault, match=rf"\({attempts} attempts\)"):
            client.ask("GET", "/index")
        assert len(waits) == attempts - 1
        return sum(waits)

    assert waited(6) < 7
    for _ in range(2):
        with serving(port):
            client.ask("GET", "/index")
        assert waited(14) > 40, "more than 30 s, whatever the dice say"
        assert max(waits) <= clients.LONGEST_WAIT
        assert waited(6) < 7 and waited(6) < 7


def changed(at, value, dtype):
    """The right answer with one number replaced."""

    def change(right):
        numbers = np.frombuffer(right, dtype).copy()
        numbers[at] = value
        return numbers.tobytes()

    return change


GARBAGE = {
    "nothing": b"",
    "html": HTML,
    "json": b'{"result": []}',
    "another k": lambda right: right[: len(right) * 2 // 3],
    "more": lambda right: right + bytes(8),
    "a row beyond": changed(1, ROWS, "<i4"),
    "a row below": changed(0, -1, "<i4"),
    "a row twice": lambda right: right[:4] * 2 + right[8:],
    "a score that is none": changed(-1, np.nan, "<f4"),
    "an endless score": changed(-1, -np.inf, "<f4"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_a_fault_and_never_rows(what):
    with serving(says={"/search": GARBAGE[what]}) as address:
        index = RemoteIndex(Client(address))
        with pytest.raises(RetrievalFault, match=re.escape(address) + "/search.*not an answer of /search"):
            index.search(VECTORS[:2], 3)


@pytest.mark.parametrize(
    "answer",
    [b"", HTML, lambda right: right[: len(right) // 2], lambda right: b"\xc0\x7f" + right[2:]],
    ids=["nothing", "html", "dim", "nan"],
)
def test_vectors_that_are_none_are_a_fault(answer):
    with serving(says={"/vectors": answer}) as address, pytest.raises(RetrievalFault, match="not an answer of /vectors"):
        RemoteIndex(Client(address)).vectors(np.arange(6))


def test_another_index_behind_the_same_address_stops_the_run():
    other = manifests.dataclasses.replace(MANIFEST, corpus_fingerprint="others")
    moved = manifests.dataclasses.replace(MANIFEST, corpus_path="elsewhere.jsonl", kind="scann")
    assert manifests.fingerprint(moved) == manifests.fingerprint(MANIFEST) != manifests.fingerprint(other)
    with serving(headers_sent={wire.INDEX: manifests.fingerprint(other)}) as address:
        index = RemoteIndex(Client(address))
        for ask in (lambda: index.search(VECTORS[:1], 3), lambda: index.vectors(np.arange(3))):
            with pytest.raises(UserError, match=f"{address}.*another index now than the run began with"):
                ask()
    with serving(headers_sent={}) as address:  # a server of before the header
        assert RemoteIndex(Client(address)).search(VECTORS[:1], 3)[1].shape == (1, 3)


def change_file(path, change):
    size = os.path.getsize(path)
    if change == "rewritten":
        with open(path, "r+b") as file:
            file.write(b"#" * size)
    elif change == "one word":
        with open(path, "r+b") as file:
            file.seek(file.read().index(b'"p250"') + 20)
            file.write(b"WORD")
    else:
        os.truncate(path, 100 if change == "cut off" else size + 5000)


@pytest.mark.parametrize("change", ["cut off", "longer", "rewritten", "one word"])
def test_a_corpus_that_changes_under_a_run_is_noticed(tmp_path, corpus_file, change):
    path = shutil.copy(corpus_file, tmp_path / "corpus.jsonl")
    corpus = Corpus.open(path)
    assert corpus[250].id == "p250"
    change_file(path, change)
    for read in (corpus.__getitem__, corpus.contents, corpus.document):
        with pytest.raises(FileChanged, match=f"{path}.*changed while it was read"):
            read(250)


@pytest.mark.parametrize(
    "old, new, said",
    [(b'"id": "p250"', b'"ix": "p250"', "field 'id' is missing"), (b'{"id": "p250"', b'["id": "p250"', "not JSON")],
)
def test_a_record_that_is_none_any_more_is_named_even_where_the_time_was_put_back(tmp_path, corpus_file, old, new, said):
    path = shutil.copy(corpus_file, tmp_path / "corpus.jsonl")
    corpus, before = Corpus.open(path), os.stat(path)
    with open(path, "r+b") as file:
        file.seek(file.read().index(old))
        file.write(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert corpus[249].id == "p249"
    for read in (corpus.__getitem__, corpus.contents, corpus.document):
        with pytest.raises(UserError, match=f"{path}, line 251: was changed while it was read.*{said}.*put the old file back"):
            read(250)


def test_a_corpus_that_changes_while_it_is_opened_is_refused(tmp_path, corpus_file, monkeypatch):
    path = shutil.copy(corpus_file, tmp_path / "corpus.jsonl")
    load = corpora._load_table

    def late(*args):
        found = load(*args)
        if found is not None:
            change_file(path, "one word")
        return found

    monkeypatch.setattr(corpora, "_load_table", late)
    with pytest.raises(UserError, match=f"{path}: was changed while it was read"):
        Corpus.open(path)


def test_files_that_are_replaced_moved_or_linked_stay_what_they_were(tmp_path, corpus_file):
    """As when another process fetches a newer object of a bucket, or an index is built anew with --force."""
    path = shutil.copy(corpus_file, tmp_path / "corpus.jsonl")
    (tmp_path / vectors.STORES["bfloat16"][0][0]).write_bytes(VECTORS.astype(vectors.BFLOAT16).tobytes())
    corpus, index = Corpus.open(path), DeviceIndex(vectors.open_vectors(tmp_path, ROWS, DIM))
    found = corpus[250], index.search(VECTORS[:2], 3)[1].tolist()
    for file in list(tmp_path.iterdir()):
        os.link(file, tmp_path / f"link of {file.name}")
        file.chmod(0o600)
        (tmp_path / "new").write_bytes(b"new")
        os.replace(tmp_path / "new", file)
    assert found == (corpus[250], index.search(VECTORS[:2], 3)[1].tolist())


@pytest.mark.parametrize("change", ["longer", "rewritten", "cut off"])
@pytest.mark.parametrize("store", vectors.STORES)
def test_an_index_that_changes_under_a_run_is_noticed(tmp_path, store, change):
    rows, dim = 3000, 8  # several pages of memory: to read what is cut off would end the process
    stored = np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)
    writer = vectors.VectorWriter(tmp_path, dim, store, 0)
    writer.append(stored)
    writer.close()
    file = tmp_path / vectors.STORES[store][-1][0]
    opened = vectors.open_vectors(tmp_path, rows, dim, store)
    index, copy = DeviceIndex(opened), opened[-3:].astype(np.float32)
    assert index.search(stored[-2:], 3)[1].shape == (2, 3)
    change_file(file, change)
    for read in (lambda: index.search(stored[-2:], 3), lambda: index.vectors(np.arange(rows - 3, rows))):
        with pytest.raises(FileChanged, match=f"{file}: was changed while it was read"):
            read()
    np.testing.assert_allclose(copy[1], stored[-2], atol=0.05)
