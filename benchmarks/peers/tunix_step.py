"""Tunix's GRPO step: its `rl.trainer.Trainer` with its registered "grpo" loss, on arrays padded as its learner pads them.

The same loss as ours: token mean, clip and dual clip, no KL, given old log-probs; AdamW behind the same global-norm clip. Its own
packing (`max_seq_token_per_tpu`) needs splash attention, which runs on TPU alone: elsewhere the packed model has no causal mask,
and its logits see later tokens. So its rows are padded, to the longest prompt and the longest response that occur.
"""

import jax
import jax.numpy as jnp
import numpy as np
from serve import Memory, available_bytes, serve, versions


def setup(job: dict, memory: Memory):
    """job: as in `ours_step`."""
    import optax
    import tunix_models
    from tunix.rl import common, function_registry
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.trainer import Trainer
    from tunix.sft.peft_trainer import TrainingConfig

    memory.imported()
    model, config = tunix_models.load(job["folder"])
    arrays = dict(np.load(job["inputs"]))
    tokens = arrays["prompt_ids"].size + arrays["completion_ids"].size
    needed = 4 * 3 * tokens * config.vocab_size  # logits, their gradient, and a log-softmax
    if needed > available_bytes():
        raise MemoryError(f"its step needs about {needed / 1e9:.0f} GB for logits")
    grpo = grpo_learner.GRPOConfig(num_generations=2, beta=0.0, epsilon=job["epsilon"], loss_agg_mode="token-mean")
    grpo.epsilon_high, grpo.epsilon_c, grpo.temperature = job["epsilon"], job["dual_clip"], 1.0  # read where present
    loss = function_registry.get_policy_loss_fn("grpo")
    optimizer = optax.chain(optax.clip_by_global_norm(job["grad_clip"]), optax.adamw(job["lr"], weight_decay=0.0))
    trainer = Trainer(model, optimizer, TrainingConfig(eval_every_n_steps=1), custom_checkpoint_metadata_fn=dict)
    trainer.with_loss_fn(
        lambda model, train_example, algo_config: loss(model, train_example, algo_config=grpo, pad_id=0, eos_id=-1), has_aux=True
    )
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": grpo})
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def update():
        example = common.TrainExample(
            prompt_ids=jnp.asarray(arrays["prompt_ids"]),
            prompt_mask=jnp.asarray(arrays["prompt_mask"]),
            completion_ids=jnp.asarray(arrays["completion_ids"]),
            completion_mask=jnp.asarray(arrays["trained"]),
            advantages=jnp.asarray(arrays["advantages"]),
            ref_per_token_logps=None,
            old_per_token_logps=jnp.asarray(arrays["old_logps"]),
        )
        made = step(example)
        jax.block_until_ready((made, jax.tree.leaves(trainer.model), jax.tree.leaves(trainer.optimizer)))
        return made

    value, _, norm = update()
    update()  # compiled twice: the optimiser state comes back with other types than it was made with
    return update, {
        "loss": float(value),
        "grad_norm": float(norm),
        "computed_tokens": int(tokens),
        "versions": versions(("google-tunix", "jax", "jaxlib", "flax", "optax")),
    }


if __name__ == "__main__":
    serve(setup)
