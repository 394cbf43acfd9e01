"""The paper's main setting: Qwen2.5-3B-Instruct and E5-base-v2 over wiki-18, G = 8, 250 steps.

Give the corpus and its index: --config.index.corpus=wiki-18.jsonl --config.index.folder=indexes/wiki-18.
Which machines it fits, and with which settings: docs/scaling.md; python launch/fit.py --config=configs/qwen2_5_3b.py --target=...

Source of each number: P the paper's abstract and review, S its authors' project page, V VerlTool's search recipe, R Search-R1,
C chosen here (no public source gives it). They are the defaults of bridge_jax/config.py, too.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()
    c.policy.model = "Qwen/Qwen2.5-3B-Instruct"  # S; the ablations use Qwen/Qwen2.5-3B
    c.policy.trainable = "full"  # V
    c.policy.compute_dtype = "bfloat16"  # V; master weights and AdamW's moments are float32

    c.retriever.encoder = "intfloat/e5-base-v2"  # R V: 12 layers, 768 wide, prefixes, mean pooling, unit length
    c.retriever.max_length = 256  # R
    c.retriever.lora_rank = 16  # P; query, key, value and attention output of all layers: C
    c.retriever.lora_alpha = 32.0  # C

    c.data.train = ("nq", "hotpotqa")  # P R: 79,168 + 90,447 questions

    c.rollout.max_searches = 2  # P V
    c.rollout.shown = 3  # P V
    c.rollout.candidates = 40  # P
    c.rollout.temperature = 1.0  # V; evaluation is greedy
    c.rollout.max_prompt_tokens = 4096  # V
    c.rollout.max_response_tokens = 4096  # V
    c.rollout.max_new_tokens = 2048  # V: of one action
    c.rollout.max_observation_tokens = 1024  # V

    c.grpo.group_size = 8  # S; VT-Search has 16
    c.grpo.minibatch_questions = 64  # V
    c.grpo.lr = 1e-6  # V
    c.grpo.warmup_steps = 10  # V
    c.grpo.clip_low = c.grpo.clip_high = 0.2  # V
    c.grpo.dual_clip = 3.0  # V
    c.grpo.kl_coef = 1e-4  # V: k3, as a loss
    c.grpo.weight_decay = 0.01  # V
    c.grpo.grad_clip = 1.0  # V
    c.grpo.advantage = "grpo"  # V: divided by the group's standard deviation
    c.grpo.aggregation = "token_mean"  # V

    c.credit.gamma = 0.02  # S
    c.credit.tau = 1.0  # C: where p is nearly uniform and w is not, as the paper reports
    c.credit.golds = 1  # C
    c.credit.period = 1  # C
    c.credit.max_turns = 512  # C
    c.credit.epochs = 1  # C
    c.credit.minibatch = 64  # C
    c.credit.lr = 1e-4  # C
    c.credit.warmup_steps = 20  # C
    c.credit.weight_decay = 0.0  # C

    c.train.steps = 250  # S: the ablations
    c.train.questions = 512  # V
    return c
