"""A damaged checkpoint is refused by name, whatever bit of it is damaged; the sums do not depend on the mesh."""

import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_devices import run_on_devices

from bridge_jax.errors import UserError
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.training.checkpoints import Checkpoints
from bridge_jax.training.checksums import checksums


def state(seed=0):
    tree = {"kernel": jax.random.normal(jax.random.key(seed), (64, 30)), "count": jnp.arange(5)}
    return BridgeState(jnp.int32(seed), tree, {"m": tree}, {"a": tree["kernel"] * 2}, {"m": tree}, jax.random.key(0))


def by_hand(array: np.ndarray) -> int:
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    return sum(int(b) * (2 * i + 1) for i, b in enumerate(bits)) % 2**32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_the_sum_by_hand(dtype):
    array = jnp.asarray(np.random.default_rng(0).integers(0, 200, (3, 5, 7)), dtype)
    assert checksums({"x": {"y": array}}) == {"x/y": by_hand(np.asarray(array))}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 64 * 30 - 1), st.integers(0, 31))
def test_any_flipped_bit_changes_it(place, bit):
    array = np.array(state().policy["kernel"])
    before = checksums([array])
    array.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert checksums([array]) != before


@pytest.mark.parametrize("damage", [('"step"', '"stdp"'), ('"step": 1', '"step": 3')])
def test_a_damaged_position_is_refused(damage, tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2, fingerprint={})
    checkpoints.save(1, state(1))
    checkpoints.close()
    path = folder / "1" / "position" / "metadata"
    assert path.read_text().count(damage[0]) == 1
    path.write_text(path.read_text().replace(*damage))
    with pytest.raises(UserError, match=r"is damaged: it says step (None|3): move it away"):
        Checkpoints(folder, keep=2, fingerprint={}, read_only=True).restore(1, state(0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves coroutines behind
def test_a_damaged_file_is_refused_or_harmless(tmp_path):
    """One bit flipped, or the end cut off, in each file of a checkpoint in turns: never another state without an error."""
    saved, folder = state(1), tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2, fingerprint={"policy": "a"})
    checkpoints.save(1, saved)
    checkpoints.close()
    chance, outcomes = random.Random(0), {"refused": 0, "harmless": 0}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size):
        whole = path.read_bytes()
        for cut in (False, True):
            place = chance.randrange(len(whole))
            flipped = whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]
            path.write_bytes(whole[:place] if cut else flipped)
            try:
                restored = Checkpoints(folder, keep=2, fingerprint={"policy": "a"}, read_only=True).restore(1, state(0))
            except UserError as error:
                assert "move it away" in str(error) or "use another --workdir" in str(error)
                outcomes["refused"] += 1
            else:
                same = jax.tree.map(lambda a, b: bool((a == b).all()), restored, saved.replace(rng=state(0).rng))
                assert all(jax.tree.leaves(same)), path
                outcomes["harmless"] += 1
        path.write_bytes(whole)
    assert outcomes["refused"] > 10 and outcomes["harmless"] > 0  # some files are never read


ON_A_MESH = """
import jax
from bridge_jax.mesh import make_mesh, put
from bridge_jax.training.checksums import checksums

x = jax.random.normal(jax.random.key(0), (8, 12))
mesh = make_mesh(data=1, fsdp=2, tensor=2)
split = put(x, jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))
assert len({str(shard.index) for shard in split.addressable_shards}) == 4
assert checksums({"x": split}) == checksums({"x": x})
print("equal")
"""


def test_the_mesh_does_not_matter():
    done = run_on_devices(4, ON_A_MESH, Path(__file__).parent)
    assert done.stdout.strip() == "equal", done.stderr
