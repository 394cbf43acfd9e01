"""Agentic-R's listwise judge for real: small models behind `transformers serve`, disturbed as endpoints are, and the policy itself.

    python3 -m venv server && server/bin/pip install 'transformers[serving]' torch
    python benchmarks/judge.py --server-python=server/bin/python --warmstart=runs/pocket/warmstart

Of each judge one round at a tiny size: the share of its replies that can be read, what becomes of the others, calls, tokens,
seconds. Models behind the server judge the mini world's passages, and the policy (SmolLM2-135M, warm-started) those of its own run.

Between the run and the server stands a proxy that counts what is answered. For the first model there is a second run, with the same
questions and every kind of fault: status 429 and 500, connections that are cut, answers that are no chat completion, slow ones. It
is killed with SIGKILL while the judge works, started again, loses its server for good and ends, and is started a last time.
Compared with the undisturbed one: the scores, the files behind them, and how often the same thing was answered twice.

Each part is saved when it is done, with its machine and settings, and not done again. Writes results/judge.json,
where the parts of earlier runs stay.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import http.client
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import agentic_kill
import comparators_pocket
import endpoint_server
import training_runs as runs
from arguments import interpreter

from bridge_jax.errors import main_guard
from bridge_jax.files import write_text
from bridge_jax.models import hub

NAME = "judge"
MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")
ROUND = {"agentic.rounds": 1, "agentic.questions": 4, "train.steps": 1, "agentic.candidates": 20, "agentic.negatives": 15}
FAULTS = ("429", "cut", "no completion", "slow", "500", "no choices")
EVERY = 4  # of the requests meets a fault
SLOW = 5.0
SHOWN = 3  # replies that could not be read, in the result
FILES = ("trajectories.jsonl", "candidates.jsonl", "local.jsonl", "global.jsonl", "pairs.jsonl")


@main_guard
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server-python", type=interpreter, default=sys.executable, help="the interpreter that has transformers[serving]"
    )
    parser.add_argument("--models", default=",".join(MODELS), help=f"judges behind the server (default {','.join(MODELS)})")
    parser.add_argument("--warmstart", type=Path, default=runs.HOME / "runs/pocket/warmstart", help="the policy that judges itself")
    parser.add_argument("--root", type=Path, help="where the runs lie (default runs/judge)")
    args = parser.parse_args()
    root = (args.root or runs.HOME / "runs" / NAME).absolute()
    root.mkdir(parents=True, exist_ok=True)
    own = comparators_pocket.pocket(root, args.warmstart) | comparators_pocket.METHODS["agentic_r"]
    own |= {"method.name": "agentic_r", "agentic.judge": "policy", "agentic.questions": 3}
    world = root / "world"
    world.mkdir(exist_ok=True)
    shared = agentic_kill.OVERRIDES | agentic_kill.write_world(world) | ROUND
    path = runs.RESULTS / f"{NAME}.json"
    result: dict = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"judges": {}}
    result |= {"server": endpoint_server.version(args.server_python), "round": ROUND}
    result["judges"]["the policy itself"] = runs.measured(root / "policy", own, lambda: by_policy(root / "policy", own))
    write_text(path, json.dumps(result, indent=1) + "\n")
    models = [model for model in args.models.split(",") if model]
    for model in models:
        for part in behind_the_server(result, model, args.server_python, root, shared, model == models[0]):
            result |= part
            write_text(path, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def behind_the_server(result: dict, model: str, python: str, root: Path, shared: dict, also_disturbed: bool) -> Iterator[dict]:
    """The parts of one model; its server starts where one of them is not done yet."""
    folder, whole = hub.resolve(model), root / model
    settings = shared | {"agentic.judge_model": str(folder)}
    with contextlib.ExitStack() as stack:

        @functools.cache
        def proxy() -> Proxy:
            url, _ = stack.enter_context(endpoint_server.server(python, folder, root))
            return stack.enter_context(Proxy(url))

        yield {"judges": result["judges"] | {model: runs.measured(whole, settings, lambda: judged(whole, settings, proxy()))}}
        if also_disturbed:
            yield {"disturbed": runs.measured(root / "disturbed", settings, lambda: disturbed(root, whole, settings, proxy()))}


# ---------------------------------------------------------------------------------------------------------------- runs


class Run(agentic_kill.Run):
    def say(self) -> str:
        return runs.last_line(self.log)

    def to_its_end(self) -> int:
        return self.start().wait()

    @property
    def round(self) -> Path:
        return self.workdir / agentic_kill.ROUND_1


def judged(folder: Path, overrides: dict, proxy: Proxy) -> dict:
    """One round, undisturbed."""
    proxy.answered.clear()
    run = Run(folder, "whole", overrides | {"agentic.judge": proxy.url})
    code = run.to_its_end()
    return read(run.round) | {"exit": code, "says": "" if not code else run.say(), "answered": sum(proxy.answered.values())}


def by_policy(folder: Path, overrides: dict) -> dict:
    """One round of the pocket configuration whose policy is its own judge."""
    log = folder / "run.log"
    with log.open("a") as out:
        command = comparators_pocket.command(folder / "run", overrides)
        code = subprocess.run(command, cwd=runs.HOME, env=runs.environment(folder), stdout=out, stderr=out).returncode
    says = runs.last_line(log).replace(str(folder), "") if code else ""
    found = read(folder / "run" / agentic_kill.ROUND_1)
    return found | {"exit": code, "says": says, "candidates": overrides["agentic.candidates"]}


def read(folder: Path) -> dict:
    """What a round's files say of its judge; {} of one that did not come so far."""
    summary = folder / "summary.json"
    found = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    if "local" not in found:
        return {}
    local = [json.loads(line) for line in (folder / "local.jsonl").read_text(encoding="utf-8").splitlines()]
    unread = [text for row in local for text in row.get("unread", ())]
    scores = [score for row in local for score in row["scores"] or ()]
    return {
        "local": found["local"],
        "share_read": 1 - found["local"]["unread_lists"] / max(1, found["local"]["lists"]),
        "not_sure": sum(row["sub_answer"] == "Not Sure" for row in local),
        "different_scores": len(set(scores)),
        "hints": [row["sub_answer"] for row in local][:SHOWN],
        "unread": list(dict.fromkeys(unread))[:SHOWN],
        "pairs": {name: value for name, value in found.get("pairs", {}).items() if name != "seconds"},
    }


