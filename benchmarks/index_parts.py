"""The parts of `index.py` that are no engine: the real vectors, encoding, the store, the server, the share of a training step."""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import compare
import numpy as np
import training_runs as runs

from bridge_jax.data.corpora import corpus_path
from bridge_jax.data.qa import load_questions
from bridge_jax.files import write_text
from bridge_jax.models import e5, hub
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.index import build_index
from bridge_jax.retrieval.vectors import VectorWriter, open_vectors

ENCODER = "minilm-l6-v2"
MAX_LENGTH = 256
QUERIES = 512
QUICK_PASSAGES = 600
PAPER_QUERIES, PAPER_TURNS = round(512 * 8 * 1.5), 512  # a step's searches, and those credited (paper_scale.py)


def encoded(args: argparse.Namespace, root: Path) -> dict:
    """The corpus and the questions as MiniLM's vectors: {"rows", "folders": {dim: Path}, "queries": {dim: npy file}}."""
    out = root / "encoded"
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.open(corpus_path(args.corpus), QUICK_PASSAGES if args.quick else None)
    halves = out / "halves.jsonl"
    if not halves.exists():
        write_text(halves, "".join(json.dumps(row) + "\n" for row in _halves(corpus)))
    encoder = e5.load(ENCODER, max_length=MAX_LENGTH)
    build_index(corpus, encoder, out / "384", kind="exact")
    build_index(halves, encoder, out / "halves", kind="exact")
    if not (out / "768" / "embeddings.bf16").exists():
        (out / "768").mkdir(exist_ok=True)
        writer = VectorWriter(out / "768", 768, "bfloat16", 0)
        parts = np.asarray(open_vectors(out / "halves", 2 * len(corpus), 384)).astype(np.float32)
        writer.append(np.concatenate([parts[0::2], parts[1::2]], -1) / np.sqrt(2))
        writer.close()
    texts = [question.question for name in args.questions.split(",") for question in load_questions(name)]
    chosen = np.random.default_rng(args.seed).permutation(len(texts))[:QUERIES]
    queries = e5.embed(encoder, [texts[i] for i in sorted(chosen)], kind="query")
    files = {384: out / "queries-384.npy", 768: out / "queries-768.npy"}
    np.save(files[384], queries)
    np.save(files[768], np.concatenate([queries, queries], -1) / np.float32(np.sqrt(2)))
    return {"rows": len(corpus), "folders": {dim: out / str(dim) for dim in files}, "queries": files}


