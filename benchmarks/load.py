"""Memory under load: does it stay flat, is anything lost.

    python benchmarks/load.py                               # all parts, some 75 minutes on 2 idle cores
    python benchmarks/load.py --part=server --minutes=10    # 200 clients of a real server process
    python benchmarks/load.py --part=hostile                # the same: one in ten hangs up, one in twenty sends rubbish
    python benchmarks/load.py --part=index --rows=5000000   # the index command on a generated corpus
    python benchmarks/load.py --part=evaluation             # a dry run of 50,000 questions, killed in the middle
    python benchmarks/load.py --part=training --steps=60    # the mini world: memory and live arrays of every step
    python benchmarks/load.py --quick                       # all in miniature; no file is written

Each part is a process of its own, watched from outside (watch.py), and begins anew; what it is given (the served index, the corpus,
the questions) is kept in --work, and so are the logs. A report of 10,000 rollouts is measured by report_page.py.

Writes its part of benchmarks/results/load.json, draws load.png, and prints the result as its last line.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import plots
import watch
from arguments import above_zero, at_least, some_of
from load_server import Clients
from machine import about
from training_runs import last_line, lines

from bridge_jax.files import write_text

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "load.json"
PARTS = ("server", "hostile", "index", "evaluation", "training")
COMMAND = [sys.executable, "-m"]
QUERIES = 2000  # different ones, of real questions


# The server -----------------------------------------------------------------------------------------------------------------


def serve(args, hostile: bool) -> dict:
    """`bridge_jax.serve` on an index of real passages, asked real questions by `args.clients` for `args.minutes`."""
    from bridge_jax.data.qa import load_questions

    folder = args.work / f"served-{args.encoder}-{args.passages}"
    build = [*COMMAND, "bridge_jax.index", "--corpus=embedded", f"--encoder={args.encoder}", f"--out={folder}"]
    subprocess.run([*build, f"--limit={args.passages}", "--kind=exact", "--max-length=64"], check=True, cwd=ROOT)
    queries = [question.question for question in load_questions("embedded/hotpotqa", "train")[:QUERIES]]
    seconds = args.minutes * 60
    log = args.work / f"server{'-hostile' * hostile}.log"
    with log.open("w") as errors:
        command = [*COMMAND, "bridge_jax.serve", f"--index={folder}", "--port=0"]
        server = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=errors)
    try:
        host, port = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline()).groups()
        time.sleep(2)  # it has said its address, and opens its loop
        idle = watch.look(server.pid)
        share = {"hang_up": args.clients // 10, "rubbish": args.clients // 20} if hostile else {}
        clients = Clients((host, int(port)), queries, args.clients, seconds, args.think, **share)
        with watch.Watch(server.pid, min(5.0, seconds / 20)) as seen:
            clients.run()
            time.sleep(2)  # the clients have closed their connections
        after, still = watch.look(server.pid), watch.opened(server.pid)
        alive = after is not None and server.poll() is None
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    finally:
        server.kill()
        server.wait()
    took = clients.latencies
    half, most_of, most = np.percentile(took, (50, 99, 100)).round(3).tolist() if took else (None,) * 3
    text = log.read_text(errors="replace")
    under = [sample for sample in seen.samples if sample["t"] <= seconds]
    return {
        "clients": args.clients, "think seconds": args.think, "minutes": args.minutes, "encoder": args.encoder,
        "passages": args.passages, "busy machine": args.busy, "requests": len(took), "failures": dict(clients.failures),
        "other clients": dict(clients.hostile), "requests per second": round(len(took) / clients.elapsed, 1),
        "latency p50": half, "latency p99": most_of, "latency most": most,
        "memory": watch.growth(under, "t", (seconds / 10, seconds * 3 / 10), (seconds * 9 / 10, seconds + 1)),
        "open files": {"idle": idle["files"], "most": max(s["files"] for s in under), "after": still},
        "threads": {"idle": idle["threads"], "most": max(s["threads"] for s in under), "after": after and after["threads"]},
        "alive": alive, "exit code": code, "tracebacks": text.count("Traceback"), "lines logged": text.count("\n"),
        "series": watch.thinned(seen.samples, ("t", "rss", "anon", "files", "threads")),
    }  # fmt: skip


# The index --------------------------------------------------------------------------------------------------------------------


def tiny_encoder(folder: Path) -> None:
    """E5's architecture with one layer of 32 dimensions, over numbers as words: what is measured is everything around it."""
    import jax
    import jax.numpy as jnp
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from bridge_jax.models import e5

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*special, *map(str, range(1000)), ":", "passage", "query"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    module = e5.Bert(e5.BertConfig(len(vocab), 32, 64, 1, 2, 64))
    params = module.init(jax.random.key(1), jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), jnp.int32))["params"]
    params = jax.tree.map(lambda x: x * 6.0 if x.ndim > 1 else x, params)
    e5.save(folder, e5.Encoder(module, params, tokenizer, "tiny", "mean", "", "", 32, "tiny"))


