# %% [markdown]
# # BRIDGE in ten minutes
#
# @BADGE@
#
# A **policy** thinks, searches and answers. A **retriever** finds what it searches for. Usually only the policy learns. BRIDGE trains both,
# from the same rollouts: the policy by reward, the retriever by *credit*: which of the documents it returned makes the right answer likely?
#
# This notebook does all of it on a CPU, in a world so small that learning takes three minutes: an encyclopaedia of 12,190 generated
# passages, a policy with 1.2 million parameters and an encoder with 0.3 million. Engine, index, loss and files are those of the large models.
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

# %% [markdown]
# ## The world
#
# Every person, company and city has nine passages, one for each thing that can be said about it. They look alike, so similarity finds the
# *entity*. Which of its nine passages answers the question is what the retriever has to learn.

# %%
from bridge_jax.data.corpora import corpus_path
from bridge_jax.data.qa import load_questions
from bridge_jax.retrieval.corpus import Corpus

corpus = Corpus.open(corpus_path("mini"))
someone = corpus[0].title
for passage in corpus:
    if passage.title == someone:
        print(f"{passage.title:16} {passage.text}")

# %% [markdown]
# Questions need one passage, or two, or compare two things. The sets marked *ood* use words, chains or comparisons that no training
# question has.

# %%
for name in ("one_hop", "one_hop_ood", "two_hop", "two_hop_ood", "comparison", "comparison_ood"):
    question = load_questions(f"mini/{name}", "test")[0]
    print(f"{name:15} {question.question}  ->  {question.golds[0]}")

# %% [markdown]
# ## Before
#
# A run is a configuration and a folder. `configs/mini.py` is the paper's loop at this size; single fields can be set on top.

# %%
fields = {}
if SMALL:
    fields = {"train.steps": 1, "train.questions": 4, "grpo.minibatch_questions": 4, "grpo.microbatch": 16, "index.limit": 600}
    fields |= {"rollout.batch_groups": 4, "data.eval_limit": 2, "data.eval": "mini/one_hop", "train.log_rollouts_every": 1}

config = bridge_jax.load_config(ROOT / "configs" / "mini.py", fields)
print(
    config.rollout.candidates,
    "candidates a search,",
    config.rollout.shown,
    "of them shown;",
    config.grpo.group_size,
    "rollouts a question",
)

# %% [markdown]
# The policy comes with the language of this world, not with its facts. It knows how to search: it asks for the right thing, gets passages
# about the right entity, but not the right *one* of them, tries again, and gives up.

# %%
question = load_questions("mini/two_hop", "test")[0]
before = bridge_jax.open_run("runs/01", "start", config)
episode = before.ask(question.question)
print(question.question)
for turn in episode.turns:
    found = [corpus[int(row)] for row in turn.rows[: turn.shown] if row >= 0]
    print(f"\n  search: {turn.query}")
    print(*(f"    {passage.title}: {passage.text}" for passage in found), sep="\n")
print(f"\n  answer: {episode.answer}     (right: {question.golds[0]})")

# %% [markdown]
# ## Train
#
# 30 steps of 32 questions with 4 rollouts each. In every step the retriever learns first, then the policy, from the same rollouts. Before
# the first step and after the last one the run evaluates itself on held-out questions, greedily. (Run this cell again and it goes on where
# it stopped: here, nowhere.)

# %%
workdir = bridge_jax.train_run(config, "runs/01")

# %% [markdown]
# ## After
#
# The same held-out questions, before and after.

# %%
import json

from IPython.display import Markdown

evaluations = [json.loads(path.read_text()) for path in sorted(Path("runs/01/eval").glob("step_*.json"))]
rows = ["| | questions | EM before | EM after | recall@3 before | recall@3 after |", "|---|---|---|---|---|---|"]
for name, new in evaluations[-1]["datasets"].items():
    old = evaluations[0]["datasets"][name]
    numbers = [f"{100 * row[metric]:.1f}" for metric in ("em", "recall@3") for row in (old, new)]
    rows.append(f"| {name} | {new['n']} | {' | '.join(numbers)} |")
Markdown("\n".join(rows))

# %% [markdown]
# Look at the last line. These *unseen comparisons* ask for yes or no: the passages are found, and the policy still answers with
# something that it read, because that is what every training question rewarded.
#
# How it got there:

# %%
import matplotlib.pyplot as plt

from bridge_jax.training.metrics import read_metrics

steps = read_metrics("runs/01/metrics.jsonl")
panels = {
    "reward and recall": {"reward/mean": "reward", "retrieval/recall@3": "recall@3 of its searches"},
    "no advantage, nothing to learn for GRPO": {
        "reward/zero_advantage_groups": "groups",
        "credit/zero_advantage_turns": "searches",
    },
    "the favoured document's share": {"credit/weight_max": "responsibility w", "credit/weight_max_p": "probability p"},
}
figure, axes = plt.subplots(1, 3, figsize=(13, 3.2), layout="constrained")
for axis, (title, lines) in zip(axes, panels.items()):
    for metric, label in lines.items():
        axis.plot([row["step"] for row in steps], [row.get(metric) for row in steps], marker=".", label=label)
    axis.set(title=title, xlabel="step", ylim=(0, 1))
    axis.legend(loc="best", fontsize=8)
    axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Left: both learn together. Middle: in many groups all four rollouts are right, or all are wrong. GRPO learns nothing from them; the
# retriever still does, because the gold answer says which document was useful. Right: *that* is the responsibility `w`. It favours a
# document more sharply than the retriever's own `p`, and `p` follows it.
#
# ## Ask it again

# %%
after = bridge_jax.open_run("runs/01", "latest")
after.show(after.ask(question.question))

# %% [markdown]
# The table under a search has every candidate with its score and probability; a star marks what the policy was shown.
#
# ## Where next
#
# * [03_inspect_credit](03_inspect_credit.ipynb): where the credit goes, document by document, and where it cannot go.
# * [02_small_models_colab](02_small_models_colab.ipynb): Qwen2.5-0.5B and E5 on real questions.
# * [04_your_own_corpus](04_your_own_corpus.ipynb): your documents, your questions.
# * Other methods on the same questions: `bridge_jax.load_config(..., {"method.name": "vt_search"})` trains the policy alone;
#   `docs/replication.md` compares them all.
