"""Shapes of published models, against the parameter counts that their cards give."""

import math

import jax
import pytest

from bridge_jax.errors import UserError
from bridge_jax.models import e5, hub, known, qwen2


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("smollm2-135m-instruct", 134_515_008),
    ],
)
def test_policies_have_the_published_number_of_parameters(name, count):
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(qwen2.abstract_params(known.policy_config(name)))) == count


@pytest.mark.parametrize(("name", "count"), [("intfloat/e5-base-v2", 109_482_240), ("intfloat/e5-large-v2", 335_141_888)])
def test_encoders_too(name, count):
    config = known.encoder_config(name)
    pooler = config.hidden_size**2 + config.hidden_size  # in the checkpoint, not in the module
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(e5.abstract_params(config))) + pooler == count


def test_folders_are_read_as_they_are(tmp_path):
    shipped = hub.resolve("mini-policy")
    assert known.policy_config("mini-policy") == known.policy_config(shipped) == qwen2.config_from_folder(shipped)


@pytest.mark.parametrize("name", ["nobody/nothing-1B", "not an id", "no/such/folder"])
def test_an_unknown_model_is_told_what_is_known(name):
    with pytest.raises(UserError, match=r"the shape of .* is not known .* Qwen/Qwen2.5-3B"):
        known.policy_config(name)
