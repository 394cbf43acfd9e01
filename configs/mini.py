"""The mini world: every method in minutes on two cores (`make demo`), through the same engine as the real models.

A 1.2 M parameter policy (Qwen2.5 architecture) and a 0.3 M parameter encoder (E5 architecture) that know the language of a closed
encyclopaedia and none of its facts; 12,190 passages. Similarity finds the entity; which of its nine passages is needed, the
retriever has to learn. Settings were picked on the validation splits.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()
    c.policy.model = "mini-policy"
    c.policy.trainable = "full"
    c.policy.compute_dtype = "float32"
    c.policy.remat = False

    c.retriever.encoder = "mini-encoder"
    c.retriever.query_prefix = "query: "
    c.retriever.passage_prefix = "passage: "
    c.retriever.max_length = 32
    c.retriever.lora_rank = 8
    c.retriever.lora_alpha = 16.0

    c.index.corpus = "mini"
    c.index.kind = "exact"

    c.data.train = ("mini/one_hop", "mini/two_hop", "mini/comparison")
    c.data.weights = (0.6, 0.3, 0.1)
    c.data.eval = (
        "mini/one_hop", "mini/one_hop_ood", "mini/two_hop", "mini/two_hop_ood", "mini/comparison", "mini/comparison_ood"
    )  # fmt: skip
    c.data.eval_limit = 200

    c.rollout.prompt = "bare"
    c.rollout.candidates = 20
    c.rollout.max_prompt_tokens = 32
    c.rollout.max_new_tokens = 12
    c.rollout.max_observation_tokens = 64
    c.rollout.max_response_tokens = 320  # room for the four searches of search_r1
    c.rollout.chunk = 12
    c.rollout.batch_groups = 32

    c.grpo.group_size = 4
    c.grpo.minibatch_questions = 32
    c.grpo.microbatch = 32
    c.grpo.lr = 3e-4
    c.grpo.warmup_steps = 5

    c.ppo.critic_lr = 1e-3  # a new value head has twenty steps, not a thousand
    c.ppo.critic_warmup_steps = 2

    c.credit.gamma = 1.0  # few turns an update: see METHOD defaults
    c.credit.tau = 0.05
    c.credit.max_turns = 256
    c.credit.minibatch = 32
    c.credit.lr = 2e-3
    c.credit.warmup_steps = 10
    c.credit.turns_per_batch = 16

    c.agentic.questions = 150
    c.agentic.batch = 32  # 0.3 M parameters and some hundred pairs a round
    c.agentic.microbatch = 32
    c.agentic.epochs = 6
    c.agentic.lr = 1e-3
    c.agentic.temperature = 0.05

    c.warmstart.batch = 32
    c.warmstart.microbatch = 32
    c.warmstart.lr = 3e-4

    c.train.steps = 30
    c.train.questions = 32
    c.train.eval_every = 0
    c.train.checkpoint_every = 10
    c.train.log_rollouts_every = 10
    return c
