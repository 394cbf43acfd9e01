"""Model FLOPs of whole programs: matrix products with nothing computed twice, masked or padded (`bridge_jax/training/flops.py`)."""

from __future__ import annotations

from bridge_jax.models.e5 import BertConfig, Shape
from bridge_jax.models.qwen2 import Qwen2Config
from bridge_jax.training import flops


def forward(c: Qwen2Config, tokens: float, pairs: float, predicted: float) -> float:
    """tokens through the layers, pairs of a token and a column it sees, predicted: tokens whose logits are taken."""
    return sum(flops.forward(c, tokens, pairs, predicted))


def training(c: Qwen2Config, rows: int, length: int, adapter: bool, reference: bool) -> float:
    """Gradient of all tokens' log-probs, and the reference's log-probs for the KL term."""
    weights, attention = flops.forward(c, rows * length, rows * flops.causal(length), rows * length)
    return weights * ((2 if adapter else 3) + reference) + attention * (3 + reference)


def encoding(c: Shape, rows: int, length: int) -> float:
    """An encoder's forward pass over whole rows: every token sees every other, in a decoder those before it."""
    if not isinstance(c, BertConfig):
        return forward(c, rows * length, rows * flops.causal(length), 0)
    layer = 4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size
    return c.num_layers * rows * (2 * length * layer + 4 * c.hidden_size * length**2)
