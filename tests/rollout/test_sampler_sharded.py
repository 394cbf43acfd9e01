"""The sampler over a mesh of virtual devices: its state is split over them at every stage; it draws the tokens of one device."""

from pathlib import Path

from virtual_devices import run_on_devices

SCRIPT = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import rollout_tiny as tiny
from bridge_jax.mesh import make_mesh, shard_tree
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.stopping import stop_table

V = 48  # divides by four
model, variables = tiny.tiny_model(V)
table = stop_table(tiny.word_tokenizer(), V)
mesh = make_mesh(data=1, fsdp=2, tensor=2)


def split(state):
    for x in (state.shared.k, state.shared.v, state.private.k, state.private.v):
        L, rows, S, K, H = x.shape  # every device: half of the rows, one of the two heads
        assert {shard.data.shape for shard in x.addressable_shards} == {(L, rows // 2, S, K // 2, H)}, (x.shape, x.sharding)
    for x in (state.shared.valid, state.private.valid, state.hidden, state.position, state.left, state.reason, state.sample_id):
        assert {shard.data.shape[0] for shard in x.addressable_shards} == {x.shape[0] // 2}, (x.shape, x.sharding)


def play(sampler, variables, check):
    prompts = np.random.default_rng(0).integers(3, V, (4, 6)).astype(np.int32)
    ids, four, found = np.arange(16, dtype=np.int32), np.full(4, 6, np.int32), []

    def decode(state, temperature=1.0):
        state, tokens, logps, counts = sampler.decode_chunk(variables, state, jax.random.key(1), temperature, steps=8)
        check(state)
        found.extend((np.asarray(tokens)[row, :n].tolist(), np.asarray(logps)[row, :n]) for row, n in enumerate(counts))
        return state

    state = sampler.start(variables, prompts, four, four - 6 + np.arange(4), ids, ids * 0 + 20, groups=4, prompt_width=8, width=48)
    check(state)
    state = decode(state)
    state = sampler.enter(variables, state, prompts[:2, ::-1], four[:2], np.asarray([2, 0]), ids[:8] + 40, ids[:8] * 0 + 20)
    check(state)
    state = decode(state)
    observations = np.full((4, 5), 7, np.int32)
    state = sampler.append(variables, state, np.asarray([15, 3, 8, 16]), observations, np.asarray([5, 2, 3, 0]), four)
    check(state)
    state = sampler.compact(state, ids != 5, width=48)
    check(state)
    state = decode(state)
    state = sampler.compact(state, ids != 6, width=32)
    check(state)
    # The programs over the mesh are as many: a state comes in as it went out, whichever program made it.
    return found, sampler.compilations(), np.where(state.private.valid[:, :, None, None], state.private.v, 0)


alone, programs, values = play(device.Sampler(model, table, [1, 2]), variables, lambda state: None)
sharded = device.Sampler(model.clone(mesh=mesh), table, [1, 2])
four, programs_over_mesh, values_over_mesh = play(sharded, shard_tree(mesh, variables, model.config.units), split)
for (a, p), (b, q) in zip(alone, four, strict=True):
    assert a == b
    np.testing.assert_allclose(p, q, atol=1e-4)
assert sum(len(tokens) for tokens, _ in alone) > 100
np.testing.assert_allclose(values, values_over_mesh, atol=1e-4)
assert programs == programs_over_mesh, (programs, programs_over_mesh)
print("equal")
"""


def test_four_devices_equal_one():
    done = run_on_devices(4, SCRIPT, Path(__file__).parent, timeout=300)
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
    assert "rematerialization" not in done.stderr