def corpus_of(file: Path, rows: int) -> None:
    """Passages of 8 numbers, compressed; whole or not at all."""
    if file.exists():
        return
    draw, part = random.Random(0), file.with_suffix(".part")
    with gzip.open(part, "wt", compresslevel=1) as out:
        for row in range(rows):
            words = " ".join(map(str, draw.choices(range(1000), k=8)))
            out.write(f'{{"id": "{row}", "contents": "\\"{row % 1000}\\"\\n{words}"}}\n')
    os.replace(part, file)


def build(args) -> dict:
    """`bridge_jax.index` on `args.rows` passages: memory while it reads, encodes, assembles, and builds the searcher."""
    from bridge_jax.retrieval.embed import SHARD_ROWS

    encoder, corpus, out = (
        args.work / "tiny-encoder",
        args.work / f"passages-{args.rows}.jsonl.gz",
        args.work / f"index-{args.rows}",
    )
    if not encoder.exists():
        tiny_encoder(encoder)
    corpus_of(corpus, args.rows)
    shutil.rmtree(out, ignore_errors=True)  # a finished one would be opened, and nothing measured

    def stage() -> dict:
        try:
            names = {file.name for file in out.iterdir()}
            shards = len(list((out / "shards").iterdir())) if "shards" in names else 0
        except OSError:
            return {"stage": "reading", "rows": 0}
        if names & {"scann.partial", "scann", "manifest.json"}:
            return {"stage": "searcher", "rows": args.rows}
        assembling = "embeddings.bf16.part" in names or "embeddings.bf16" in names
        return {"stage": "assembling" if assembling else "encoding", "rows": min(args.rows, shards * SHARD_ROWS)}

    began = time.monotonic()
    with (args.work / "index.log").open("a") as errors:
        command = [
            *COMMAND,
            "bridge_jax.index",
            f"--corpus={corpus}",
            f"--encoder={encoder}",
            f"--out={out}",
            "--max-length=32",
            "--batch-tokens=16384",
            f"--kind={args.kind}",
        ]
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, stdout=subprocess.DEVNULL,
                                   env=os.environ | {"BRIDGE_JAX_CACHE": str(args.work / "cache")})  # fmt: skip
        with watch.Watch(process.pid, 0.5 if args.rows < 200_000 else 2.0, stage) as seen:
            code = process.wait()
    ended_well("index", code, args.work / "index.log")
    stages = {name: [s for s in seen.samples if s["stage"] == name] for name in ("reading", "encoding", "assembling", "searcher")}
    encoding = stages["encoding"]
    tenth = args.rows / 10
    return {
        "rows": args.rows, "dimensions": 32, "kind": args.kind, "exit code": code, "seconds": round(time.monotonic() - began),
        "busy machine": args.busy, "encoder": "one layer of E5's architecture, 8 words a passage",
        "stages": {
            name: {"seconds": round(found[-1]["t"] - found[0]["t"]), "anon MB at most": round(max(s["anon"] for s in found))}
            for name, found in stages.items() if found
        },
        "memory while encoding": watch.growth(encoding, "rows", (tenth, 3 * tenth), (8 * tenth, args.rows + 1)),
        "threads": max(s["threads"] for s in seen.samples), "open files": max(s["files"] for s in seen.samples),
        "series": watch.thinned(seen.samples, ("t", "rss", "anon", "rows")),
    }  # fmt: skip


# Evaluation -------------------------------------------------------------------------------------------------------------------


def questions_of(file: Path, count: int) -> None:
    from bridge_jax.data.qa import load_questions

    known = [question for name in ("one_hop", "two_hop", "comparison") for question in load_questions(f"mini/{name}", "train")]
    with file.open("w") as out:
        for n in range(count):
            question = known[n % len(known)]
            row = {"id": f"q{n}", "question": question.question, "golden_answers": list(question.golds), "metadata": {}}
            out.write(json.dumps(row) + "\n")


