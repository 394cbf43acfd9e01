"""The baseline `direct` on a job's messages by our generator (`bridge_jax/rollout/generators.py`): one greedy answer each."""

import json
from pathlib import Path

from serve import Memory, serve, versions

from bridge_jax.models import qwen2
from bridge_jax.rollout.generators import PolicyGenerator


def setup(job: dict, memory: Memory):
    """job: folder, messages, stops, new_tokens, width (rows in flight), prompt_tokens, out (a file for the answers)."""
    memory.imported()
    model, params = qwen2.load(job["folder"])
    tokenizer = qwen2.load_tokenizer(job["folder"])
    eos_ids = qwen2.eos_ids(job["folder"], tokenizer)
    generator = PolicyGenerator(
        model, tokenizer, eos_ids, {"params": params}, width=job["width"], prompt_tokens=job["prompt_tokens"]
    )

    def generate(messages=job["messages"]) -> None:
        replies = generator.generate(messages, stops=tuple(job["stops"]), max_tokens=job["new_tokens"])
        answers = [[reply.text, reply.tokens, reply.prompt_tokens] for reply in replies]
        Path(job["out"]).write_text(json.dumps(answers), encoding="utf-8")

    generate(sorted(job["messages"], key=len)[:: max(1, len(job["messages"]) // (2 * job["width"]))])  # every shape, few questions
    return generate, {"versions": versions(("jax", "jaxlib", "flax"))}


if __name__ == "__main__":
    serve(setup)
