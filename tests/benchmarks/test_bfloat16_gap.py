"""What is counted as above the alarm's limits."""

import bfloat16_gap


def test_a_gap_that_is_no_number_is_above_its_limit():
    besides = {"reward/mean": 0.5, "policy/skipped_updates": 0.0, "retriever/skipped_updates": 1.0, "time/wall": 2.0}
    gaps = [(0.01, 0.001), (2.0, 0.001), (0.01, 0.03), (None, 0.001), (0.01, None), (1.0, 0.02)]  # not finite: null in the file
    rows = [besides | {"gap/logp_max": most, "gap/logp_mean": mean} for most, mean in gaps]
    found = bfloat16_gap.summary(rows, {"gap/logp_mean": 2e-2, "gap/logp_max": 1.0})
    assert found["steps_above_the_limit"] == 4 and found["steps"] == 6 and found["skipped_updates"] == 6
