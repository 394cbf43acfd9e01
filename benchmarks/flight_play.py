"""What the rules of `rollout/flight.py` are worth: ragged rollouts played through it with a device that only counts.

    python benchmarks/flight_play.py           # the defaults of bridge_jax/config.py, two minutes, no weights
    python benchmarks/flight_play.py --quick

The module's own code decides who enters, decodes, is answered and is moved; no token is computed. 512 questions x 8 rollouts in 64
places. A rollout has up to two searches; lengths of generations are exponential with a mean of the group's own, lengths of
observations normal: `Workload`. Rows of the result are settings of the rules, the last one those in use; `rows_decoding` at the top
is its share of the batch's rows that decodes in a step (OCCUPANCY of `paper_scale.py`). Counted: decode steps, the private block's
mean width over them, positions computed in prefills and observations (padding included), moves of the whole cache (`compactions`).
`seconds` weighs the counts as a 3B model in bfloat16 on one H200 would, from the data sheet: a model that compares rules, not
machines. `time` is relative to the first row:

    questions      acted on when      parts  widths     decode steps   rows decoding   mean width   positions appended   time
    by batches     all have stopped   1/16   one           20,180           8 %          5,120          3.74 M           1.00
    by batches     all have stopped   1/16   quarters      20,180           8 %          2,092          3.74 M           0.52
    by batches     1/4 have           1/16   quarters      11,768          13 %          2,378          6.43 M           0.46
    as they can    1/2 have           1/16   quarters       5,039          31 %          2,890          4.52 M           0.28
    as they can    1/8 have           1/16   quarters       4,503          35 %          2,905          5.41 M           0.29
    as they can    1/4 have           1/8    quarters       4,663          34 %          2,960          6.93 M           0.35
    as they can    1/4 have           1/32   quarters       4,471          35 %          2,896          4.41 M           0.26
    as they can    1/4 have           1/16   one            4,503          35 %          5,120          5.37 M           0.37
    as they can    1/4 have           1/16   quarters       4,503          35 %          2,905          5.37 M           0.29   <-
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import training_runs as runs
from arguments import at_least
from credit import QWEN_3B
from machine import about
from paper_scale import BYTES, H200, MFU, Lengths

from bridge_jax import config as configuration
from bridge_jax.models import qwen2
from bridge_jax.rollout import flight
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.episodes import RolloutConfig
from bridge_jax.rollout.rows import Row
from bridge_jax.training.assets import rollout_config

NAME = "flight_play"
# Times that a part of the cache is read or written when observations are appended to it: taken out, moved to the front, put back.
APPEND_PASSES = 6


@dataclasses.dataclass(frozen=True)
class Workload:
    """questions, group_size: of one run. spread: sigma of the lognormal factor on a group's mean generation. The rest is tokens."""

    questions: int = 512
    group_size: int = 8
    spread: float = 0.5
    observation_spread: float = 60.0
    lengths: Lengths = dataclasses.field(default_factory=Lengths)

    def plans(self, config: RolloutConfig, seed: int) -> list[list[tuple[list[int], list[int]]]]:
        """For each group and sample: the lengths of its generations, and of the observations between them."""
        rng, lengths = np.random.default_rng(seed), self.lengths
        again = (np.sqrt(1 + 4 * lengths.searches) - 1) / 2  # chance of a search, in either turn: again + again^2 searches
        plans = []
        for mean in lengths.generation * rng.lognormal(-(self.spread**2) / 2, self.spread, self.questions):
            searches = (rng.random((self.group_size, config.max_searches)) < again).cumprod(1).sum(1)
            plans.append([(self._generations(rng, mean, n + 1, config), self._observations(rng, n, config)) for n in searches])
        return plans

    @staticmethod
    def _generations(rng, mean: float, count: int, config: RolloutConfig) -> list[int]:
        return np.clip(np.ceil(rng.exponential(mean, count)), 1, config.max_new_tokens).astype(int).tolist()

    def _observations(self, rng, count: int, config: RolloutConfig) -> list[int]:
        lengths = rng.normal(self.lengths.observation, self.observation_spread, count)
        return np.clip(lengths, 1, config.max_observation_tokens).astype(int).tolist()


