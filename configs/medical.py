"""Medical questions (MIRAGE) for a policy that was trained on open-domain ones: evaluation only, zero-shot (METHOD.md 10).

    python -m bridge_jax.evaluate --config=configs/medical.py --workdir=runs/medical --checkpoint=start --datasets=mirage \
        --corpora=wikipedia.jsonl,pubmed.jsonl,textbooks.jsonl

BRIDGE_JAX_DATA names the folder that holds mirage/benchmark.json. A trained run is evaluated by its own workdir, without this
file.
"""

from bridge_jax import config as configuration


def get_config():
    c = configuration.default()
    c.policy.model = "Qwen/Qwen2.5-7B"
    c.data.train = ("embedded/hotpotqa",)  # not read by an evaluation
    c.data.eval = ("mirage",)
    c.data.eval_limit = 0
    c.grpo.microbatch = 4
    return c
