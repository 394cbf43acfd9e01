"""Baselines against a real OpenAI-compatible server on this machine: `transformers serve` with SmolLM2-135M-Instruct.

    python3 -m venv server && server/bin/pip install 'transformers[serving]' torch
    python benchmarks/endpoint_server.py --server-python=server/bin/python

Starts the server on a free port, evaluates `direct`, `rag` and `react` on a few questions of the embedded HotpotQA set, ends one
evaluation with `kill -9` in the middle and starts it again, takes the server away under another one, and has the traces judged (by
the same small model, which mostly does not write JSON: what matters is that nothing is lost). Compares `direct` with our own engine
on the same weights: the same prompts, greedy, should give the same answers. Writes benchmarks/results/endpoint_server.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import training_runs as runs
from arguments import interpreter
from machine import about

from bridge_jax.models import hub

MODEL = "smollm2-135m-instruct"
HOME = Path(__file__).parent.parent
NAME = "endpoint_server"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server-python", type=interpreter, default=sys.executable, help="the interpreter that has transformers[serving]"
    )
    parser.add_argument("--limit", type=int, default=10, help="questions a baseline")
    parser.add_argument("--quick", action="store_true", help="three questions (result under runs/)")
    parser.add_argument("--root", type=Path, help="default runs/endpoint_server")
    args = parser.parse_args()
    limit = 3 if args.quick else args.limit
    root = runs.root_of(args, NAME)
    shutil.rmtree(root / "work", ignore_errors=True)
    folder = hub.resolve(MODEL)
    result = {"machine": about(), "server": version(args.server_python), "model": MODEL, "limit": limit}
    with server(args.server_python, folder, root) as (url, process):
        result["baselines"] = {name: row(evaluate(root, name, limit, url, folder)) for name in ("direct", "rag", "react")}
        result["killed"] = killed(root, limit, url, folder)
        result["judge"] = judged(root, "direct", url, folder)
        process.send_signal(signal.SIGTERM)
        process.wait()
        result["without_server"] = without(root, limit, url, folder)
    result["own_engine"] = own(root, limit)
    theirs = predictions(root, "direct")
    ours = predictions(root, "own")
    result["direct_same_as_own_engine"] = sum(ours[id] == theirs[id] for id in ours) / len(ours)
    runs.save(NAME, result, args)
    print(json.dumps(result))


def version(python: str) -> str:
    code = "import importlib.metadata as m; print('transformers', m.version('transformers'), 'torch', m.version('torch'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def server(python: str, folder: Path, root: Path):
    """-> (address up to /v1, process)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root.mkdir(parents=True, exist_ok=True)
    command = [str(Path(python).parent / "transformers"), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with (root / "server.log").open("w") as log:
        process = subprocess.Popen([*command, "--device", "cpu", "--dtype", "float32"], stdout=log, stderr=log)
    try:
        for _ in range(300):
            time.sleep(1)
            if process.poll() is not None:
                raise SystemExit(f"the server ended: see {root / 'server.log'}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def words(root: Path, name: str, baseline: str, limit: int) -> list[str]:
    own = [f"--workdir={root / 'work'}", "--config=configs/pocket.py", "--config.policy.warmstart=", "--config.index.limit=1800"]
    own += ["--config.rollout.max_new_tokens=48", "--datasets=embedded/hotpotqa", f"--limit={limit}", f"--baseline={baseline}"]
    return [sys.executable, "-m", "bridge_jax.evaluate", *own, f"--name={name}"]


def evaluate(root: Path, baseline: str, limit: int, url: str, folder: Path, name: str = "", **more):
    command = [*words(root, name or baseline, baseline, limit), f"--endpoint={url}", f"--model={folder}", "--concurrency=2"]
    found = subprocess.run(
        [*command, *(f"--{key}={value}" for key, value in more.items())], cwd=HOME, capture_output=True, text=True
    )
    found.workdir, found.name = root / "work", name or baseline
    return found


def row(found: subprocess.CompletedProcess) -> dict:
    if found.returncode:
        raise SystemExit(f"evaluation failed: {found.stderr[-2000:]}")
    result = json.loads((found.workdir / "eval" / f"{found.name}.json").read_text(encoding="utf-8"))
    [metrics] = result["datasets"].values()
    names = ("n", "em", "f1", "recall@3", "searches", "prompt_tokens", "generated_tokens", "latency", "statuses")
    return {name: metrics[name] for name in names} | {"seconds": result["seconds"], "endpoint": result["endpoint"]}


def killed(root: Path, limit: int, url: str, folder: Path) -> dict:
    """`kill -9` once some questions are answered; then the same command again."""
    command = [*words(root, "killed", "react", limit), f"--endpoint={url}", f"--model={folder}", "--concurrency=1"]
    process = subprocess.Popen(command, cwd=HOME, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = root / "work" / "eval" / "killed.parts"
    while process.poll() is None and not any(path.stat().st_size for path in parts.glob("predictions.*.jsonl")):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = sum(len(path.read_text().split("\n")) - 1 for path in parts.glob("predictions.*.jsonl"))
    asked = sum(len(path.read_text().split("\n")) - 1 for path in parts.glob("requests.*.jsonl"))
    again = row(evaluate(root, "react", limit, url, folder, "killed"))
    same = predictions(root, "killed") == predictions(root, "react")
    return {
        "answered_before_the_kill": before,
        "requests_before_the_kill": asked,
        "same_as_unbroken": same,
        "after": again["endpoint"],
    }


def without(root: Path, limit: int, url: str, folder: Path) -> dict:
    found = evaluate(root, "direct", limit, url, folder, "without", retries=1)
    return {"exit": found.returncode, "says": " ".join(found.stderr.split()).split("error: ")[-1][:300].replace(url, "URL")}


def judged(root: Path, name: str, url: str, folder: Path) -> dict:
    path = root / "work" / "eval" / f"{name}.json"
    command = [sys.executable, "-m", "bridge_jax.judge", f"--result={path}", f"--endpoint={url}", f"--model={folder}", "--votes=2"]
    found = subprocess.run([*command, "--concurrency=2"], cwd=HOME, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"judging failed: {found.stderr[-2000:]}")
    [file] = path.parent.glob(f"{name}.judge-*.json")
    grades = json.loads(file.read_text(encoding="utf-8"))
    return {"overall": grades["averages"]["overall"], "agreement": grades["agreement"], "endpoint": grades["endpoint"]}


def own(root: Path, limit: int) -> dict:
    command = [*words(root, "own", "direct", limit), "--checkpoint=start"]
    found = subprocess.run(command, cwd=HOME, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"evaluation failed: {found.stderr[-2000:]}")
    result = json.loads((root / "work" / "eval" / "own.json").read_text(encoding="utf-8"))
    [metrics] = result["datasets"].values()
    return {name: metrics[name] for name in ("n", "em", "f1", "prompt_tokens", "generated_tokens")}


def predictions(root: Path, name: str) -> dict[str, str | None]:
    result = json.loads((root / "work" / "eval" / f"{name}.json").read_text(encoding="utf-8"))
    [rows] = result["predictions"].values()
    return {record["id"]: record["prediction"] for record in rows}


if __name__ == "__main__":
    main()
