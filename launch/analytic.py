"""Model FLOPs: a program's matrix products with nothing computed twice, masked or padded; compiled programs are held against them.

A multiply-add is 2 FLOPs. A token of a decoder takes its matrices once forward and, where it is trained, twice backward (once where
only an adapter learns: the frozen matrices need no gradient). Attention takes 4 N H a layer for each pair of a token and a column
that it sees. Rematerialisation is not in it.
"""

from __future__ import annotations

from bridge_jax.models.e5 import BertConfig
from bridge_jax.models.qwen2 import Qwen2Config


def layer_parameters(c: Qwen2Config) -> int:
    """In the matrices of one decoder layer."""
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    return attention + 3 * c.hidden_size * c.intermediate_size


def forward(c: Qwen2Config, tokens: float, pairs: float, predicted: float) -> float:
    """tokens through the layers, pairs of a token and a column it sees, predicted: tokens whose logits are taken."""
    layers = c.num_layers * (2 * tokens * layer_parameters(c) + 4 * c.num_heads * c.head_dim * pairs)
    return layers + 2 * predicted * c.hidden_size * c.vocab_size


def causal(rows: float, length: float) -> float:
    """Pairs of so many whole sequences."""
    return rows * length * (length + 1) / 2


def behind(rows: float, length: float, before: float) -> float:
    """Pairs of `length` tokens that also see `before` earlier columns each."""
    return rows * length * before + causal(rows, length)


def training(c: Qwen2Config, rows: float, length: float, adapter: bool, reference: bool) -> float:
    """Gradient of all tokens' log-probs, and the reference's log-probs for the KL term."""
    once = forward(c, rows * length, causal(rows, length), rows * length)
    return once * ((2 if adapter else 3) + reference)


def encoding(c: BertConfig, rows: float, length: float) -> float:
    """An encoder's forward pass over whole rows: every token sees every other."""
    layer = 4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size
    return c.num_layers * rows * (2 * length * layer + 4 * c.hidden_size * length**2)