class Device:
    """A `sampler.Sampler` for `Flight` that knows how long every generation is, and counts what would be computed."""

    mesh = None

    def __init__(self, plans, group_size: int):
        self._plans = [plan for group in plans for plan in group]
        self._size = group_size
        self.counts: Counter = Counter()

    def start(self, variables, prompts, lengths, slots, sample_ids, left, *, groups, prompt_width, width):
        rows = groups * self._size
        self._sample, self._turn, self._left = np.zeros((3, rows), np.int64)
        self._filled = np.zeros(rows, np.int64)
        state = self._state(np.full(rows, device.IDLE), 0, width)
        return self.enter(variables, state, prompts, lengths, slots, sample_ids, left)

    def _state(self, reason, column: int, width: int):
        valid = np.broadcast_to(False, (len(reason), width))
        return SimpleNamespace(private=SimpleNamespace(valid=valid), reason=reason, column=column, forwarded=0, computed=0)

    def _begin(self, state, rows, turn) -> np.ndarray:
        self._turn[rows] = turn
        self._left[rows] = [self._plans[sample][0][at] for sample, at in zip(self._sample[rows], self._turn[rows], strict=True)]
        reason = state.reason.copy()
        reason[rows] = device.RUNNING
        return reason

    def enter(self, variables, state, prompts, lengths, slots, sample_ids, left):
        there = np.repeat(slots < len(state.reason) // self._size, self._size)
        rows = (slots[:, None] * self._size + np.arange(self._size)).reshape(-1)[there]
        self._sample[rows], self._filled[rows] = sample_ids[there], 0
        self.counts["prefill_positions"] += prompts.size
        self.counts["prefills"] += 1
        return self._state(self._begin(state, rows, 0), state.column, state.private.valid.shape[1])

    def decode_chunk(self, variables, state, key, temperature, *, steps: int):
        running, width = state.reason == device.RUNNING, state.private.valid.shape[1]
        written = np.where(running, np.minimum(self._left, steps), 0)
        taken = int(written.max())
        assert state.column + taken <= width
        self._left -= written
        self._filled += written
        self.counts["decode_steps"] += taken
        self.counts["decoded_tokens"] += int(written.sum())
        self.counts["decode_columns"] += taken * width
        reason = np.where(running & (self._left == 0), device.SEARCH, state.reason)
        tokens = np.zeros((len(running), steps), np.int32)
        return self._state(reason, state.column + taken, width), tokens, tokens.astype(np.float32), written

    def append(self, variables, state, rows, tokens, lengths, left):
        width = state.private.valid.shape[1]
        behind = int(self._filled[rows[rows < len(state.reason)]].max())
        assert behind + tokens.shape[1] <= width
        there = rows[rows < len(state.reason)]
        self._filled[there] += lengths[: len(there)]
        self.counts["append_positions"] += tokens.size
        self.counts["append_columns"] += len(rows) * width
        self.counts["appends"] += 1
        reason = self._begin(state, there, self._turn[there] + 1)
        return self._state(reason, max(state.column, behind + int(lengths.max())), width)

    def compact(self, state, keep, *, width: int):
        old = state.private.valid.shape[1]
        self._filled[~keep] = 0
        self.counts["compactions"] += 1
        self.counts["widened"] += width > old
        self.counts["narrowed"] += width < old
        self.counts["moved_columns"] += min(old, width) + width  # read and written
        return self._state(state.reason, int(self._filled.max()), width)


class Actions:
    """An `environment.Environment` that follows the plans."""

    def __init__(self, config: RolloutConfig, plans):
        self.config = config
        self._plans = plans

    def act(self, rows, reasons):
        asked = {}
        for index, row in rows.items():
            row.generation += 1
            if row.generation == len(self._plans[row.group][row.sample][0]):
                row.end("answered")
            else:
                asked[index] = ""
        return {}, asked

    def search(self, rows, searches):
        return None

    def answer(self, rows, searches, found):
        observations = {}
        for index in searches:
            row = rows[index]
            observations[index] = np.zeros(self._plans[row.group][row.sample][1][row.generation - 1], np.int32)
            row.write(observations[index].tolist())
        return observations


def play(workload: Workload, config: RolloutConfig, plans, *, act: float, parts: int, by_batches: bool, one_width: bool) -> dict:
    """One row of the result: the counts, and what they would take."""
    widths = flight.private_widths(config)
    size, groups = workload.group_size, config.batch_groups
    counter = Device(plans, size)
    prompt = np.zeros(workload.lengths.prompt, np.int32)
    waiting = [[Row(group, sample, prompt) for sample in range(size)] for group in range(workload.questions)]
    settings = {"prompt_width": flight.bucket(flight.length_buckets(config.max_prompt_tokens), len(prompt)), "group_size": size}
    settings |= {"key": None, "temperature": 1.0, "counts": Counter()}
    with mock.patch.multiple(flight, ACT_SHARE=act, PARTS=parts):
        step = groups if by_batches else workload.questions
        for at in range(0, workload.questions, step):
            one = flight.Flight(counter, Actions(config, plans), widths[-1:] if one_width else widths, None, **settings)
            one.run(waiting[at : at + step], lambda groups: None)
    for group, planned in zip(waiting, plans, strict=True):
        assert [len(row.tokens) for row in group] == [sum(map(sum, plan)) for plan in planned]
    counts, rows = counter.counts, groups * size
    return {
        "rows_decoding": counts["decoded_tokens"] / (counts["decode_steps"] * rows),
        "mean_width": counts["decode_columns"] / counts["decode_steps"],
        **counts,
        "seconds": seconds(counts, rows, groups * settings["prompt_width"]),
    }


def seconds(counts: Counter, rows: int, shared_columns: int) -> dict[str, float]:
    """Roofline: bytes for decoding and moving; products at MFU of the peak for prefills and observations, or the weights' bytes."""
    weights = sum(x.size for x in jax.tree.leaves(qwen2.abstract_params(QWEN_3B)))
    column = BYTES * QWEN_3B.num_layers * 2 * QWEN_3B.num_kv_heads * QWEN_3B.head_dim  # of one row
    each_step = BYTES * weights + shared_columns * column

    def read(kind: str) -> float:
        products = 2 * weights * counts[f"{kind}_positions"] / (MFU * H200["flops"])
        return max(products, counts[f"{kind}s"] * BYTES * weights / H200["bytes"])

    parts = {
        "decode": (counts["decode_steps"] * each_step + counts["decode_columns"] * rows * column) / H200["bytes"],
        "read": read("prefill") + read("append"),
        "move": (counts["moved_columns"] * rows + APPEND_PASSES * counts["append_columns"]) * column / H200["bytes"],
    }
    return parts | {"all": sum(parts.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="32 questions in 8 places; the result lies under runs/")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.set_defaults(root=None)
    args = parser.parse_args()
    result = measure(args.quick, args.seed)
    runs.save(NAME, result, args)
    print(json.dumps(result))


def measure(quick: bool, seed: int) -> dict:
    config, workload = rollout_config(configuration.default()), Workload()
    if quick:
        config, workload = dataclasses.replace(config, batch_groups=8), dataclasses.replace(workload, questions=32)
    plans = workload.plans(config, seed)
    own = {"act": flight.ACT_SHARE, "parts": flight.PARTS, "by_batches": False, "one_width": False}
    table = [
        {"by_batches": True, "act": 1.0, "one_width": True},
        {"by_batches": True, "act": 1.0},
        {"by_batches": True},
        {"act": 1 / 2},
        {"act": 1 / 8},
        {"parts": 8},
        {"parts": 32},
        {"one_width": True},
        {},
    ]
    played = []
    for changes in table:
        played.append({**own, **changes, **play(workload, config, plans, **(own | changes))})
        row = played[-1]
        row["time"] = row["seconds"]["all"] / played[0]["seconds"]["all"]
        runs.say(" ".join(f"{name}={row[name]:.4g}" for name in (*own, "decode_steps", "rows_decoding", "mean_width", "time")))
    chip = H200 | {"mfu": MFU, "bytes_a_number": BYTES, "append_passes": APPEND_PASSES}
    conditions = {"workload": dataclasses.asdict(workload), "config": dataclasses.asdict(config), "chip": chip, "seed": seed}
    return {"rows_decoding": played[-1]["rows_decoding"], "played": played, **conditions, "machine": about()}


if __name__ == "__main__":
    main()
