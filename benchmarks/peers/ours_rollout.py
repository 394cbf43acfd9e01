"""Our sampler on the prompts of a job: prefill once a group, then chunks, with the host reading ids and log-probs after each."""

import jax
import numpy as np
from serve import Memory, serve, versions

from bridge_jax.models import qwen2
from bridge_jax.rollout.sampler import Sampler
from bridge_jax.rollout.stopping import StopTable

CHUNK = 32  # `config.rollout.chunk`


def setup(job: dict, memory: Memory):
    """job: folder, prompts [N][P], group_size, new_tokens, temperature, seed."""
    memory.imported()
    model, params = qwen2.load(job["folder"])
    prompts, new = np.asarray(job["prompts"], np.int32), job["new_tokens"]
    groups, width = prompts.shape
    rows = groups * job["group_size"]
    # The stop automaton runs as always, and no string is ever completed: everyone generates the same number of tokens.
    vocab = model.config.vocab_size
    table = StopTable(np.zeros((3, vocab), np.int8), (1, 2), (b"",) * vocab)
    sampler = Sampler(model, table, eos_ids=())
    key, variables = jax.random.key(job["seed"]), {"params": params}
    capacity = -(-new // CHUNK) * CHUNK

    def generate() -> np.ndarray:
        lengths, left = np.full(groups, width, np.int32), np.full(rows, new, np.int32)
        slots, ids = np.arange(groups, dtype=np.int32), np.arange(rows, dtype=np.int32)
        shape = {"groups": groups, "prompt_width": width, "width": capacity}
        state = sampler.start(variables, prompts, lengths, slots, ids, left, **shape)
        written = []
        for _ in range(capacity // CHUNK):
            state, *chunk = sampler.decode_chunk(variables, state, key, job["temperature"], steps=CHUNK)
            tokens, _, counts = jax.device_get(chunk)
            assert (counts == counts[0]).all()
            written.append(tokens[:, : counts[0]])
        return np.concatenate(written, 1)

    first = generate()
    assert first.shape == (rows, new)
    return generate, {"tokens": first.tolist(), "versions": versions(("jax", "jaxlib", "flax"))}


if __name__ == "__main__":
    serve(setup)
