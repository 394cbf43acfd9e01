"""A critic: the policy's backbone with one scalar output a token.

critic = init_critic(key, params, None)           # {"params": a copy of the backbone, "head": {"kernel": [D], "bias": []}}
critic = init_critic(key, params, LoRAConfig())   # {"lora": a fresh adapter on the frozen backbone, "head": ...}
V = token_values(model, params, critic, tokens, positions=positions, segment_ids=segment_ids)        # [B, T]
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from bridge_jax.models.lora import LoRAConfig, init_lora


def init_critic(key: jax.Array, params: Mapping, lora: LoRAConfig | None) -> dict:
    """A float32 critic that starts from the policy's parameters: in full, or as an adapter when `lora` is given.

    The head is zero, so every value is 0 at the start: a random projection of normalised states would start far from returns in
    [0, 1]. A critic in full has no output projection to the vocabulary.
    """
    width = params["norm"]["scale"].shape[-1]
    head = {"kernel": jnp.zeros(width, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    if lora is not None:
        return {"lora": init_lora(key, params, lora), "head": head}
    backbone = {name: tree for name, tree in params.items() if name != "lm_head"}
    return {"params": jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), backbone), "head": head}


def token_values(model, base: Mapping | None, critic: Mapping, tokens, *, positions=None, segment_ids=None) -> jax.Array:
    """V [B, T] float32: entry t is the value of the state in which token t is chosen, so it has seen tokens before t only.

    model: a models.qwen2.Qwen2. base: the frozen parameters an adapter acts on; not read when the critic has its own. tokens
    [B, T] int32, positions and segment_ids as the model takes them. Entry 0 is 0; at the first token of a segment the value has
    no meaning.
    """
    variables = {"params": critic["params"]} if "params" in critic else {"params": base, "lora": critic["lora"]}
    hidden = model.apply(variables, tokens, positions=positions, segment_ids=segment_ids, output="hidden")
    values = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), critic["head"]["kernel"]) + critic["head"]["bias"]
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
