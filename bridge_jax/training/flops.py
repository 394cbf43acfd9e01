"""Model FLOPs of a step, counted from what was played, and the peak of the devices: what `mfu` is made of.

Counted are the policy's matrix products and its attention, once for each token that has to go through it: 2 FLOPs a weight and
token forward, as many for the gradient to the states, and as many for the weights' own where they are trained (6); in attention
4 N H a layer and pair of a token and a column it sees, three times that with the gradient. Logits count as a weight matrix. Not
counted: padding, recomputation (remat), softmax and norms, LoRA factors, the query tower (a few hundred short queries a step: some
1e-5 of the policy's) and the optimisers.

Shapes: L layers, N query heads, K kv heads, H head dim, D model dim, F ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ml_collections import ConfigDict

from bridge_jax.models.qwen2 import Qwen2Config
from bridge_jax.objectives.scoring import Request, by_shape
from bridge_jax.rollout.episodes import Episode

# Dense bfloat16 (T4: float16) FLOP/s of a chip, from the vendors' data sheets; NVIDIA's are without sparsity, of the SXM form where
# there are two. The first name whose words all occur in a device's own counts.
PEAKS = {
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,  # what a v5p calls itself
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "L4": 121e12,
    "T4": 65e12,
}


def peak(device_kind: str) -> float | None:
    """FLOP/s of a device of that kind, as jax names it ("NVIDIA A100-SXM4-80GB"); None when it is not in the table."""
    words = device_kind.replace("-", " ").split()
    for name, flops in PEAKS.items():
        if all(part in words for part in name.split()):
            return flops
    return None


def layer_weights(c: Qwen2Config) -> int:
    """Weights of all layers' matrix products."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def forward(c: Qwen2Config, tokens: int, pairs: int, predicted: int) -> tuple[int, int]:
    """(FLOPs of weights, of attention) of a forward pass. pairs: of a token and a column it sees; predicted: tokens with logits."""
    weights = 2 * (layer_weights(c) * tokens + c.hidden_size * c.vocab_size * predicted)
    return weights, 4 * c.num_layers * c.num_heads * c.head_dim * pairs


def causal(length: int, before: int = 0) -> int:
    """Pairs of `length` tokens, each of which sees those before it, itself, and `before` columns."""
    return length * before + length * (length + 1) // 2


def rollout_flops(c: Qwen2Config, episodes: Iterable[Episode]) -> int:
    """Every prompt once a group, every token of a response once, logits for the generated ones."""
    total, seen = 0, set()
    for episode in episodes:
        prompt, length = len(episode.prompt), len(episode.tokens)
        if not length:
            continue
        if episode.group not in seen:
            seen.add(episode.group)
            total += sum(forward(c, prompt, causal(prompt), 0))
        total += sum(forward(c, length, causal(length, prompt), int(episode.generated.sum())))
    return total


def scoring_flops(c: Qwen2Config, requests: Sequence[Request]) -> int:
    """Forward: each different history once, behind it each document with each target; logits for the targets."""
    total = 0
    for first, *_ in by_shape(requests):
        request = requests[first]
        history = len(request.history)
        total += sum(forward(c, history, causal(history), 0))
        for document in request.documents:
            for target in request.targets:
                length = len(document) + len(request.lead) + len(target)
                total += sum(forward(c, length, causal(length, history), len(target)))
    return total


def policy_flops(config: ConfigDict, c: Qwen2Config, episodes: Iterable[Episode]) -> int:
    """One forward and backward pass over the trained rollouts, logits at every token, and the reference's forward pass for the KL.

    With PPO the critic's value pass, and its forward and backward pass, come to it.
    """
    ppo = config.policy.algorithm == "ppo"
    backward = 2 if config.policy.trainable == "full" else 1  # of weights, in forward passes: none for frozen weights' gradients
    reference = int((config.ppo.kl_coef if ppo else config.grpo.kl_coef) > 0)
    total = 0
    for episode in episodes:
        length = len(episode.prompt) + len(episode.tokens)
        weights, attention = forward(c, length, causal(length), length)
        total += weights * (1 + backward + reference) + attention * (3 + reference)
        if ppo:
            weights, _ = forward(c, length, 0, 0)
            total += weights * (2 + backward) + attention * 4
    return total
