# %% [markdown]
# # Small models on Colab
#
# @BADGE@
#
# Qwen2.5-0.5B-Instruct as the policy, E5-small as the retriever, real HotpotQA questions over 12,000 real Wikipedia passages, on one free
# accelerator (*Runtime → Change runtime type*: a GPU or a TPU). The same cells run on a laptop with smaller models: `SIZE` is the one thing
# that changes.
#
# **What you see below was computed on a CPU at the size of the tests, `SIZE = "mini"`**: the mini world's models, four steps of eight questions.
# It shows what comes out, not what can be learnt. With `SIZE = "colab"` it has not been run yet.
# %%
# On a fresh Colab: fetches bridge_jax with the jax for the hardware that is there. Where it is installed, it does nothing.
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = "https://github.com/@REPOSITORY@"

if importlib.util.find_spec("bridge_jax") is None:
    chip = ",cuda12" if shutil.which("nvidia-smi") else ",tpu" if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*") else ""
    subprocess.run(["git", "clone", "-q", "--depth", "1", REPOSITORY, "bridge_jax_repo"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"./bridge_jax_repo[prepare,notebooks{chip}]"], check=True)
    importlib.invalidate_caches()

import bridge_jax

# configs/ and notebooks/ are beside the package in a checkout, and in the clone.
ROOT = next(p for p in (Path("bridge_jax_repo"), Path(bridge_jax.__file__).parents[1]) if (p / "configs").is_dir())
SMALL = os.environ.get("BRIDGE_JAX_NOTEBOOK") == "small"  # the size that the tests use

# %%
import jax

device = jax.devices()[0]
SIZE = "mini" if SMALL else "laptop" if device.platform == "cpu" else "colab"
print(f"jax {jax.__version__} on {device.device_kind}: SIZE = {SIZE!r}")

# %% [markdown]
# ## One configuration a size
#
# A configuration is a Python file; what differs for this notebook is set on top of it.

# %%
FILES = {"colab": "qwen2_5_0_5b_colab.py", "laptop": "pocket.py", "mini": "mini.py"}
FIELDS = {
    "colab": {},
    "laptop": {
        "index.limit": 1800, "warmstart.questions": 32, "warmstart.batch": 4, "train.steps": 2, "train.questions": 2,
        "grpo.minibatch_questions": 2, "rollout.batch_groups": 2, "data.eval_limit": 8,
    },
    "mini": {
        "train.steps": 4, "train.questions": 8, "grpo.minibatch_questions": 8, "grpo.microbatch": 16, "rollout.batch_groups": 4,
        "data.eval_limit": 40, "data.eval": "mini/one_hop", "train.log_rollouts_every": 1,
    },
}  # fmt: skip
config = bridge_jax.load_config(ROOT / "configs" / FILES[SIZE], FIELDS[SIZE])
for name in ("policy.model", "retriever.encoder", "train.steps", "train.questions", "grpo.group_size", "rollout.candidates"):
    group, field = name.split(".")
    print(f"{name:20} {config[group][field]}")

# %% [markdown]
# ## Warm start
#
# Small models do not know the tags `<think>`, `<search>`, `<answer>`. A short supervised phase shows them: search traces built from the gold
# passages and from what the retriever really returns. (The weights are fetched now, on first use, and the index is built.)

# %%
from bridge_jax import warmstart

workdir = Path("runs") / f"02-{SIZE}"
if config.policy.warmstart:
    warmstart.run(config, workdir)

# %% [markdown]
# ## Train
#
# Interrupted? Run the cell again: it goes on where it stopped. On Colab, mount a drive and put `workdir` there, and the run outlives the
# machine.

# %%
workdir = bridge_jax.train_run(config, workdir)

# %% [markdown]
# ## What it did

# %%
import json

import matplotlib.pyplot as plt
from IPython.display import Markdown

from bridge_jax.training.metrics import read_metrics

evaluations = [json.loads(path.read_text()) for path in sorted((workdir / "eval").glob("step_*.json"))]
rows = ["| step | EM (95 %) | F1 | recall@3 | searches |", "|---|---|---|---|---|"]
for found in evaluations:
    row = found["averages"]["overall"]
    band = f"{100 * row['em']:.1f} ({100 * row['em_low']:.0f}-{100 * row['em_high']:.0f})"
    rows.append(f"| {found['step']} | {band} | {100 * row['f1']:.1f} | {100 * row['recall@3']:.1f} | {row['searches']:.2f} |")
Markdown("\n".join(rows))

# %%
steps = read_metrics(workdir / "metrics.jsonl")
phases = ("rollout", "score", "retriever", "policy", "evaluation")
figure, axes = plt.subplots(1, 2, figsize=(12, 3.2), layout="constrained")
at = [row["step"] for row in steps]
for metric, label in {
    "reward/mean": "reward",
    "retrieval/recall@3": "recall@3",
    "credit/weight_max": "largest w",
    "credit/zero_advantage_turns": "searches without advantage",
}.items():
    axes[0].plot(at, [row.get(metric) for row in steps], marker="o", label=label)
bottom = [0.0] * len(steps)
for phase in phases:
    seconds = [row.get(f"time/{phase}") or 0.0 for row in steps]
    axes[1].bar(at, seconds, bottom=bottom, label=phase)
    bottom = [a + b for a, b in zip(bottom, seconds)]
axes[0].set(title="what it learnt from", xlabel="step", ylim=(-0.02, 1.02), xticks=at[:: max(1, len(at) // 10)])
axes[1].set(title="seconds by phase, compiling included", xlabel="step", xticks=at[:: max(1, len(at) // 10)])
for axis in axes:
    axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Ask

# %%
from bridge_jax.data.qa import load_questions

run = bridge_jax.open_run(workdir, "latest")
question = load_questions(config.data.eval[0], config.data.eval_split or None, limit=1)[0]
run.show(run.ask(question.question))
print("right:", question.golds)

# %% [markdown]
# The trained policy is a Hugging Face folder (`policy/` in the run's folder) and the retriever's LoRA has PEFT's format (`retriever/`).
#
# For the paper's scale (3B and 7B, 21 million passages) see `docs/launch.md` and `docs/scaling.md`.
