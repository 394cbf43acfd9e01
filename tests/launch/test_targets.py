"""Names of machines."""

import pytest
import targets
from hypothesis import given
from hypothesis import strategies as st

from bridge_jax.errors import UserError


@pytest.mark.parametrize(
    ("name", "shape", "chips", "hosts", "local_shape"),
    [
        ("v5e-1", "1x1", 1, 1, "1x1"),
        ("v5e-8", "2x4", 8, 1, "2x4"),
        ("v5e-16", "4x4", 16, 4, "2x2"),
        ("v5litepod-16", "4x4", 16, 4, "2x2"),
        ("v5e:4x4", "4x4", 16, 4, "2x2"),
        ("v5e-256", "16x16", 256, 64, "2x2"),
        ("v6e-16", "4x4", 16, 4, "2x2"),
        ("v5p-8", "2x2x1", 4, 1, "2x2x1"),  # names of v4 and v5p count cores, two a chip
        ("v5p-64", "2x4x4", 32, 8, "2x2x1"),
        ("v5p:4x4x4", "4x4x4", 64, 16, "2x2x1"),
        ("v4-32", "2x2x4", 16, 4, "2x2x1"),
        ("h200x8", "1x1x8", 8, 1, "1x1x8"),
        ("H200 x 8", "1x1x8", 8, 1, "1x1x8"),
        ("a100-80gb", "1x1x1", 1, 1, "1x1x1"),
        ("a100x16", "1x2x8", 16, 2, "1x1x8"),
        ("a100x2x4", "1x2x4", 8, 2, "1x1x4"),
        ("t4x1", "1x1x1", 1, 1, "1x1x1"),
        ("cpux4", "1x1x4", 4, 1, "1x1x4"),
    ],
)
def test_names(name, shape, chips, hosts, local_shape):
    target = targets.parse(name)
    assert (target.shape, target.chips, target.hosts, target.local_shape) == (shape, chips, hosts, local_shape)
    assert target.local * target.hosts == target.chips


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("v7-16", "no such target; known are v4, v5e, v5p"),
        ("h20x8", "did you mean h200"),
        ("v5e-17", "no slice of that size; sizes are v5e-1, v5e-4, v5e-8, v5e-16"),
        ("v5p-63", "sizes are v5p-8, v5p-16, v5p-32, v5p-64"),
        ("v5p:4x4", "shapes of TPU v5p are like v5p:2x2x1"),
        ("v5e:3x3", "9 chips are no whole number of hosts of 4"),
        ("h200:4x4", "say how many, h200x8"),
        ("h200x12", "12 are no whole number of machines of 8"),
        ("h200x0", "say how many"),
        ("", "known are"),
    ],
)
def test_a_wrong_name_is_told_what_there_is(name, why):
    with pytest.raises(UserError, match=why) as error:
        targets.parse(name)
    assert str(error.value).startswith(f"--target={name}: ")


@given(st.text(alphabet="v4568eptahx0123 :-gb", max_size=12))
def test_anything_else_is_a_user_error(name):
    try:
        target = targets.parse(name)
    except UserError:
        return
    assert target.chips >= 1 and target.chips % target.hosts == 0


def test_memory_is_what_a_program_gets():
    assert targets.CHIPS["v5e"].memory == 15.75 * 2**30
    for name, nominal in (("a100", 80e9), ("h200", 141e9), ("t4", 16e9)):  # bytes on the box
        assert 0.85 * nominal < targets.CHIPS[name].memory < nominal
