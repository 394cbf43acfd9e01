"""Counted costs of a step: FLOPs against the closed form, and what the ratio is made of."""

import jax
import paper_scale
import peer_models
import pytest

from bridge_jax import config as configuration
from bridge_jax.models import qwen2

LENGTHS = paper_scale.Lengths(prompt=24, generation=8, searches=1.0, observation=24, document=20, answer=4)


@pytest.fixture(scope="module")
def counted():
    return paper_scale.flops(peer_models.random_config(512), LENGTHS, candidates=4)


def test_flops_are_those_of_the_products(counted):
    model = peer_models.random_config(512)
    kernels = sum(x.size for x in jax.tree.leaves(qwen2.abstract_params(model)["layers"]) if x.ndim == 3)
    attention = 4 * LENGTHS.rollout * model.num_layers * model.num_heads * model.head_dim
    head = 2 * model.hidden_size * model.vocab_size
    assert counted["token_read"] == pytest.approx(2 * kernels + attention, rel=0.05)
    assert counted["token_logp"] == pytest.approx(counted["token_read"] + head, rel=0.05)
    # forward, twice that backward, and forward again, where the last product of a layer is not needed
    again = 2 * (kernels - model.num_layers * model.intermediate_size * model.hidden_size)
    assert counted["token_trained"] == pytest.approx(3 * (2 * kernels + attention + head) + again + attention + head, rel=0.03)


def test_the_ratio_grows_with_the_credited_turns(counted):
    config, model = configuration.default(), peer_models.random_config(512)
    none, some, twice = (paper_scale.cost(model, config, LENGTHS, counted, turns) for turns in (0, 100, 200))
    assert none["bridge_over_vt_search"] == 1
    assert twice["bridge_over_vt_search"] - 1 == pytest.approx(2 * (some["bridge_over_vt_search"] - 1))
    assert {phase: seconds for phase, seconds in none["seconds"].items() if phase != "score"} == {
        phase: seconds for phase, seconds in twice["seconds"].items() if phase != "score"
    }
