"""Index folders: built, killed and resumed, reused, refused, opened; and the command around them."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from bridge_jax import index as command
from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.models.lora import LoRAConfig, init_lora
from bridge_jax.retrieval import scann_index
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.device_index import DeviceIndex
from bridge_jax.retrieval.embed import assemble, encode_shards
from bridge_jax.retrieval.index import build_index, open_index
from bridge_jax.retrieval.retriever import RetrievalFault, Retriever, recall_at
from bridge_jax.retrieval.scann_index import ScannParameters
from bridge_jax.retrieval.vectors import open_vectors
from tests.retrieval.conftest import passages, write_jsonl
from tests.virtual_devices import run_on_devices

LORA = LoRAConfig(rank=4, targets=("query", "key", "value", "attention_output"))
needs_scann = pytest.mark.skipif(not scann_index.available(), reason="scann is not installed")


def load(folder, **kwargs):
    return e5.load(folder, max_length=kwargs.pop("max_length", 64), lora=LORA, **kwargs)


@pytest.fixture(scope="module")
def encoder(encoder_folder):
    return load(encoder_folder)


@pytest.fixture(scope="module")
def corpus(corpus_file):
    return Corpus.open(corpus_file)


@pytest.fixture(scope="module")
def built(tmp_path_factory, corpus_file, encoder):
    folder = tmp_path_factory.mktemp("index") / "index"
    build_index(corpus_file, encoder, folder)
    return folder


def snapshot(folder):
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_stored_vectors_are_those_of_the_contents_in_corpus_order(built, corpus, encoder):
    index = open_index(built, encoder, corpus, kind="exact")
    direct = e5.embed(encoder, [corpus.contents(row) for row in range(len(corpus))], kind="passage")
    np.testing.assert_allclose(index.vectors(np.arange(len(corpus))), direct, atol=4e-3)  # bfloat16: 8 bits
    prefixed = dataclasses.replace(encoder, passage_prefix="passage: ")
    assert np.abs(e5.embed(prefixed, [corpus.contents(0)], kind="passage") - direct[:1]).max() > 1e-2


@needs_scann
def test_both_kinds_open_from_one_folder_and_agree(built, corpus, encoder):
    queries = e5.embed(encoder, [f"word{i} word{i + 1}" for i in range(40)], kind="query")
    one = open_index(built, encoder, corpus)
    two = open_index(built, encoder, corpus, kind="exact")
    assert (one.kind, two.kind) == ("scann", "exact")
    for a, b in zip(one.search(queries, 40), two.search(queries, 40)):
        np.testing.assert_array_equal(a, b)


def test_the_manifest_names_everything(built, corpus, encoder):
    values = json.loads((built / "manifest.json").read_text())
    assert values["encoder_fingerprint"] == encoder.fingerprint and values["corpus_fingerprint"] == corpus.fingerprint
    assert (values["rows"], values["dim"], values["max_length"], values["pooling"]) == (300, 32, 64, "mean")
    assert values["query_prefix"] == encoder.query_prefix and values["passage_prefix"] == encoder.passage_prefix
    assert values["kind"] == ("scann" if scann_index.available() else "exact") and values["versions"]["jax"] == jax.__version__


# Refusals -------------------------------------------------------------------------------------------------------------


def test_another_encoder_is_refused_by_field(built, encoder_folder, other_encoder_folder, encoder):
    cases = [
        (load(other_encoder_folder), ["encoder weights", encoder.fingerprint[:12], "other"]),
        (load(encoder_folder, max_length=32), ["max length", "64", "32"]),
        (load(encoder_folder, query_prefix="query: "), ["query prefix", "''", "'query: '"]),
        (load(encoder_folder, passage_prefix="passage: "), ["passage prefix", "''", "'passage: '"]),
        (load(encoder_folder, pooling="cls"), ["pooling", "'mean'", "'cls'"]),
        (dataclasses.replace(encoder, append_eos=True), ["an end token after every text", "False", "True"]),
    ]
    for other, named in cases:
        with pytest.raises(UserError) as error:
            open_index(built, other)
        for part in [str(built), *named]:
            assert part in str(error.value)


def test_another_corpus_is_refused_by_field(built, corpus_file, tmp_path, encoder):
    changed = passages(300)
    changed[7]["contents"] += "."
    for other, named in (
        (Corpus.open(corpus_file, 299), "299"),
        (Corpus.open(write_jsonl(tmp_path / "c", changed)), "corpus content"),
    ):
        with pytest.raises(UserError, match=named):
            open_index(built, encoder, other)


def test_a_folder_without_a_finished_index_is_refused(tmp_path, corpus_file, encoder):
    with pytest.raises(UserError, match="holds no index"):
        open_index(tmp_path / "none")
    (tmp_path / "building.json").write_text("{}")
    with pytest.raises(UserError, match="unfinished"):
        open_index(tmp_path)
    with pytest.raises(UserError, match="kind is 'faiss'"):
        build_index(corpus_file, encoder, tmp_path, kind="faiss")


def damage(folder, tmp_path, change):
    """A copy of an index folder with some of its vectors changed."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    vectors = np.memmap(copy / "embeddings.bf16", np.uint16, "r+").reshape(300, 32)
    change(vectors)
    vectors.flush()
    return copy


