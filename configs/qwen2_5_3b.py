"""The paper's main setting: Qwen2.5-3B-Instruct and E5-base-v2 over wiki-18, G = 8, 250 steps.

Give the corpus and its index: --config.index.corpus=wiki-18.jsonl --config.index.folder=indexes/wiki-18.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()  # the defaults are this setting
    c.policy.model = "Qwen/Qwen2.5-3B-Instruct"
    return c
