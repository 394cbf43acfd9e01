"""The loss that the auxiliary classifiers of both models share."""

from __future__ import annotations

import jax.numpy as jnp
import optax


def masked_cross_entropy(scores, labels):
    """(mean loss, accuracy) over labels >= 0."""
    chosen = labels >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
    count = jnp.maximum(chosen.sum(), 1)
    return (loss * chosen).sum() / count, ((scores.argmax(-1) == labels) & chosen).sum() / count
