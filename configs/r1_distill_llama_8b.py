"""The paper's Llama backbone: DeepSeek-R1-Distill-Llama-8B (Llama 3.1: stretched rotary embedding, untied) over wiki-18.

Give the corpus and its index: --config.index.corpus=wiki-18.jsonl --config.index.folder=indexes/wiki-18.
All other numbers are those of qwen2_5_3b.py. Any Llama 3 runs by --config.policy.model alone. Its chat
template opens <think> itself.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()  # the numbers of qwen2_5_3b.py
    c.policy.model = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    return c
