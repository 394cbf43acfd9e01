"""A whole run in miniature on disk: model folders, corpus, questions and a config file, all made in a second.

The policy's vocabulary is words and whole tags, so that a random policy searches and answers by itself.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bridge_jax.models import e5, qwen2

# Metrics that a clock or a compiler makes: two runs that are the same differ in them.
NOT_THE_RUN = ("time/", "goodput/", "compilations/", "rollout/compilations", "rollout/tokens_per_second")

NAMES = ["ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hal", "ida", "jon"]
PLACES = ["rome", "oslo", "lima", "cairo", "paris"]
WORDS = (
    "<search> </search> <answer> </answer> <information> </information> <think> </think> who founded where was born what is it ? "
    "Doc 1 2 3 ( ) Title : . , Search again or answer query was empty The No valid action in and lives works"
).split() + NAMES + PLACES  # fmt: skip


def _tokenizer(vocab: dict[str, int], **special) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(vocab, unk_token=special["unk_token"]))
    tags = "|".join(word for word in vocab if word.startswith("<"))
    split = pre_tokenizers.Split(Regex(f"{tags}|[().,:?]" if tags else "[().,:?]"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    if "cls_token" in special:
        ends = [(special["cls_token"], vocab[special["cls_token"]]), (special["sep_token"], vocab[special["sep_token"]])]
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def write_policy(folder):
    vocab = {word: index for index, word in enumerate(["<unk>", "<end>", *dict.fromkeys(WORDS)])}
    tokenizer = _tokenizer(vocab, unk_token="<unk>", eos_token="<end>")
    config = qwen2.Qwen2Config(len(vocab), 32, 48, 2, 4, 2, 8, tie_embeddings=True, eos_token_ids=(1,))
    model = qwen2.Qwen2(config)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    # Every hidden state leans towards one direction, and so do the tags: they come up more often than other words.
    embedding = params["embed"]["embedding"] + 0.05
    for tag, lean in {"<search>": 0.1, "</search>": 0.06, "<answer>": 0.06, "</answer>": 0.04}.items():
        embedding = embedding.at[vocab[tag]].add(lean)
    params["embed"]["embedding"] = embedding
    qwen2.save(folder, model, params, tokenizer)


def write_encoder(folder):
    vocab = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(WORDS)])}
    tokenizer = _tokenizer(vocab, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    config = e5.BertConfig(len(vocab), 16, 24, 2, 2, 64)
    module = e5.Bert(config)
    params = module.init(jax.random.key(1), jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), jnp.int32))["params"]
    params = jax.tree.map(lambda x: x * 6.0 if x.ndim > 1 else x, params)
    e5.save(folder, e5.Encoder(module, params, tokenizer, "tiny", "mean", "", "", 32, "tiny"))


def write_embedder(folder):
    """A decoder as encoder, whose last token's state is a text's vector."""
    vocab = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "<end>", *dict.fromkeys(WORDS)])}
    tokenizer = _tokenizer(vocab, unk_token="[UNK]", pad_token="[PAD]", eos_token="<end>")
    config = qwen2.Qwen2Config(len(vocab), 16, 24, 1, 2, 1, 8, tie_embeddings=True, model_type="qwen3", eos_token_ids=(2,))
    module = e5.make_module(config, "last")
    params = module.init(jax.random.key(1), jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), jnp.int32))["params"]
    params = jax.tree.map(lambda x: x * 6.0 if x.ndim > 1 else x, params)
    e5.save(folder, e5.Encoder(module, params, tokenizer, "Qwen3-Embedding-tiny", "last", "who ", "", 32, "tiny", True))


def write_data(folder):
    facts = [(name, PLACES[i % len(PLACES)], verb) for i, name in enumerate(NAMES) for verb in ("lives", "works", "was born")]
    with (folder / "corpus.jsonl").open("w") as file:
        for row, (name, place, verb) in enumerate(facts):
            file.write(json.dumps({"id": f"p{row}", "contents": f'"{name}"\n{name} {verb} in {place} .'}) + "\n")
    with (folder / "questions.jsonl").open("w") as file:
        for i, name in enumerate(NAMES):
            place = PLACES[i % len(PLACES)]
            # Any single word counts as right, so that a random policy is sometimes rewarded.
            row = {
                "id": f"q{i}",
                "question": f"where was {name} born ?",
                "golden_answers": [place, *(word for word in WORDS if word.isalpha())],
                "metadata": {"gold_ids": [f"p{3 * i + 2}"]},
            }
            file.write(json.dumps(row) + "\n")


def write_config(folder, **fields):
    """`config.py` in `folder`; fields override, written group__field."""
    lines = {
        "policy__model": str(folder / "policy"),
        "policy__trainable": "lora",
        "policy__lora_rank": 4,
        "policy__lora_targets": ("q_proj", "v_proj"),
        "policy__compute_dtype": "float32",
        "policy__remat": False,
        "retriever__encoder": str(folder / "encoder"),
        "retriever__max_length": 32,
        "retriever__lora_rank": 2,
        "index__corpus": str(folder / "corpus.jsonl"),
        "index__kind": "exact",
        "data__train": (str(folder / "questions.jsonl"),),
        "data__eval": (str(folder / "questions.jsonl"),),
        "data__eval_limit": 4,
        "rollout__prompt": "brief",
        "rollout__candidates": 6,
        "rollout__max_prompt_tokens": 96,
        "rollout__max_new_tokens": 24,
        "rollout__max_observation_tokens": 64,
        "rollout__max_response_tokens": 160,
        "rollout__chunk": 8,
        "rollout__batch_groups": 2,
        "grpo__group_size": 4,
        "grpo__minibatch_questions": 2,
        "grpo__microbatch": 4,
        "grpo__lr": 1e-3,
        "credit__gamma": 1.0,
        "credit__max_turns": 8,
        "credit__minibatch": 4,
        "credit__lr": 1e-2,
        "train__steps": 6,
        "train__questions": 2,
        "train__eval_every": 3,
        "train__checkpoint_every": 2,
        "warmstart__questions": 6,
        "warmstart__batch": 4,
        "warmstart__microbatch": 2,
    } | fields
    body = "".join(f"    c.{name.replace('__', '.')} = {value!r}\n" for name, value in lines.items())
    path = folder / "config.py"
    path.write_text(f"from bridge_jax import config\n\n\ndef get_config():\n    c = config.default()\n{body}    return c\n")
    return path


def results(rows):
    """The rows of metrics.jsonl without what is not the run's result."""
    return [{name: value for name, value in row.items() if not name.startswith(NOT_THE_RUN)} for row in rows]


def undocumented(rows):
    """Metrics of a run that docs/metrics.md does not explain."""
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    known = set(re.findall(r"^\| `([^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE))
    return {name for row in rows for name in row} - known


def write_world(folder, **fields):
    """Everything; returns the config file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_policy(folder / "policy")
    write_encoder(folder / "encoder")
    write_data(folder)
    return write_config(folder, **fields)
