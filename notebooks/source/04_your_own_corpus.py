# %% [markdown]
# # Your own documents, your own questions
#
# @BADGE@
#
# A folder of documents and a table of questions with answers: that is all BRIDGE needs. This notebook takes a small handbook (text,
# Markdown, HTML, PDF) with 42 questions, makes a corpus of it, looks at what a retriever finds, teaches a small policy the protocol, trains
# both, and asks. To use your own, change two paths.
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
DOCUMENTS = ROOT / "notebooks" / "handbook"
QUESTIONS = DOCUMENTS / "questions.csv"

# Small models with pretrained weights (fetched on first use). On an accelerator: "Qwen/Qwen2.5-0.5B-Instruct", "intfloat/e5-small-v2".
POLICY, ENCODER = "smollm2-135m-instruct", "minilm-l6-v2"
if SMALL:
    POLICY, ENCODER = "mini-policy", "mini-encoder"
    print("The size of the tests: these models know nothing of such texts. What follows shows the way, not what comes of it.\n")

for path in sorted(DOCUMENTS.iterdir()):
    print(path.name)
print()
print("".join(QUESTIONS.open().readlines()[:5]))

# %% [markdown]
# Answers may be several (`slate|local slate`). The column `gold` says which document answers the question. It is optional: recall and the
# warm start need it, the training does not.
#
# ## Prepare
#
# The same as `python -m bridge_jax.prepare --corpus=... --questions=... --out=...`. Documents are cut into passages between sentences;
# questions are checked, and split into training and held-out ones.

# %%
from bridge_jax.prepare.__main__ import main as prepare

arguments = [f"--corpus={DOCUMENTS}", f"--questions={QUESTIONS}", "--out=runs/handbook-data", "--words=60", "--force"]
assert prepare([*arguments, f"--policy={POLICY}", f"--encoder={ENCODER}"]) == 0

# %% [markdown]
# It found three things to look at: a question asked twice, an answer that no document holds, and how long the passages are. A question
# whose answer is nowhere teaches nothing but guessing.
#
# ## What does the retriever find by itself?
#
# `train` builds the index on first use. Built by hand it can be measured first.

# %%
from bridge_jax.index import main as index

length = 64 if SMALL else 144
folder = "runs/handbook-index"
assert (
    index(
        [
            "--corpus=runs/handbook-data/corpus.jsonl",
            f"--encoder={ENCODER}",
            f"--out={folder}",
            "--kind=exact",
            f"--max-length={length}",
        ]
    )
    == 0
)
assert index(["eval", f"--index={folder}", "--questions=runs/handbook-data/dev.jsonl", "--topk=1,3,10"]) == 0

# %% [markdown]
# ## Teach the tags, then train
#
# The configuration is a file among the data, and it is yours. A small policy has to learn the protocol (think, search, read, answer) before
# reward can teach it anything: the warm start shows it search traces that are made from the gold passages. Then BRIDGE. The sizes here are
# for minutes on a laptop: two steps, which shows that everything fits together and not what training can do.

# %%
from bridge_jax import warmstart

fields = {"index.folder": "runs/handbook-index", "index.kind": "exact", "policy.warmstart": "auto", "train.steps": 2}
fields |= {"train.questions": 2, "grpo.minibatch_questions": 2, "rollout.candidates": 8}
if SMALL:
    fields |= {"train.steps": 1, "grpo.group_size": 2, "data.eval_limit": 2}
    fields |= {"rollout.max_new_tokens": 8, "rollout.max_passage_tokens": 24, "rollout.max_observation_tokens": 96}
    fields |= {"rollout.max_response_tokens": 256, "rollout.batch_groups": 2, "retriever.max_length": 64}
    fields |= {"policy.warmstart": "", "policy.trainable": "full"}
config = bridge_jax.load_config("runs/handbook-data/config.py", fields)
if config.policy.warmstart:
    warmstart.run(config, Path("runs/handbook"))

# %%
workdir = bridge_jax.train_run(config, "runs/handbook")

# %% [markdown]
# ## Ask

# %%
run = bridge_jax.open_run("runs/handbook", "latest")
run.show(run.ask("Who counts the seabirds?"))

# %%
for question in ("Who made the tidal turbine?", "What is the fog horn called?", "Which trawler was lost in 1959?"):
    episode = run.ask(question)
    print(f"{question:35} {episode.answer}   (searched: {[turn.query for turn in episode.turns]})")

# %% [markdown]
# ## From here
#
# More questions, before anything else: a few dozen are enough to see that it runs, some thousands to learn from. Then a larger policy on an
# accelerator, more steps (`train.steps`), and the held-out questions of `dev.jsonl` to see whether it helps:
# `python -m bridge_jax.evaluate --workdir=runs/handbook`. Symptoms and mends are in `docs/troubleshooting.md`.
