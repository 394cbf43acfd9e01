"""The paper's larger setting: Qwen2.5-7B (base) and E5-base-v2 over wiki-18.

Give the corpus and its index: --config.index.corpus=wiki-18.jsonl --config.index.folder=indexes/wiki-18.
All other numbers are those of qwen2_5_3b.py, where their sources are. Which machines it fits, and with which settings:
docs/scaling.md.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()  # the numbers of qwen2_5_3b.py
    c.policy.model = "Qwen/Qwen2.5-7B"  # S: the base model
    return c
