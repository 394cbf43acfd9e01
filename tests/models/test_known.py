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
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8_030_261_248),
        ("smollm2-135m-instruct", 134_515_008),
    ],
)
def test_policies_have_the_published_number_of_parameters(name, count):
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(qwen2.abstract_params(known.policy_config(name)))) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("intfloat/e5-base-v2", 109_482_240),
        ("intfloat/e5-large-v2", 335_141_888),
        ("BAAI/bge-base-en-v1.5", 109_482_240),
        ("intfloat/multilingual-e5-small", 117_653_760),
        ("intfloat/multilingual-e5-base", 278_043_648),
        ("intfloat/multilingual-e5-large", 559_890_432),
        ("BAAI/bge-m3", 567_754_752),
        ("Qwen/Qwen3-Embedding-0.6B", 595_776_512),
        ("Qwen/Qwen3-Embedding-8B", 7_567_295_488),
    ],
)
def test_encoders_too(name, count):
    config = known.encoder_config(name)
    bert = e5.architecture(config) == "bert"
    pooler = config.hidden_size**2 + config.hidden_size if bert else 0  # in the checkpoint, not in the module
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(e5.abstract_params(config))) + pooler == count


def test_folders_are_read_as_they_are(tmp_path):
    shipped = hub.resolve("mini-policy")
    assert known.policy_config("mini-policy") == known.policy_config(shipped) == qwen2.config_from_folder(shipped)


@pytest.mark.parametrize("name", ["nobody/nothing-1B", "not an id", "no/such/folder"])
def test_an_unknown_model_is_told_what_is_known(name):
    with pytest.raises(UserError, match=r"the shape of .* is not known .* Qwen/Qwen2.5-3B"):
        known.policy_config(name)
