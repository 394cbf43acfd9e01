"""The critic: what it starts from, what its values have seen, what it learns through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_jax.models.lora import LoRAConfig
from bridge_jax.models.qwen2 import Qwen2, Qwen2Config
from bridge_jax.models.value import init_critic, token_values

LORA = LoRAConfig(2, 4.0)


def make(tie):
    model = Qwen2(Qwen2Config(40, 16, 24, 2, 4, 2, 4, tie_embeddings=tie), lora=LORA)
    return model, model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def with_head(critic, seed=1):
    return critic | {"head": {"kernel": jax.random.normal(jax.random.key(seed), (16,)), "bias": jnp.float32(0.3)}}


TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 40, (2, 9)), jnp.int32)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_fresh_critic_is_zero_on_the_policys_backbone(tie, lora):
    model, params = make(tie)
    critic = init_critic(jax.random.key(2), params, lora)
    assert "lm_head" not in critic.get("params", {})
    values = token_values(model, params, critic, TOKENS)
    assert values.shape == (2, 9) and values.dtype == jnp.float32 and not np.asarray(values).any()

    critic = with_head(critic)
    hidden = np.asarray(model.apply({"params": params}, TOKENS, output="hidden"))
    expected = hidden @ np.asarray(critic["head"]["kernel"]) + 0.3
    values = np.asarray(token_values(model, params, critic, TOKENS))
    np.testing.assert_allclose(values[:, 1:], expected[:, :-1], atol=1e-5)
    assert not values[:, 0].any()


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_value_has_not_seen_its_token(lora):
    model, params = make(True)
    critic = with_head(init_critic(jax.random.key(2), params, lora))
    values = np.asarray(token_values(model, params, critic, TOKENS))
    changed = np.asarray(token_values(model, params, critic, TOKENS.at[:, 5].set((TOKENS[:, 5] + 7) % 40)))
    np.testing.assert_array_equal(values[:, :6], changed[:, :6])
    assert (np.abs(values - changed)[:, 6:] > 0).all()


def test_gradients_reach_the_head_and_the_backbone_or_the_adapter():
    model, params = make(False)
    for lora in (None, LORA):
        critic = with_head(init_critic(jax.random.key(2), params, lora))
        gradient = jax.grad(lambda c: jnp.square(token_values(model, params, c, TOKENS)).sum())(critic)
        learned = [np.abs(np.asarray(x)).max() for x in jax.tree.leaves(gradient)]
        # an adapter whose b is zero gives its a no gradient yet
        assert all(learned) if lora is None else sum(g > 0 for g in learned) == len(learned) - len(critic["lora"]["layers"])


def test_a_critic_in_full_is_a_copy():
    _, params = make(True)
    critic = init_critic(jax.random.key(2), params, None)
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
    assert not pointers & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(critic["params"])}
