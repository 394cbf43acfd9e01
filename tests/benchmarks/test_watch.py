"""What is said of a process over time: means of two stretches and their difference, columns that do not grow with the run."""

import os
import sys

import pytest
import watch

SAMPLES = [{"t": t, "anon": 100.0 + t, "files": 7} for t in range(10)]


def test_growth_is_between_the_means_of_two_stretches():
    assert watch.growth(SAMPLES, "t", (1, 4), (7, 10)) == {"at t": [(1, 4), (7, 10)], "early": 102.0, "late": 108.0, "growth": 6.0}
    assert watch.growth(SAMPLES, "t", (0, 5), (5, 10), "files")["growth"] == 0.0
    partly = [sample | {"anon": None} if sample["t"] == 3 else sample for sample in SAMPLES]
    assert watch.growth(partly, "t", (1, 4), (7, 10))["early"] == 101.5  # of 101 and 102
    nothing = watch.growth(SAMPLES, "t", (1, 4), (20, 30))
    assert (nothing["early"], nothing["late"], nothing["growth"]) == (102.0, None, None)


@pytest.mark.parametrize("count, kept", [(0, 0), (1, 1), (200, 200), (201, 101), (1001, 167)])
def test_a_series_is_thinned_evenly(count, kept):
    found = watch.thinned([{"t": t / 3, "rss": t} for t in range(count)], ("t", "rss"))
    assert watch.KEPT == 200 and len(found["t"]) == len(found["rss"]) == kept <= watch.KEPT
    assert len({b - a for a, b in zip(found["rss"], found["rss"][1:], strict=False)}) <= 1
    assert found["t"] == [round(row / 3, 1) for row in found["rss"]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_look_at_this_process():
    before = watch.look(os.getpid())
    held = bytearray(b"x") * (64 << 20)
    with open(os.devnull) as _:
        after = watch.look(os.getpid())
    assert after["anon"] - before["anon"] == pytest.approx(64, abs=16) and before["anon"] < before["rss"] < 100_000
    assert after["files"] == before["files"] + 1 and after["threads"] >= 1 and held
    assert watch.look(2**22 + 1) is None