def disturbed(root: Path, whole: Path, overrides: dict, proxy: Proxy) -> dict:
    """The same round through every kind of fault, a kill, and a server that goes away."""
    proxy.answered.clear()
    proxy.faults = True
    run = Run(root, "disturbed", overrides | {"agentic.judge": proxy.url})
    cache = run.round / "judge.requests.jsonl"
    process = run.start()
    while proxy.total() < 5 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.idle()
    killed = {"answered": proxy.total(), "kept": runs.lines(cache)}

    process = run.start()
    while proxy.total() < killed["answered"] + 5 and process.poll() is None:
        time.sleep(0.05)
    proxy.down = True
    code = process.wait()
    proxy.idle()
    down = {"exit": code, "says": run.say().replace(proxy.url, "URL"), "answered": proxy.total(), "kept": runs.lines(cache)}

    proxy.down = False
    code = run.to_its_end()
    proxy.faults = False
    twice = sum(count - 1 for count in proxy.answered.values())
    theirs = Run(whole, "whole", {}).round
    return {
        "faults": dict(proxy.met),
        "killed": killed,
        "without_server": down,
        "exit": code,
        "answered": proxy.total(),
        "different_requests": len(proxy.answered),
        "answered_twice": twice,
        "lost_with_the_kill": killed["answered"] - killed["kept"],
        "same_files": {name: (run.round / name).read_bytes() == (theirs / name).read_bytes() for name in FILES},
        "local": read(run.round)["local"],
    }


# --------------------------------------------------------------------------------------------------------------- proxy


class Proxy:
    """Passes requests on to a server and counts, by what was asked, those that it answered.

    faults: every `EVERY`th request meets the next of `FAULTS`. down: no request is answered.
    """

    def __init__(self, target: str):
        self.target = urllib.parse.urlsplit(target)
        self.answered: collections.Counter = collections.Counter()
        self.met: collections.Counter = collections.Counter()
        self.faults = self.down = False
        self._seen = self._under_way = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with proxy._lock:
                    proxy._under_way += 1
                try:
                    proxy.handle(self, body)
                finally:
                    with proxy._lock:
                        proxy._under_way -= 1

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def total(self) -> int:
        return sum(self.answered.values())

    def idle(self) -> None:
        """Wait until nothing is under way."""
        while self._under_way:
            time.sleep(0.05)

    def handle(self, request: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        fault = self._fault()
        if fault == "cut":
            request.close_connection = True
            request.connection.close()
        elif fault in ("429", "500"):
            self._reply(request, int(fault), b'{"error": {"message": "too many requests"}}', {"Retry-After": "0.5"})
        elif fault == "no completion":
            self._reply(request, 200, b"<html>a gateway says hello</html>")
        elif fault == "no choices":
            self._reply(request, 200, b'{"object": "chat.completion", "choices": []}')
        else:
            if fault == "slow":
                time.sleep(SLOW)
            connection = http.client.HTTPConnection(self.target.hostname, self.target.port, timeout=600)
            connection.request("POST", request.path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if answer.status == 200:
                with self._lock:
                    self.answered[body] += 1
            self._reply(request, answer.status, content)

    def _fault(self) -> str | None:
        if self.down:
            return "cut"
        with self._lock:
            self._seen += 1
            if not self.faults or self._seen % EVERY:
                return None
            fault = FAULTS[self._seen // EVERY % len(FAULTS)]
            self.met[fault] += 1
            return fault

    @staticmethod
    def _reply(request, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        with contextlib.suppress(OSError):  # who asked is gone
            request.send_response(status)
            for name, value in (headers or {}).items():
                request.send_header(name, value)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content)


if __name__ == "__main__":
    main()
