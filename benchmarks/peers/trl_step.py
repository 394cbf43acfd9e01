"""TRL's GRPO step on CPU: `GRPOTrainer.compute_loss` on given tensors, backward, gradient clip, torch's AdamW.

The same loss as ours: "bnpo" (token mean), clip and two-sided clip, no KL, given old log-probs; observations by its `tool_mask`.
"""

import tempfile

import numpy as np
from serve import Memory, serve, versions


def setup(job: dict, memory: Memory):
    """job: as in `ours_step`."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    memory.imported()
    arrays = {name: torch.from_numpy(array) for name, array in np.load(job["inputs"]).items()}
    inputs = {name: arrays[name].long() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    inputs |= {
        "tool_mask": arrays["trained"].long(),
        "advantages": arrays["advantages"],
        "old_per_token_logps": arrays["old_logps"],
    }
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, per_device_train_batch_size=2, num_generations=2, beta=0.0, epsilon=job["epsilon"],
            delta=job["dual_clip"], loss_type="bnpo", learning_rate=job["lr"], weight_decay=0.0, temperature=1.0,
            gradient_checkpointing=False, bf16=False, use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"),
        )
    trainer.current_gradient_accumulation_steps = 1  # train() sets it
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=job["lr"], weight_decay=0.0)
    trainer.model.train()

    def update() -> tuple[float, float]:
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), job["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), float(norm)

    loss, norm = update()
    return update, {
        "loss": loss,
        "grad_norm": norm,
        "computed_tokens": int(inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()),
        "versions": versions(("trl", "torch", "transformers")),
    }


if __name__ == "__main__":
    serve(setup)
