"""Hugging Face `generate` (torch, float32) on the prompts of a job: default attention (sdpa) and cache, no end-of-text token."""

import numpy as np
from serve import Memory, serve, versions


def setup(job: dict, memory: Memory):
    """job: as in `ours_rollout`."""
    import torch
    from transformers import AutoModelForCausalLM

    memory.imported()
    torch.manual_seed(job["seed"])
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # a checkpoint's own file names one
    prompts, new = torch.tensor(job["prompts"]), job["new_tokens"]
    sampled = {"do_sample": True, "temperature": job["temperature"], "top_p": 1.0, "top_k": 0}

    def generate() -> np.ndarray:
        with torch.inference_mode():
            made = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new,
                num_return_sequences=job["group_size"],
                repetition_penalty=1.0,
                pad_token_id=0,
                **(sampled if job["temperature"] else {"do_sample": False}),
            )
        return made[:, prompts.shape[1] :].numpy()

    first = generate()
    assert first.shape == (len(prompts) * job["group_size"], new), first.shape
    return generate, {"tokens": first.tolist(), "versions": versions(("torch", "transformers"))}


if __name__ == "__main__":
    serve(setup)
