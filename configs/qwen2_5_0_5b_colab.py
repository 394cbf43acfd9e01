"""Qwen2.5-0.5B-Instruct and E5-small-v2 on one small accelerator (a free Colab GPU or TPU), over the embedded passages.

The paper's loop at a size that one chip does in minutes a step. P, S, V, R mark numbers of the published settings (see
qwen2_5_3b.py); everything else is chosen here (C), for 16 GB and for few turns an update.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()
    c.policy.model = "Qwen/Qwen2.5-0.5B-Instruct"
    c.policy.warmstart = "auto"
    c.policy.trainable = "lora"

    c.retriever.encoder = "intfloat/e5-small-v2"

    c.data.train = ("embedded/hotpotqa",)
    c.data.eval = ("embedded/hotpotqa",)
    c.data.eval_split = "validation"  # the best checkpoint is chosen on it; `evaluate --split=test` measures
    c.data.eval_limit = 100

    c.rollout.max_searches = 2  # P V
    c.rollout.shown = 3  # P V
    c.rollout.candidates = 20  # P has 40
    c.rollout.max_prompt_tokens = 256  # V has 4096, as below: the embedded passages and questions are short
    c.rollout.max_new_tokens = 128
    c.rollout.max_observation_tokens = 384
    c.rollout.max_passage_tokens = 112
    c.rollout.max_response_tokens = 1152
    c.rollout.batch_groups = 8

    c.grpo.group_size = 8  # S
    c.grpo.minibatch_questions = 8
    c.grpo.lr = 5e-5  # a LoRA's; V has 1e-6 for all weights

    c.credit.gamma = 0.5  # few turns an update: METHOD's rule of thumb
    c.credit.max_turns = 64
    c.credit.minibatch = 16

    c.train.steps = 50
    c.train.questions = 8
    c.train.eval_every = 25
    c.train.checkpoint_every = 5

    c.warmstart.questions = 300
    c.warmstart.batch = 16
    c.warmstart.microbatch = 4
    c.warmstart.lr = 2e-5
    return c