def evaluate(args) -> dict:
    """`bridge_jax.evaluate --dry-run` on the mini world's passages, killed at half."""
    work = args.work / f"evaluation-{args.questions}"
    work.mkdir(exist_ok=True)
    file, run = work / "questions.jsonl", work / "run"
    if not file.exists():
        questions_of(file, args.questions)
    shutil.rmtree(run, ignore_errors=True)  # a finished one would be read, and nothing measured
    parts = run / "eval" / "load.parts" / "predictions.0of1.jsonl"
    counted = {"rows": 0, "at": 0}

    def answered() -> dict:
        with contextlib.suppress(OSError), parts.open("rb") as stored:  # it goes when the result is written
            stored.seek(counted["at"])
            new = stored.read()
            counted["rows"], counted["at"] = counted["rows"] + new.count(b"\n"), counted["at"] + len(new)
        return {"rows": counted["rows"]}

    command = [*COMMAND, "bridge_jax.evaluate", "--config=configs/mini.py", f"--workdir={run}", f"--datasets={file}", "--limit=0"]
    command += ["--dry-run", "--name=load"]
    series, killed_at, codes = [], None, []
    with (work / "log").open("a") as log:
        while len(codes) < 3 and 0 not in codes:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            with watch.Watch(process.pid, max(0.2, args.questions / 50_000), answered) as seen:
                while process.poll() is None:
                    time.sleep(0.1)
                    if killed_at is None and seen.samples and seen.samples[-1]["rows"] >= args.questions // 2:
                        process.kill()
                        process.wait()
                        killed_at = seen.samples[-1]["rows"]
            codes.append(process.returncode)
            series.append(seen.samples)
    ended_well("evaluation", codes[-1], work / "log")
    result = json.loads((run / "eval" / "load.json").read_text())
    rows = next(iter(result["predictions"].values()))
    [summary] = result["datasets"].values()
    took = collections.Counter()
    for n, row in enumerate(rows):
        took[n * 5 // args.questions] += row["seconds"]
    last = series[-1]
    half = args.questions / 2
    return {
        "questions": args.questions, "killed at": killed_at, "exit codes": codes, "busy machine": args.busy,
        "stored once each": [row["id"] for row in rows] == [f"q{n}" for n in range(args.questions)],
        "summary": {name: summary[name] for name in ("n", "em", "em_low", "em_high", "recall@3", "statuses")},
        "result MB": round((run / "eval" / "load.json").stat().st_size / watch.MB),
        "seconds of each fifth": [round(took[n], 1) for n in range(5)],
        "memory after the kill": watch.growth(last, "rows", (half * 1.1, half * 1.3), (half * 1.8, args.questions)),
        "MB at most": round(max(s["anon"] for part in series for s in part)),
        "MB while the result is written": max((round(s["anon"]) for s in last if s["rows"] >= args.questions), default=None),
        "series": [watch.thinned(part, ("t", "rss", "anon", "rows")) for part in series],
    }  # fmt: skip


# Training ---------------------------------------------------------------------------------------------------------------------


def train(args) -> dict:
    """The mini world for `args.steps`: memory and live arrays as each step's metrics are written."""
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        told = Path(folder) / "steps.jsonl"
        fields = [f"--config.train.steps={args.steps}", f"--config.train.eval_every={args.steps}", "--config.data.eval_limit=20"]
        command = [
            sys.executable,
            __file__,
            f"--child={told}",
            "--",
            "--config=configs/mini.py",
            f"--workdir={folder}/run",
            *fields,
        ]
        log = args.work / "training.log"
        with log.open("a") as errors:
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        ended_well("training", done.returncode, log)
        if lines(told) < 2:  # it ends in order after a SIGTERM
            raise SystemExit(f"training: stopped before its second step ({log})")
        steps = [json.loads(line) for line in told.read_text().splitlines()]
    made = steps[-1]["step"]  # fewer than asked for after a SIGTERM
    late, early = (made - min(10, made // 3) + 1, made + 1), (11, 21) if made >= 30 else (2, 4)
    return {
        "steps": made, "exit code": done.returncode, "busy machine": args.busy,
        "memory": watch.growth(steps, "step", early, late),
        "arrays": watch.growth(steps, "step", early, late, "arrays"),
        "array MB": watch.growth(steps, "step", early, late, "array_mb"),
        "open files": {"step 2": steps[1]["files"], "last": steps[-1]["files"]},
        "threads": {"step 2": steps[1]["threads"], "last": steps[-1]["threads"]},
        "series": {name: [round(s[name], 1) for s in steps] for name in ("step", "rss", "anon", "arrays", "compiled")},
    }  # fmt: skip


def child(told: Path, arguments: list[str]) -> int:
    """A training run that tells of itself at each row of metrics."""
    import jax

    from bridge_jax import train as command
    from bridge_jax.training.metrics import RunLog

    write = RunLog.write

    def watched(self, row) -> None:
        write(self, row)
        arrays = jax.live_arrays()
        seen = {"step": row["step"], "arrays": len(arrays), "array_mb": sum(a.nbytes for a in arrays) / watch.MB}
        compiled = sum(value for name, value in row.items() if name.startswith("compilations/"))
        with told.open("a") as file:
            file.write(json.dumps(seen | {"compiled": compiled} | watch.look(os.getpid())) + "\n")

    RunLog.write = watched
    return command.main(arguments)


# ------------------------------------------------------------------------------------------------------------------------------


def draw(results: dict) -> None:
    panels = {}
    for name in ("server", "hostile"):
        if name in results:
            series = results[name]["series"]
            panels.setdefault("server: minutes", {})[name] = ([t / 60 for t in series["t"]], series["anon"])
    if "index" in results:
        series = results["index"]["series"]
        panels["index: minutes"] = {"index": ([t / 60 for t in series["t"]], series["anon"])}
    if "evaluation" in results:
        panels["dry run: thousand questions"] = {
            f"evaluation, process {n + 1}": ([rows / 1000 for rows in part["rows"]], part["anon"])
            for n, part in enumerate(results["evaluation"]["series"])
        }
    if "training" in results:
        panels["training: steps"] = {"training": (results["training"]["series"]["step"], results["training"]["series"]["anon"])}
    if panels:
        plots.lines(RESULTS.with_suffix(".png"), panels, "", "MB of its own (RssAnon)")


def ended_well(part: str, code: int, log: Path) -> None:
    """A part that failed measured nothing: its old result stays."""
    if code:
        raise SystemExit(f"{part}: exit code {code}: {last_line(log)} ({log})")


def keep(name: str, found: dict) -> dict:
    """Put a part into the result file, which another part may be writing to."""
    with RESULTS.with_suffix(".lock").open("w") as lock:  # stays: who waits for it holds this file, not one made later
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = {"machine": about()} | found
        results = {part: results[part] for part in PARTS if part in results}
        write_text(RESULTS, json.dumps(results) + "\n")
        draw(results)
    return results


def main() -> int:
    if sys.argv[1:2] and sys.argv[1].startswith("--child="):
        return child(Path(sys.argv[1].removeprefix("--child=")), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=some_of(PARTS), default=",".join(PARTS))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bridge-load", help="kept between calls")
    parser.add_argument("--clients", type=at_least(20), default=200)
    parser.add_argument("--minutes", type=above_zero, default=10.0)
    parser.add_argument("--think", type=float, default=0.0, help="seconds a client waits between its requests (default 0)")
    parser.add_argument("--encoder", default="minilm-l6-v2")
    parser.add_argument("--passages", type=at_least(40), default=4000)
    parser.add_argument("--rows", type=at_least(1000), default=5_000_000)
    parser.add_argument("--kind", choices=("scann", "exact"), default="scann", help="of the index")
    parser.add_argument("--questions", type=at_least(100), default=50_000)
    parser.add_argument("--steps", type=at_least(6), default=60)
    parser.add_argument("--busy", action="store_true", help="note that other work ran on the machine: times mean little then")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.encoder, args.passages, args.think = 0.3, "mini-encoder", 200, 0.2
        args.rows, args.questions, args.steps = 20_000, 2000, 6
    args.work.mkdir(parents=True, exist_ok=True)
    run = {
        "server": lambda: serve(args, False), "hostile": lambda: serve(args, True), "index": lambda: build(args),
        "evaluation": lambda: evaluate(args), "training": lambda: train(args),
    }  # fmt: skip
    results = {}
    for name in args.part.split(","):
        found = run[name]()
        results[name] = {key: value for key, value in found.items() if key != "series"}
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
        if not args.quick:
            keep(name, found)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
