"""The retrieval server against schemathesis: requests made from its OpenAPI description, right ones and wrong ones.

    python3 -m venv st && st/bin/pip install schemathesis
    python benchmarks/server_fuzz.py --schemathesis=st/bin/schemathesis

A real server process on an index of the mini world, with a token and without sending it, then with it. A 5xx, an answer that its
description does not have, or a server that is gone afterwards is a failure.

Writes benchmarks/results/server_fuzz.json and prints it as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests
from arguments import at_least, interpreter
from machine import about

ROOT = Path(__file__).parent.parent
EXAMPLES, SEED = 1500, 0  # requests made for each path and phase, at most
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
TOKEN = "token-of-this-test"


def start(folder: Path) -> tuple[subprocess.Popen, str]:
    """An index of 200 passages, then the server on it -> (process, address)."""
    rows = [{"id": str(i), "contents": f'"Title {i}"\nword{i} is passage {i}'} for i in range(200)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = [sys.executable, "-m"]
    build = [
        "bridge_jax.index",
        f"--corpus={folder / 'corpus.jsonl'}",
        "--encoder=mini-encoder",
        f"--out={folder / 'index'}",
        "--kind=exact",
        "--max-length=64",
    ]
    subprocess.run(run + build, check=True, cwd=ROOT)
    with open(folder / "stderr", "w") as errors:
        server = subprocess.Popen(
            [*run, "bridge_jax.serve", "--index", str(folder / "index"), "--port=0", "--max-body=200000"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=errors, env=os.environ | {"BRIDGE_JAX_SERVE_TOKEN": TOKEN},
        )  # fmt: skip
    return server, re.search(r"http://\S+", server.stdout.readline())[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", type=interpreter, required=True, help="the program")
    parser.add_argument("--examples", type=at_least(1), default=EXAMPLES)
    args = parser.parse_args()
    version = subprocess.run([args.schemathesis, "--version"], capture_output=True, text=True).stdout.strip()
    report = {"machine": about(), "schemathesis": version, "examples": args.examples, "seed": SEED, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        server, address = start(Path(folder))
        try:
            for header in ([], ["-H", f"Authorization: Bearer {TOKEN}"]):
                before, began = counted(address), time.monotonic()
                command = [
                    args.schemathesis, "run", f"{address}/openapi.json", f"--checks={CHECKS}", f"--max-examples={args.examples}",
                    f"--seed={SEED}", "--mode=all", "--phases=examples,coverage,fuzzing", "--continue-on-failure", *header,
                ]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                after = counted(address)
                answers = {key: value - before.get(key, 0) for key, value in after.items() if value > before.get(key, 0)}
                print(done.stdout[-8000:], file=sys.stderr)
                report["runs"].append({
                    "token": bool(header), "requests": sum(answers.values()), "answers": answers, "exit_code": done.returncode,
                    "seconds": round(time.monotonic() - began),
                })  # fmt: skip
            report["alive"] = requests.get(f"{address}/health", timeout=10).json()["status"] == "ok"
            server.terminate()
            report["server_exit_code"] = server.wait(60)
        finally:
            server.kill()
            server.wait()
        log = (Path(folder) / "stderr").read_text()
    report["token_in_log"], report["tracebacks"] = TOKEN in log, log.count("Traceback")
    failed = (
        report["token_in_log"] or report["tracebacks"] or any(run["exit_code"] for run in report["runs"]) or not report["alive"]
    )
    (ROOT / "benchmarks" / "results" / "server_fuzz.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 1 if failed else 0


def counted(address: str) -> dict[str, int]:
    """Requests by path and status, as the server counts them."""
    found = re.findall(r'retrieval_requests_total\{path="(.*?)",status="(\d+)"\} (\S+)', requests.get(f"{address}/metrics").text)
    return {f"{path} {status}": round(float(number)) for path, status, number in found}


if __name__ == "__main__":
    sys.exit(main())