def _halves(corpus: Corpus):
    for row, passage in enumerate(corpus):
        words = passage.text.split()
        middle = max(1, len(words) // 2)
        for part, text in enumerate((words[:middle], words[middle:])):
            yield {"id": f"{row}/{part}", "title": passage.title, "text": " ".join(text) or passage.title}


def encode(args: argparse.Namespace, root: Path) -> dict:
    """Passages/s of ours and of sentence-transformers' `encode`, in turns; `ratio` is ours over theirs."""
    engines = compare.Engines(args.peers_python, root)
    job = {"folder": str(hub.resolve(ENCODER)), "corpus": str(corpus_path(args.corpus)), "rows": 96 if args.quick else 2000}
    job |= {"max_length": MAX_LENGTH, "batch_size": 32}  # 32: its default
    rounds = 1 if args.quick else args.rounds
    found = engines.compare({"ours": "ours_encode", "sentence_transformers": "st_encode"}, job, rounds)
    speeds = {
        engine: compare.spread([job["rows"] / row["seconds"] for row in each["rounds"]])
        for engine, each in found.items()
        if each.get("rounds")
    }
    ratio = compare.speedup(found, "sentence_transformers")
    return {"passages": job["rows"], "passages_per_second": speeds, "ratio": ratio} | engines.conditions(args, rounds)


def store(root: Path, rows: int) -> dict:
    """A corpus of `rows` passages in wiki-18's form: read once, opened again, read at random."""
    file = root / "store" / f"{rows}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        words = [f"word{i}" for i in range(1000)]
        rng = np.random.default_rng(0)
        texts = [" ".join(words[i] for i in rng.integers(0, 1000, 20)) for _ in range(997)]
        part = file.with_suffix(".part")
        with open(part, "w", encoding="utf-8") as out:
            for row in range(rows):
                out.write(f'{{"id": "{row}", "contents": "\\"Title {row}\\"\\n{texts[row % 997]}"}}\n')
        part.rename(file)
    script = Path(__file__).with_name("index_store.py")
    done = subprocess.run(
        [sys.executable, str(script), str(file), str(rows)], capture_output=True, text=True, env=runs.environment(root), check=True
    )
    return {"rows": rows, "bytes": file.stat().st_size} | json.loads(done.stdout.strip().splitlines()[-1])


def serve(bench, clients: int, requests_each: int = 10) -> dict:
    """`clients` at once, each asking one query after another: failures, seconds by percentile, queries/s."""
    from bridge_jax.retrieval.client import Client

    folder = bench.real()["folders"][384]
    texts = [question.question for question in load_questions(bench.args.questions.split(",")[0])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bridge_jax.serve", "--index", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=runs.environment(bench.root), cwd=runs.HOME)
    try:
        server.stdout.readline()  # it says where it serves when it does
        client = Client(f"http://127.0.0.1:{port}", timeout=120, attempts=1)
        client.retrieve(texts[:1], 3)
        seconds, failures = [], []

        def ask(who: int) -> None:
            for turn in range(requests_each):
                began = time.perf_counter()
                try:
                    hits = client.retrieve([texts[(who * requests_each + turn) % len(texts)]], 3)
                    assert len(hits) == 1 and len(hits[0]) == 3
                    seconds.append(time.perf_counter() - began)
                except Exception as error:
                    failures.append(repr(error))

        threads = [threading.Thread(target=ask, args=(who,)) for who in range(clients)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        metrics = client.ask("GET", "/metrics").text.splitlines()
        counted = {line.split()[0]: float(line.split()[1]) for line in metrics if line.startswith("retrieval_batch_queries_")}
    finally:
        server.terminate()
        server.wait()
    percentiles = {f"p{p}": float(np.percentile(seconds, p)) for p in (50, 90, 99)} if seconds else {}
    return {
        "clients": clients,
        "requests": clients * requests_each,
        "failures": len(failures),
        "failure": failures[:1],
        "seconds": percentiles,
        "requests_per_second": len(seconds) / took,
        "queries_a_batch": counted["retrieval_batch_queries_sum"] / counted["retrieval_batch_queries_count"],
        "client_cpu_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime,
        "passages": bench.real()["rows"],
    }


def steps(scaling: dict) -> dict:
    """Query encoding and search as a share of a training step, from the runs whose metrics lie in results/.

    And at the paper's scale: the predicted search of a step's queries over 21,015,324 x 768 on this machine's cores, without their
    encoding, against the step of `paper_scale.py` on one H200.
    """
    found = {}
    predicted = scaling.get("768", {}).get("predicted", {}).get("scann")
    paper = runs.RESULTS / "paper_scale.json"
    if predicted and paper.exists():
        step = json.loads(paper.read_text(encoding="utf-8"))
        seconds = sum(step["by_turns"][str(PAPER_TURNS)]["seconds"].values())
        search = PAPER_QUERIES * predicted["milliseconds"] / 1e3
        found["paper scale"] = {
            "queries": PAPER_QUERIES,
            "search_seconds": search,
            "step_seconds": seconds,
            "share": search / seconds,
        }
    for file in sorted(runs.RESULTS.glob("*.metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        shares = [row["time/retrieval"] / row["time/step"] for row in rows if "time/retrieval" in row]
        if shares:
            found[file.name.removesuffix(".metrics.jsonl")] = {"steps": len(shares), "share": float(np.mean(shares))}
    return found
