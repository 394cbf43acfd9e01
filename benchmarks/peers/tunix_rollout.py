"""Tunix's vanilla sampler (`tunix.generate.sampler.Sampler`) on the prompts of a job, each prompt once a sample as in its rollouts.

Set in its favour: the cache is exactly as long as needed (attention runs over all of it), prompts are not padded to a power of two,
log-probs are not asked for, and sampling is top_p = 1 without top_k, which takes the path that does not sort the vocabulary.
"""

import numpy as np
from serve import Memory, available_bytes, serve, versions


class Ids:
    """A tokenizer of numbers. It adds nothing to a prompt, and no generated token is the end."""

    def encode(self, text: str, **options) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, **options) -> str:
        return ""

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return 0


def setup(job: dict, memory: Memory):
    """job: as in `ours_rollout`."""
    import tunix_models
    from tunix.generate import sampler as tunix

    memory.imported()
    model, config = tunix_models.load(job["folder"])
    prompts, new = job["prompts"], job["new_tokens"]
    width, rows = len(prompts[0]), len(prompts) * job["group_size"]
    # Its prefill computes the logits of every prompt token.
    needed = 4 * rows * width * config.vocab_size
    if needed > available_bytes():
        raise MemoryError(f"its prefill needs {needed / 1e9:.0f} GB for the logits of all prompt tokens")
    texts = [" ".join(map(str, prompt)) for prompt in prompts for _ in range(job["group_size"])]
    cache = tunix.CacheConfig(width + new, config.num_layers, config.num_kv_heads, config.head_dim)
    sampler = tunix.Sampler(model, Ids(), cache)
    sampled = {"temperature": job["temperature"], "top_p": 1.0} if job["temperature"] else {}

    def generate() -> np.ndarray:
        made = sampler(
            texts, max_generation_steps=new, max_prompt_length=width, eos_tokens=[-1], seed=job["seed"], echo=False, **sampled
        )
        return np.stack(made.tokens)

    first = generate()
    assert first.shape == (rows, new), first.shape
    return generate, {"tokens": first.tolist(), "versions": versions(("google-tunix", "jax", "jaxlib", "flax"))}


if __name__ == "__main__":
    serve(setup)
