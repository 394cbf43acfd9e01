"""Two-hop questions in miniature: passages, questions, a random policy and a random encoder, as files that a user would have.

`write(folder)` gives the path of a config file; everything that a command does with configs/pocket.py it can do with this one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

PEOPLE = ("Anna Bell", "Boris Lund", "Clara Voss", "David Orme", "Elsa Quist", "Felix Rahn", "Greta Holm", "Hugo Stern")
CLUBS = ("Ravel Club", "Dorset Club", "Falcon Club", "Maple Club", "Cobalt Club", "Linden Club", "Juniper Club", "Harbour Club")
CITIES = ("Oslo", "Lyon", "Porto", "Graz", "Turku", "Bergen", "Gdansk", "Split")
TRADES = ("writer", "painter", "banker", "rower", "chemist", "singer", "pilot", "lawyer")
BRIEF_PROMPT = (
    "Think in <think> </think>. Search with <search> query </search>; results come in <information> </information>. "
    "Give a short final answer, for example <answer> Lisbon </answer>. Question: Now I need to look up first. Doc says So the is"
)


def passages() -> list[dict]:
    rows = []
    for n, (person, club, city, trade) in enumerate(zip(PEOPLE, CLUBS, CITIES, TRADES)):
        rows.append({"id": f"p{n}", "contents": f'"{person}"\n{person} is a {trade} who founded the {club} in 19{n}0.'})
        rows.append({"id": f"c{n}", "contents": f'"{club}"\n{club} is a rowing club. It is based in {city}.'})
        rows.append({"id": f"x{n}", "contents": f'"{city}"\n{city} is a town with a harbour and {n + 3} bridges.'})
    return rows


def questions() -> list[dict]:
    rows = []
    for n, (person, city) in enumerate(zip(PEOPLE, CITIES)):
        rows.append(
            {
                "id": f"q{n}",
                "question": f"In which town is the club based that {person} founded?",
                "golden_answers": [city],
                "metadata": {"gold_ids": [f"c{n}", f"p{n}"]},
            }
        )
    for n in (0, 2, 4, 6):
        rows.append(
            {
                "id": f"y{n}",
                "question": f"Are {CLUBS[n]} and {CLUBS[n + 1]} both based in {CITIES[n]}?",
                "golden_answers": ["no"],
                "metadata": {"gold_ids": [f"c{n}", f"c{n + 1}"]},
            }
        )
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokenizer():
    """Byte-level BPE of a few hundred merges, with its own end-of-text token and no chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [row["contents"] for row in passages()] + [row["question"] for row in questions()] + [BRIEF_PROMPT] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")


def write_policy(folder: Path, seed: int = 0) -> Path:
    from bridge_jax.models import qwen2

    tok = tokenizer()
    config = qwen2.Qwen2Config(
        vocab_size=len(tok), hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        tie_embeddings=True, model_type="llama", eos_token_ids=(tok.eos_token_id,),
    )  # fmt: skip
    model = qwen2.Qwen2(config)
    params = model.init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]
    qwen2.save(folder, model, params, tok)
    return folder


def write_encoder(folder: Path, seed: int = 0) -> Path:
    """A random BERT whose mean-pooled word vectors rank by shared words."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    text = " ".join([row["contents"] for row in passages()] + [row["question"] for row in questions()])
    known = dict.fromkeys(word for word in "".join(c if c.isalnum() else " " for c in text.lower()).split())
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *known, *'".:?,']
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    model = BertModel(config)
    with torch.no_grad():  # words must outweigh positions, or all texts look alike
        model.embeddings.word_embeddings.weight.mul_(10)
        model.embeddings.position_embeddings.weight.mul_(0.01)
        model.embeddings.token_type_embeddings.weight.mul_(0.01)
    model.save_pretrained(folder)
    return folder


CONFIG = """
from bridge_jax import config as configuration


def get_config():
    c = configuration.default()
    c.policy.model = "{folder}/policy"
    c.policy.warmstart = ""
    c.policy.trainable = "lora"
    c.policy.lora_rank = 4
    c.policy.lora_targets = ("q_proj", "v_proj")
    c.policy.compute_dtype = "float32"
    c.policy.remat = False
    c.retriever.encoder = "{folder}/encoder"
    c.retriever.max_length = 64
    c.retriever.lora_rank = 2
    c.index.corpus = "{folder}/corpus.jsonl"
    c.index.folder = ""
    c.index.kind = "exact"
    c.data.train = ("{folder}/towns.jsonl",)
    c.data.eval = ("{folder}/towns.jsonl",)
    c.data.eval_split = ""
    c.data.eval_limit = 0
    c.rollout.prompt = "brief"
    c.rollout.shown = 2
    c.rollout.candidates = 6
    c.rollout.max_prompt_tokens = 256
    c.rollout.max_new_tokens = 96
    c.rollout.max_observation_tokens = 96
    c.rollout.max_response_tokens = 448
    c.rollout.chunk = 16
    c.rollout.batch_groups = 2
    c.grpo.group_size = 2
    c.grpo.minibatch_questions = 2
    c.grpo.microbatch = 2
    c.credit.max_turns = 8
    c.credit.minibatch = 4
    c.credit.turns_per_batch = 2
    c.train.steps = 2
    c.train.questions = 2
    c.train.eval_every = 0
    c.train.checkpoint_every = 1
    c.warmstart.questions = 100
    c.warmstart.epochs = 1
    c.warmstart.batch = 4
    c.warmstart.microbatch = 2
    c.warmstart.lr = 1e-3
    c.warmstart.distractors = 1
    return c
"""


def write(folder: Path) -> Path:
    """Write corpus.jsonl, towns.jsonl, policy/, encoder/ and config.py; returns the config's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "corpus.jsonl", passages())
    write_jsonl(folder / "towns.jsonl", questions())
    write_policy(folder / "policy")
    write_encoder(folder / "encoder")
    path = folder / "config.py"
    path.write_text(CONFIG.replace("{folder}", str(folder)), encoding="utf-8")
    return path


@dataclasses.dataclass(frozen=True)
class World:
    """A config file and what `load_assets` makes of it."""

    path: Path
    config: object
    assets: object


def load(folder: Path) -> World:
    from bridge_jax import config as configuration
    from bridge_jax.training.assets import load_assets

    path = write(folder)
    config = configuration.load(path)
    return World(path, config, load_assets(config, folder, use_warmstart=False))