def test_the_self_check_sees_vectors_of_other_passages(built, tmp_path, corpus, encoder):
    def shift(vectors):
        vectors[:] = np.roll(vectors, 1, axis=0)

    copy = damage(built, tmp_path, shift)
    open_index(copy, encoder, kind="exact")  # without the corpus nobody can tell
    with pytest.raises(UserError, match="encodes to another vector"):
        open_index(copy, encoder, corpus, kind="exact")
    if scann_index.available():  # the searcher still has the old vectors: nothing retrieves itself
        with pytest.raises(UserError, match="does not retrieve itself"):
            open_index(copy)


@pytest.mark.parametrize("bits", [0x0000, 0x7FC0])  # zero, NaN
def test_the_self_check_sees_zero_and_nan_vectors(built, tmp_path, bits):
    def wipe(vectors):
        vectors[0] = bits

    with pytest.raises(UserError, match="row 0"):
        open_index(damage(built, tmp_path, wipe), kind="exact")


def test_a_truncated_file_is_refused(built, tmp_path):
    copy = damage(built, tmp_path, lambda vectors: None)
    os.truncate(copy / "embeddings.bf16", 100)
    with pytest.raises(UserError, match=r"100 bytes where 19,200"):
        open_index(copy)


def test_not_enough_memory_is_said_in_bytes(built, monkeypatch):
    monkeypatch.setattr("bridge_jax.retrieval.memory.free_memory", lambda: 10_000)
    with pytest.raises(UserError, match=r"MiB of memory and 0\.0 MiB are free"):
        open_index(built, kind="exact")


def test_without_scann_the_device_index_is_used_and_said(built, corpus_file, encoder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(scann_index, "available", lambda: False)
    index = build_index(corpus_file, encoder, tmp_path / "new")
    assert isinstance(index, DeviceIndex) and len([r for r in caplog.records if "scann is not installed" in r.message]) == 1
    caplog.clear()
    assert isinstance(open_index(built), DeviceIndex)
    if json.loads((built / "manifest.json").read_text())["scann"] is not None:
        assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
            f"{built}: scann is not installed here, searching exactly on the device instead"
        ]
    with pytest.raises(UserError, match="scann is not installed"):
        build_index(corpus_file, encoder, tmp_path / "other", kind="scann")


# Building again -------------------------------------------------------------------------------------------------------


