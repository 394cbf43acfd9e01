"""What the sampling options may be. Without jax, so that `bridge_jax.config` can read it."""

from __future__ import annotations

from bridge_jax.errors import UserError

SLICE = 64  # the most likely ids that top-k and top-p choose from; V is never sorted


def check_sampling(options, where: str) -> None:
    """Refuse values that no generation can have.

    Args:
      options: has `top_p`, `top_k`, `min_new_tokens`, `max_new_tokens`. where: what their names begin with, such as "rollout.".

    Raises:
      UserError: naming the field, its value and what is allowed.
    """
    if not 0 < options.top_p <= 1:
        raise UserError(f"{where}top_p={options.top_p!r}: must be above 0 and at most 1 (1 = all tokens)")
    if options.top_k > SLICE:
        raise UserError(f"{where}top_k={options.top_k!r}: must be at most {SLICE} (0 = all tokens)")
    if options.min_new_tokens > options.max_new_tokens:
        raise UserError(
            f"{where}min_new_tokens={options.min_new_tokens}: must be at most {where}max_new_tokens={options.max_new_tokens}"
        )
