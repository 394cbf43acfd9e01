"""A long stage's rows on disk, block by block: killed, it goes on behind the last whole block, to the same rows.

    <folder>/<name>.parts/000000.json   a block: {"seconds", "counts", "rows"}, whole or not there
    <folder>/<name>.jsonl               all rows, when all blocks are there; the parts go then
    <folder>/summary.json               {name: {"seconds", counts ...}} of the finished stages

Where blocks are cut depends on the items alone, so a block is computed with the same neighbours, and in float arithmetic to the
same bits, whether or not its stage was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence

from bridge_jax import distributed, preemption
from bridge_jax.files import AnyPath, delete_folder, write_text
from bridge_jax.retrieval.progress import track

Work = Callable[[Sequence], tuple[list[dict], Counter]]


def run_stage(folder: AnyPath, name: str, items: Sequence, block: int, work: Work) -> list[dict]:
    """The rows that `work` makes of all `items`, `block` of them at a time. With several processes all must call it.

    work: items -> (rows, counts); the same in every process, those that others made included (`distributed.share`). SIGTERM breaks
    off between two blocks at the latest.
    """
    path, parts = folder / f"{name}.jsonl", folder / f"{name}.parts"
    if distributed.on_main(path.exists):
        return read_rows(path)
    found = []
    if distributed.is_main():
        parts.mkdir(parents=True, exist_ok=True)
    shown = track(name, len(items), "items") if distributed.is_main() else contextlib.nullcontext(lambda done: None)
    with shown as advance:
        for number, at in enumerate(range(0, len(items), block)):
            part = parts / f"{number:06d}.json"
            if distributed.on_main(part.exists):
                made = json.loads(part.read_text(encoding="utf-8"))
            else:
                preemption.check_together()
                began = time.monotonic()
                rows, counts = work(items[at : at + block])
                made = {"seconds": time.monotonic() - began, "counts": dict(counts), "rows": rows}
                if distributed.is_main():
                    write_text(part, json.dumps(made, ensure_ascii=False))
            found.append(made)
            advance(len(items[at : at + block]))
    counts: Counter = Counter()
    for made in found:
        counts.update(made["counts"])  # keeps what was never counted at 0, as a sum would not
    rows = [row for made in found for row in made["rows"]]
    note(folder, name, {"seconds": sum(made["seconds"] for made in found), "rows": len(rows), **counts})
    distributed.on_main(lambda: write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)))
    distributed.on_main(lambda: delete_folder(parts))
    # As they will be read back.
    return json.loads(json.dumps(rows))


def note(folder: AnyPath, name: str, facts: dict) -> None:
    """Put a stage's facts into the summary."""
    path = folder / "summary.json"
    distributed.on_main(lambda: write_text(path, json.dumps(summary(folder) | {name: facts}, indent=1) + "\n"))


def summary(folder: AnyPath) -> dict[str, dict]:
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_rows(path: AnyPath) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
