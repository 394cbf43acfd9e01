"""A real small language model and a real small encoder on real questions, on a laptop's CPU.

SmolLM2-135M-Instruct (Llama architecture) as the policy, MiniLM-L6 (BERT architecture, as E5) as the retriever, HotpotQA questions
over the embedded Wikipedia passages. Both models are fetched on first use. Everything is the paper's loop at a small size:
4 questions x 4 rollouts a step, 16 candidates scored, 3 shown (the first 56 tokens of each).
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()
    c.policy.model = "smollm2-135m-instruct"
    c.policy.warmstart = "auto"
    c.policy.trainable = "lora"
    c.policy.lora_rank = 16
    c.policy.lora_alpha = 32.0
    c.policy.compute_dtype = "float32"  # bfloat16 is slower on CPUs

    c.retriever.encoder = "minilm-l6-v2"
    c.retriever.max_length = 128
    c.retriever.lora_rank = 8
    c.retriever.lora_alpha = 16.0

    c.index.corpus = "embedded"

    c.data.train = ("embedded/hotpotqa",)
    c.data.eval = ("embedded/hotpotqa",)
    c.data.eval_limit = 100

    c.rollout.prompt = "brief"
    c.rollout.candidates = 16
    c.rollout.max_prompt_tokens = 256
    c.rollout.max_new_tokens = 80
    c.rollout.max_observation_tokens = 224
    c.rollout.max_passage_tokens = 56
    c.rollout.max_response_tokens = 704
    c.rollout.chunk = 16
    c.rollout.batch_groups = 4

    c.grpo.group_size = 4
    c.grpo.minibatch_questions = 4
    c.grpo.microbatch = 4
    c.grpo.lr = 2e-4
    c.grpo.warmup_steps = 2

    c.credit.gamma = 1.0  # few turns an update: see METHOD defaults
    c.credit.tau = 0.05  # MiniLM's cosines are spread as E5's are not
    c.credit.max_turns = 32
    c.credit.minibatch = 8
    c.credit.lr = 5e-4
    c.credit.warmup_steps = 5
    c.credit.turns_per_batch = 4

    c.train.steps = 10
    c.train.questions = 4
    c.train.eval_every = 0
    c.train.checkpoint_every = 1

    c.warmstart.questions = 256
    c.warmstart.epochs = 1
    c.warmstart.batch = 8
    c.warmstart.microbatch = 4
    c.warmstart.lr = 2e-4
    return c
