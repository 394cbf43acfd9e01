"""The paper's larger setting: Qwen2.5-7B (base) and E5-base-v2 over wiki-18.

Give the corpus and its index: --config.index.corpus=wiki-18.jsonl --config.index.folder=indexes/wiki-18.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()
    c.policy.model = "Qwen/Qwen2.5-7B"
    c.grpo.microbatch = 4
    return c
