"""Played rollouts: the counting device against closed forms, and what the rules of `rollout/flight.py` do on ragged workloads."""

import dataclasses

import flight_play
import numpy as np
import pytest

from bridge_jax.rollout.episodes import RolloutConfig

CONFIG = RolloutConfig(
    max_prompt_tokens=256,
    max_new_tokens=2048,
    max_observation_tokens=1024,
    max_response_tokens=4096,
    chunk=32,
    batch_groups=2,
    max_searches=2,
)
RULES = {"act": 1 / 4, "parts": 8, "by_batches": False, "one_width": False}


def play(plans, act=RULES["act"], **changes):
    """plans: one rollout a group, (generations, observations)."""
    workload = flight_play.Workload(questions=len(plans), group_size=1)
    return flight_play.play(workload, dataclasses.replace(CONFIG, **changes), [[plan] for plan in plans], **(RULES | {"act": act}))


def test_counts_of_a_rollout_that_can_be_followed_by_hand():
    """Two generations of 40 and 30 tokens in chunks of 32, an observation of 200 in the bucket of 256, the narrowest width."""
    found = play([([40, 30], [200])], batch_groups=1)
    assert (found["decode_steps"], found["decoded_tokens"], found["rows_decoding"]) == (70, 70, 1.0)
    assert (found["mean_width"], found["append_positions"], found["prefill_positions"]) == (1024, 256, 256)
    assert "compactions" not in found
    column = 2 * 36 * 2 * 2 * 128  # bytes of a row's column: 36 layers, keys and values of 2 heads of 128, bfloat16
    weights = 2 * 3_085_938_688  # Qwen2.5-3B's parameters, the embedding once
    decode = 70 * (weights + 256 * column + 1024 * column) / 4.8e12
    assert found["seconds"]["decode"] == pytest.approx(decode, rel=1e-6)
    assert found["seconds"]["read"] == pytest.approx(max(2 * weights / 4.8e12, 512 * weights / (0.4 * 989e12)), rel=1e-6)


def test_observations_beside_long_rows_do_not_move_the_cache_to_and_fro():
    """Rows near the end of a width, and others whose observations would not fit into it: the block is widened, and stays."""
    found = play([([900], []), ([40] * 3, [480] * 2), ([40] * 3, [480] * 2)] * 20, batch_groups=8)
    assert found["widened"] == 1
    assert found["narrowed"] == 0
    assert found["compactions"] <= 5


@pytest.mark.parametrize("groups", [9, 17])
def test_no_place_stays_empty_while_a_question_waits(groups):
    """Parts of the places that do not divide them: everyone decodes from the first step to the last, by turns of equal rollouts."""
    found = play([([64], [])] * (3 * groups), batch_groups=groups)
    assert (found["rows_decoding"], found["decode_steps"]) == (1.0, 3 * 64)


def test_the_last_question_does_not_wait_for_a_part_of_the_places():
    """16 places, entered by twos: the last question takes the first place that is free, beside fifteen that go on for long."""
    found = play([([32], [])] + [([640], [])] * 16, batch_groups=16, act=1 / 16)
    assert found["decode_steps"] == 32 + 640


def test_workload():
    workload = flight_play.Workload(questions=400)
    plans = [plan for group in workload.plans(CONFIG, 0) for plan in group]
    assert np.mean([len(observations) for _, observations in plans]) == pytest.approx(workload.lengths.searches, rel=0.05)
    assert np.mean([n for generations, _ in plans for n in generations]) == pytest.approx(workload.lengths.generation, rel=0.1)
    assert all(len(generations) == len(observations) + 1 for generations, observations in plans)
    assert plans == [plan for group in workload.plans(CONFIG, 0) for plan in group]


def test_quick_result():
    result = flight_play.measure(quick=True, seed=0)
    first, last = result["played"][0], result["played"][-1]
    assert (first["time"], result["rows_decoding"]) == (1.0, last["rows_decoding"])
    assert {row["decoded_tokens"] for row in result["played"]} == {first["decoded_tokens"]}
    assert last["time"] < 1 and last["rows_decoding"] > first["rows_decoding"]
