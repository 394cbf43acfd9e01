"""The paper's other backbone of its own family: Qwen3-14B (q and k normalised in each head, no biases, untied) over wiki-18.

Give the corpus and its index: --config.index.corpus=wiki-18.jsonl --config.index.folder=indexes/wiki-18.
All other numbers are those of qwen2_5_3b.py. Any Qwen3 size runs by --config.policy.model alone (0.6B, 1.7B and 4B tie embeddings).
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()  # the numbers of qwen2_5_3b.py
    c.policy.model = "Qwen/Qwen3-14B"
    return c
