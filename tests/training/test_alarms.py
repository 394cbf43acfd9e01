"""The alarms of a step: each limit, what is no number, updates that are skipped in a row."""

from __future__ import annotations

import pytest

from bridge_jax import config as configuration
from bridge_jax.training.alarms import Alarms

ROUNDING = {"gap/logp_mean": 9e-4, "gap/logp_max": 0.07}  # of a sound run, bfloat16_gap.json


def said(dtype: str, row: dict) -> list[str]:
    config, texts = configuration.default(), []
    config.policy.compute_dtype = dtype
    Alarms(config).check(3, row, texts.append)
    return texts


@pytest.mark.parametrize(("gap", "warned"), [(0.0, False), (9e-4, False), (2e-3, True), (float("nan"), True), (float("inf"), True)])
def test_the_largest_difference_in_float32(gap, warned):
    texts = said("float32", {"gap/logp_max": gap})
    assert len(texts) == warned and all("step 3: the sampler's and the trainer's log-probs differ" in text for text in texts)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ROUNDING, []),
        (ROUNDING | {"gap/logp_mean": 3e-2}, ["gap/logp_mean is 3.0e-02, expected below 2e-02"]),
        (ROUNDING | {"gap/logp_max": 2.5}, ["gap/logp_max is 2.5e+00, expected below 1e+00"]),  # one corrupt row among many
        (ROUNDING | {"gap/logp_mean": float("nan")}, ["gap/logp_mean is nan"]),
        ({}, []),  # a step without a policy update
    ],
)
def test_mean_and_largest_in_bfloat16(row, expected):
    texts = said("bfloat16", row)
    assert len(texts) == len(expected) and all(part in text for part, text in zip(expected, texts, strict=True))


def test_updates_that_are_not_finite_stop_the_run_when_they_come_in_a_row():
    bad, good = {"retriever/skipped_updates": 2.0}, {"policy/skipped_updates": 0.0}
    alarms = Alarms(configuration.default())
    for step, row in enumerate([bad, bad, good, bad, bad], start=1):
        alarms.check(step, row, print)
    with pytest.raises(configuration.UserError, match="step 6: non-finite gradients in 3 steps in a row; the newest checkpoint"):
        alarms.check(6, bad, print)


def test_a_run_that_goes_on_knows_the_steps_before():
    bad = {"policy/skipped_updates": 1.0}
    with pytest.raises(configuration.UserError, match="in 3 steps in a row"):
        Alarms(configuration.default(), [bad, bad]).check(3, bad, print)
