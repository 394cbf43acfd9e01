"""The BRIDGE step, and the policy's half with PPO, on four devices equal those on one. Own processes: devices are made at start."""

from pathlib import Path

import pytest
from virtual_devices import run_on_devices

BRIDGE = """
import jax
import numpy as np
from bridge_jax.mesh import make_mesh, shard_tree
from bridge_jax.objectives.bilevel import Batch, Frozen, Modules, init_state, make_optimizers, make_step
from bridge_jax.training.batch import place
from test_bilevel import CONFIG, world
from tiny_world import cut

assert len(jax.devices()) == 4
_, frozen, fresh, batch = world()
modules, _, _, _ = world()
batch = Batch(cut(batch.rollouts), batch.turns)
alone, metrics_alone = make_step(CONFIG, modules)(frozen, fresh(), batch)

mesh = make_mesh(data=1, fsdp=2, tensor=2)
sharded = Modules(modules.policy.clone(mesh=mesh), modules.encoder.clone(mesh=mesh), *make_optimizers(CONFIG))
frozen = Frozen(shard_tree(mesh, frozen.policy), shard_tree(mesh, frozen.encoder))
kernel = frozen.policy["layers"]["gate_proj"]["kernel"]
assert len({str(s.index) for s in kernel.addressable_shards}) == 4, kernel.sharding
batch = Batch(place(batch.rollouts, mesh), place(batch.turns, mesh))
assert batch.rollouts.tokens.sharding.spec[2] == ("data", "fsdp"), batch.rollouts.tokens.sharding
state = fresh()
state = init_state(sharded, shard_tree(mesh, state.policy), shard_tree(mesh, state.retriever), state.rng)
state, metrics = make_step(CONFIG, sharded)(frozen, state, batch)
for name in metrics_alone:
    np.testing.assert_allclose(metrics[name], metrics_alone[name], rtol=1e-3, atol=3e-5, err_msg=name)
# Adam divides tiny gradients by their own size: compare where the update is not rounding noise
for one, four in zip(jax.tree.leaves((alone.policy, alone.retriever)), jax.tree.leaves((state.policy, state.retriever))):
    assert np.median(np.abs(np.asarray(one) - np.asarray(four))) < 1e-5
print("equal")
"""


PPO = """
import functools
import jax
import numpy as np
from bridge_jax.mesh import make_mesh, shard_tree
from bridge_jax.objectives import ppo_step
from bridge_jax.objectives.bilevel import Frozen, Modules, init_state, make_optimizers
from bridge_jax.training.batch import place
from test_ppo_step import CONFIG, world
from tiny_world import cut

modules, frozen, fresh, rollouts = world()
rollouts = cut(rollouts)
step = lambda modules: jax.jit(functools.partial(ppo_step.policy_step, CONFIG, modules))
alone, metrics_alone = step(modules)(frozen, fresh(), rollouts)

mesh = make_mesh(data=1, fsdp=2, tensor=2)
sharded = Modules(modules.policy.clone(mesh=mesh), modules.encoder, *make_optimizers(CONFIG))
frozen = Frozen(shard_tree(mesh, frozen.policy), frozen.encoder)
state = fresh()
trees = (shard_tree(mesh, tree) for tree in (state.policy, state.retriever))
state = init_state(sharded, *trees, state.rng, shard_tree(mesh, state.critic))
state, metrics = step(sharded)(frozen, state, place(rollouts, mesh))
for name in metrics_alone:
    np.testing.assert_allclose(metrics[name], metrics_alone[name], rtol=1e-3, atol=3e-5, err_msg=name)
for one, four in zip(jax.tree.leaves((alone.policy, alone.critic)), jax.tree.leaves((state.policy, state.critic))):
    assert np.median(np.abs(np.asarray(one) - np.asarray(four))) < 1e-5
print("equal")
"""


@pytest.mark.parametrize("script", [BRIDGE, PPO], ids=["bridge", "ppo"])
def test_four_devices_equal_one(script):
    done = run_on_devices(4, script, Path(__file__).parent)
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
