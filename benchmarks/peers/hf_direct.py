"""Hugging Face `generate` (torch, float32) in batches: greedy, left-padded, like lengths together, with stop strings."""

import json
from pathlib import Path

from serve import Memory, serve, versions


def setup(job: dict, memory: Memory):
    """job: folder, prompts (token ids), stops ([]: by EOS alone), new_tokens, batch, eos_ids, out (a file for the answers)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    memory.imported()
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()
    prompts, size = job["prompts"], job["batch"]
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    pad = job["eos_ids"][0]
    stops = {"stop_strings": job["stops"], "tokenizer": tokenizer} if job["stops"] else {}

    def generate(order=order) -> None:
        answers: list = [None] * len(prompts)
        for at in range(0, len(order), size):
            part = order[at : at + size]
            width = max(len(prompts[n]) for n in part)
            ids = torch.tensor([[pad] * (width - len(prompts[n])) + prompts[n] for n in part])
            mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in part])
            with torch.inference_mode():
                made = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=job["new_tokens"],
                    do_sample=False,
                    repetition_penalty=1.0,
                    eos_token_id=job["eos_ids"],
                    pad_token_id=pad,
                    **stops,
                )
            for n, row in zip(part, made[:, width:].tolist(), strict=True):
                end = next((i for i, token in enumerate(row) if token in job["eos_ids"]), len(row))
                answers[n] = [tokenizer.decode(row[:end]), min(end + 1, len(row)), len(prompts[n])]
        Path(job["out"]).write_text(json.dumps(answers), encoding="utf-8")

    generate(order[: 2 * size])
    return generate, {"versions": versions(("torch", "transformers"))}


if __name__ == "__main__":
    serve(setup)