def test_a_finished_index_is_reused_and_another_is_not_overwritten(tmp_path, corpus_file, encoder, encoder_folder):
    folder = tmp_path / "index"
    build_index(corpus_file, encoder, folder, kind="exact")
    before = snapshot(folder)
    build_index(corpus_file, encoder, folder, kind="exact")
    assert snapshot(folder) == before
    with pytest.raises(UserError, match=r"max length 64, not 32; use --force"):
        build_index(corpus_file, load(encoder_folder, max_length=32), folder, kind="exact")
    with pytest.raises(UserError, match="number of passages 300"):
        build_index(corpus_file, encoder, folder, kind="exact", limit=200)
    assert snapshot(folder) == before
    assert len(build_index(corpus_file, encoder, folder, kind="exact", limit=200, force=True)) == 200
    if scann_index.available():  # the searcher is added, the vectors stay
        vectors = snapshot(folder)["embeddings.bf16"]
        assert build_index(corpus_file, encoder, folder, kind="scann", limit=200).kind == "scann"
        assert snapshot(folder)["embeddings.bf16"] == vectors


def test_foreign_files_are_never_touched(tmp_path, corpus_file, encoder):
    (tmp_path / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(UserError, match=r"thesis\.tex"):
            build_index(corpus_file, encoder, tmp_path, force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


KILLED = """
import os, signal, sys
from pathlib import Path
from bridge_jax.models import e5
from bridge_jax.retrieval import embed
from bridge_jax.retrieval.index import build_index
corpus, encoder, out, store, stage, calls = sys.argv[1:]
inner, left = getattr(embed, stage), int(calls)
def dying(*args, **kwargs):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*args, **kwargs)
setattr(embed, stage, dying)
build_index(corpus, e5.load(encoder, max_length=64), out, kind="exact", batch_tokens=400, shard_rows=64, store=store)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus_file, encoder):
    """The files of unbroken builds, by store."""
    found = {}
    for store in ("bfloat16", "int8"):
        out = tmp_path_factory.mktemp(store)
        build_index(corpus_file, encoder, out, kind="exact", batch_tokens=400, shard_rows=64, store=store)
        found[store] = {file.name: file.read_bytes() for file in out.iterdir() if file.name.startswith("embeddings")}
    return found


@pytest.mark.parametrize("store, stage, calls", [("bfloat16", "_write", 2), ("int8", "_read", 8)])
def test_a_killed_build_goes_on_and_writes_the_same_bytes(
    tmp_path, corpus_file, encoder_folder, monkeypatch, whole, store, stage, calls
):
    """Killed while the third shard is written, or when three of the five are put together: `_read` is asked for each twice."""
    encoder = load(encoder_folder)
    out = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, corpus_file, encoder_folder, out, store, stage, str(calls)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(UserError, match="unfinished"):
        open_index(out)
    options = {"kind": "exact", "batch_tokens": 400, "shard_rows": 64, "store": store}
    with pytest.raises(UserError, match="unfinished index with max length 64, not 32"):
        build_index(corpus_file, load(encoder_folder, max_length=32), out, **options)
    shards = sorted((out / "shards").iterdir())
    assert len(shards) == 2, "two shards are whole, or three of five are put together"
    # Damage one: it must be encoded anew, what is sound must not.
    data = bytearray(shards[0].read_bytes())
    data[70] ^= 1
    shards[0].write_bytes(data)
    encoded = []
    inner = e5.tokenize
    monkeypatch.setattr(e5, "tokenize", lambda *a, **k: encoded.extend(a[1]) or inner(*a, **k))
    build_index(corpus_file, encoder, out, **options)
    left = 300 - 64 if stage == "_write" else 64
    assert len(encoded) == left + 4  # and the self-check's
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.name.startswith("embeddings")} == whole[store]
    assert {p.name for p in out.iterdir()} == {*whole[store], "manifest.json", "building.lock"}


def test_parts_are_encoded_apart_and_the_last_one_finishes(tmp_path, corpus_file, encoder, whole, caplog):
    caplog.set_level("INFO")
    options = {"kind": "exact", "batch_tokens": 400, "shard_rows": 64}
    for i in (2, 0):
        assert build_index(corpus_file, encoder, tmp_path, part=(i, 3), **options) is None
        assert f"part {i}/3 is encoded" in caplog.text and not (tmp_path / "manifest.json").exists()
    with ThreadPoolExecutor(1) as pool:  # a part whose process ended early is taken up by another one
        waiting = pool.submit(build_index, corpus_file, encoder, tmp_path, part=(0, 3), wait=True, **options)
        assert len(build_index(corpus_file, encoder, tmp_path, part=(1, 3), **options)) == 300
        assert len(waiting.result(timeout=60)) == 300
    assert (tmp_path / "embeddings.bf16").read_bytes() == whole["bfloat16"]["embeddings.bf16"]
    assert len(build_index(corpus_file, encoder, tmp_path, part=(2, 3), **options)) == 300  # finished: reused
    for part in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(UserError, match="it must be 0/n to n-1/n"):
            build_index(corpus_file, encoder, tmp_path, part=part)


def test_two_builds_of_one_folder_do_not_mix(tmp_path, corpus_file, encoder_folder, encoder, caplog):
    """The second one waits, and goes on with what the first has left when that is killed."""
    script = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "print('stuck', flush=True); import time; time.sleep(60)")
    out = tmp_path / "shared"
    other = subprocess.Popen(
        [sys.executable, "-c", script, corpus_file, encoder_folder, out, "bfloat16", "_write", "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "stuck\n"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(build_index, corpus_file, encoder, out, kind="exact")
            deadline = time.monotonic() + 30
            while "waiting for it" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.05)
            assert "another process is building this index" in caplog.text and not waiting.done()
            other.kill()
            assert len(waiting.result(timeout=60)) == 300
    finally:
        other.kill()
        other.wait()


def test_batch_size_and_shards_do_not_change_the_vectors(tmp_path, corpus, encoder):
    found = []
    for name, batch, shard in (("a", 100, 32), ("b", 4000, 1000)):
        out = tmp_path / name
        out.mkdir()
        encode_shards(encoder, corpus, out, batch_tokens=batch, shard_rows=shard)
        assert assemble(out, len(corpus), encoder.dim, "bfloat16", shard_rows=shard)
        found.append(open_vectors(out, len(corpus), encoder.dim).astype(np.float32))
    np.testing.assert_allclose(found[0], found[1], atol=4e-3)


def test_int8_vectors_find_what_bfloat16_vectors_find(tmp_path, built, corpus, encoder, corpus_file):
    small = build_index(corpus_file, encoder, tmp_path, store="int8")
    large = open_index(built, encoder, corpus, "exact")
    rows = np.arange(300)
    assert sum(file.stat().st_size for file in tmp_path.glob("embeddings*")) == 300 * (32 + 4)
    error = np.abs(small.vectors(rows) - large.vectors(rows))
    assert (error <= np.abs(large.vectors(rows)).max(-1, keepdims=True) * (0.5 / 127 + 1e-6)).all() and error.max() > 0
    queries = e5.embed(encoder, [f"word{i} word{i + 3}" for i in range(40)], kind="query")
    by_kind = {kind: open_index(tmp_path, encoder, corpus, kind).search(queries, 20) for kind in ("exact", "auto")}
    for a, b in zip(*by_kind.values()):
        np.testing.assert_array_equal(a, b)
    assert np.mean([len(set(a) & set(b)) / 20 for a, b in zip(by_kind["exact"][1], large.search(queries, 20)[1])]) > 0.95
    with pytest.raises(UserError, match="vectors kept as 'int8', not 'bfloat16'"):
        build_index(corpus_file, encoder, tmp_path)
    with pytest.raises(UserError, match="store is 'int4'"):
        build_index(corpus_file, encoder, tmp_path, store="int4")


@needs_scann
def test_the_search_is_tuned_and_its_recall_is_in_the_manifest(tmp_path, corpus_file, encoder, monkeypatch, corpus):
    monkeypatch.setattr(scann_index, "choose_parameters", lambda rows, dim: ScannParameters(24, 24, 2, 100))
    queries = [f"word{i} word{i + 5}" for i in range(60)]

    def tuned(**options):
        index = build_index(corpus_file, encoder, tmp_path, kind="scann", **options)
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert dataclasses.asdict(index.parameters) == manifest["scann"]
        return index, manifest

    index, manifest = tuned(queries=queries, recall=0.9)
    found = manifest["tuned"]
    assert found["target"] == 0.9 and found["k"] == 40 and found["queries"] == 30 and found["from"] == "given"
    assert found["leaves_to_search"] == index.parameters.leaves_to_search < 24
    # The figure, measured again here: queries 1, 3, ... are those that the choice did not see.
    vectors = e5.embed(encoder, queries, kind="query")[1::2]
    truth = open_index(tmp_path, encoder, corpus, "exact").search(vectors, 40)[0]
    again = (index.search(vectors, 40)[0] >= truth[:, -1:] - 1e-5).mean()
    assert again == pytest.approx(found["recall"]) and again > 0.8
    stored = snapshot(tmp_path)
    assert tuned(recall=0.9)[1] == manifest and snapshot(tmp_path) == stored  # nothing else is asked for
    assert tuned(recall=0.9999)[1]["tuned"]["leaves_to_search"] > found["leaves_to_search"]  # searched otherwise, not built anew
    assert snapshot(tmp_path)["scann/scann_config.pb"] == stored["scann/scann_config.pb"]


# A FAISS file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["IP", "L2"])
def test_a_faiss_file_is_imported_and_nothing_is_encoded(tmp_path, corpus_file, encoder, corpus, monkeypatch, metric):
    faiss = pytest.importorskip("faiss")
    vectors = e5.embed(encoder, [corpus.contents(row) for row in range(len(corpus))], kind="passage")
    flat = getattr(faiss, f"IndexFlat{metric}")(32)
    flat.add(vectors)
    faiss.write_index(flat, str(tmp_path / "e5_Flat.index"))
    monkeypatch.setattr("bridge_jax.retrieval.index.encode_shards", None)
    index = build_index(corpus_file, encoder, tmp_path / "i", kind="exact", faiss_file=tmp_path / "e5_Flat.index")
    np.testing.assert_array_equal(index.vectors(np.arange(300)), vectors.astype(index.embeddings.dtype).astype(np.float32))
    queries = e5.embed(encoder, [f"word{i}" for i in range(20)], kind="query")
    assert np.mean(index.search(queries, 1)[1] == flat.search(queries, 1)[1]) > 0.9
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert manifest["imported"].endswith("e5_Flat.index") and manifest["unusable"] == 0


def test_faiss_files_that_do_not_fit_are_refused_and_bad_vectors_counted(tmp_path, corpus_file, encoder, corpus, caplog):
    faiss = pytest.importorskip("faiss")
    vectors = e5.embed(encoder, [corpus.contents(row) for row in range(len(corpus))], kind="passage")

    def write(values, make=faiss.IndexFlatIP, cut=None):
        index = make(values.shape[1])
        index.add(np.ascontiguousarray(values))
        faiss.write_index(index, str(tmp_path / "f"))
        if cut is not None:
            os.truncate(tmp_path / "f", cut)

    def build(**options):
        return build_index(corpus_file, encoder, tmp_path / "i", kind="exact", faiss_file=tmp_path / "f", force=True, **options)

    for values, options, named in (
        (vectors[:-1], {}, "299 x 32 where the corpus and the encoder make 300 x 32"),
        (vectors[:, :16], {}, "300 x 16 where"),
        (2 * vectors, {}, "row 0 has length 2.000, not 1"),
        (vectors, {"cut": 20}, "cut off in its header"),
        (vectors, {"cut": 10_000}, "10,000 bytes where 38,445 belong"),
        (vectors, {"make": lambda d: faiss.IndexHNSWFlat(d, 4)}, "no Flat index"),
        (vectors[::-1], {}, "encodes to another vector"),
    ):
        write(values, **options)
        with pytest.raises(UserError, match=named):
            build()
    broken = vectors.copy()
    broken[[5, 9]] = [[0], [np.nan]]
    write(broken)
    index = build()
    assert "2 of 300 vectors are zero or not finite" in caplog.text
    assert json.loads((tmp_path / "i" / "manifest.json").read_text())["unusable"] == 2
    assert not set(index.search(vectors[[5, 9]], 40)[1].ravel()) & {5, 9}


SPLIT = """
import sys
import jax
import numpy as np
from bridge_jax import index as command
from bridge_jax.models import e5
from bridge_jax.retrieval.vectors import open_vectors
from pathlib import Path
corpus, folder, out = sys.argv[1:]
assert jax.local_device_count() == 4
for name in ("float32", "bfloat16"):
    arguments = ["--corpus", corpus, "--encoder", folder, "--out", f"{out}/{name}", "--max-length", "64", "--kind", "exact"]
    assert command.main([*arguments, "--dtype", name, "--batch-tokens", "300"]) == 0
    np.save(f"{out}/{name}.npy", np.asarray(open_vectors(Path(out, name), 300, 32)).astype(np.float32))
print("same")
"""


def test_encoding_split_over_four_devices_gives_the_same_vectors(tmp_path, built, corpus_file, encoder_folder):
    script = SPLIT.replace("sys.argv[1:]", repr([str(corpus_file), str(encoder_folder), str(tmp_path)]))
    done = run_on_devices(4, script, Path(__file__).parent)
    assert done.stdout.endswith("same\n"), done.stderr
    one = open_vectors(built, 300, 32).astype(np.float32)
    np.testing.assert_allclose(np.load(tmp_path / "float32.npy"), one, atol=4e-3)
    assert 0.98 < np.einsum("nd,nd->n", np.load(tmp_path / "bfloat16.npy"), one).min() < 1 - 1e-6


# The retriever --------------------------------------------------------------------------------------------------------


def test_lora_at_initialisation_ranks_exactly_as_the_base(built, corpus, encoder):
    lora = init_lora(jax.random.key(0), encoder.params, LORA)
    queries = [f"word{i} word{(7 * i) % 200}" for i in range(30)]
    for kind in ("exact", "auto"):
        retriever = Retriever(encoder, open_index(built, encoder, corpus, kind), corpus)
        base, adapted = retriever.search(queries, 40), retriever.search(queries, 40, lora)
        for a, b in zip(base, adapted):
            np.testing.assert_array_equal(a, b)
    moved = jax.tree.map(lambda x: x + 0.1, lora)
    assert (retriever.search(queries, 40, moved).rows != base.rows).any(), "the adapter must reach the ranking"
    exact = np.einsum("bd,bkd->bk", base.query_vectors, retriever.index.vectors(base.rows))
    np.testing.assert_array_equal(base.scores, exact)
    assert base.query_vectors.shape == (30, 32)


def test_passages_find_themselves(built, corpus, encoder):
    retriever = Retriever(encoder, open_index(built, encoder, corpus), corpus)
    found = retriever.search([corpus.contents(row) for row in range(0, 300, 11)], 3)
    assert recall_at(found.rows, [[row] for row in range(0, 300, 11)], 1).mean() == 1.0


def test_search_failures_are_retried_then_become_a_fault(built, corpus, encoder, monkeypatch):
    monkeypatch.setattr("bridge_jax.retrieval.retriever.FIRST_WAIT", 0.001)
    index = open_index(built, encoder, corpus, "exact")
    retriever, calls = Retriever(encoder, index, corpus), []
    good = index.search

    def flaky(failures):
        calls.clear()

        def search(queries, k):
            calls.append(k)
            if len(calls) <= failures:
                raise OSError("disk gone")
            return good(queries, k)

        return search

    monkeypatch.setattr(index, "search", flaky(2))
    assert retriever.search(["word1"], 3).rows.shape == (1, 3) and len(calls) == 3
    monkeypatch.setattr(index, "search", flaky(99))
    with pytest.raises(RetrievalFault, match="disk gone"):
        retriever.search(["word1"], 3)
    assert len(calls) == 3
    monkeypatch.setattr(index, "search", good)
    with pytest.raises(UserError, match="301 passages"):  # a wrong k is the caller's, not the environment's
        retriever.search(["word1"], 301)
    with pytest.raises(UserError, match="300"):
        Retriever(encoder, index, Corpus.open(corpus.path, 10))


def test_recall_at():
    rows = np.array([[4, 2, 9], [1, 0, 3], [5, 6, 7]])
    np.testing.assert_array_equal(recall_at(rows, [[2, 9], [3, 8], []], 2), np.float32([0.5, 0.0, np.nan]))
    np.testing.assert_array_equal(recall_at(rows, [[2, 9], [3, 8], [5, 5]], 3), np.float32([1.0, 0.5, 1.0]))


# The command ----------------------------------------------------------------------------------------------------------


def run(capfd, *arguments):
    code = command.main([str(a) for a in arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_the_command_builds_and_reuses(tmp_path, capfd, corpus_file, encoder_folder):
    arguments = ("--corpus", corpus_file, "--encoder", encoder_folder, "--out", tmp_path / "i", "--max-length", 64, "--limit", 100)
    code, out, err = run(capfd, *arguments)
    assert code == 0 and "100 passages x 32" in out
    assert "passages/s, ETA" in err and "on disk" in err and "of memory" in err
    code, out, err = run(capfd, *arguments)
    assert code == 0 and "reused" in err and "encoding" not in err


BAD = '{"id": "a", "contents": "x"}\n{"id": "b"}\n'


@pytest.mark.parametrize(
    "change, named",
    [
        ({"--corpus": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"--corpus": BAD}, "line 2: field 'contents' is missing"),
        ({"--corpus": BAD.replace('"b"', '"a", "contents": "y"')}, "line 2: field 'id' 'a'"),
        ({"--corpus": ""}, "holds no passage"),
        ({"--encoder": "/nowhere/model"}, "/nowhere/model"),
        ({"--limit": 0}, "limit is 0"),
        ({"--shard": "4/4"}, "--shard is '4/4'"),
        ({"--recall": 1.5}, "--recall is 1.5"),
        ({"--faiss": "/nowhere.index", "--limit": 200, "--out": "new"}, "/nowhere.index: cannot be read"),
        ({"--batch-tokens": 0}, "--batch-tokens is 0"),
        ({"--max-length": 100_000}, "max_length 100000"),
        ({"--out": __file__}, "is a file"),
        ({"--out": os.path.dirname(__file__)}, "give a new or empty folder"),
        ({"--passage-prefix": "passage: "}, "passage prefix '', not 'passage: '"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capfd, built, corpus_file, encoder_folder, change, named):
    if change.get("--corpus", "nowhere.jsonl") != "nowhere.jsonl":
        file = tmp_path / "corpus.jsonl"
        file.write_text(change["--corpus"])
        change = {"--corpus": file}
    if change.get("--out") == "new":
        change |= {"--out": tmp_path / "new"}
    given = {"--corpus": corpus_file, "--encoder": encoder_folder, "--out": built, "--max-length": 64} | change
    before = snapshot(built)
    code, out, err = run(capfd, *[part for pair in given.items() for part in pair])
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err, err
    assert snapshot(built) == before


def test_help_answers_at_once_with_examples():
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "bridge_jax.index", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "examples:" in done.stdout and time.perf_counter() - begin < 5
    wrong = subprocess.run([sys.executable, "-m", "bridge_jax.index", "--kind", "faiss"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--kind" in wrong.stderr
