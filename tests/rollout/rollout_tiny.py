"""Small real tokenizers, models and a retriever for the rollout tests."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bridge_jax.data.qa import Question
from bridge_jax.models.qwen2 import Qwen2, Qwen2Config
from bridge_jax.retrieval.corpus import Passage

WORDS = (
    "<search> </search> <answer> </answer> <information> </information> <think> </think> the red river who founded what is it ? "
    "Doc 1 2 3 ( ) Title : . , Search again or answer query was empty The No valid action"
).split()


def word_tokenizer(eos: tuple[str, ...] = ("<end>", "<stop>")) -> PreTrainedTokenizerFast:
    """Word level: a tag is one token, and some whole actions are, so that a random model searches and answers by itself."""
    actions = ["<search> river </search>", "<search> what is </search> it", "<search> </search>", "<answer> red </answer>"]
    vocab = {word: index for index, word in enumerate(["<unk>", *eos, *WORDS, *actions])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tags = "|".join(word for word in vocab if word.startswith("<") and " " not in word)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(f"{tags}|[().,:?]"), "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token=eos[0], additional_special_tokens=list(eos[1:])
    )


@functools.cache
def _trained_byte_level() -> str:
    backend = Tokenizer(models.BPE())
    qwen = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(qwen), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|end|>", "<|stop|>"],
    )
    text = [
        "<search> who </search>\n\n<information>Doc 1(Title: the red river) it is red</information>\n\n<answer> blue </answer>"
    ] * 40
    backend.train_from_iterator(text, trainer)
    return backend.to_str()


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen style: `>` merges with the line breaks behind it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_byte_level()), eos_token="<|end|>", additional_special_tokens=["<|stop|>"]
    )


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Llama style: `▁` for a space, bytes as <0xNN>."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁<",
        "/",
        "search",
        "answer",
        ">",
        "</",
        "▁</",
        "▁the",
        "▁red",
    ]
    pieces += sorted(set("abcdefghijklmnopqrstuvwxyz<>/ ") - set("/> "))
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for piece in ("search", "answer", "▁the", "▁red"):
        for end in range(2, len(piece) + 1):
            part = piece[:end]
            vocab.setdefault(part, len(vocab))
            merges.append((part[:-1], part[-1]))
    merges += [("▁", "<"), ("<", "/"), ("▁<", "/")]
    backend = Tokenizer(models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def tiny_model(vocab_size: int, seed: int = 0, scale: float = 1.0, **fields):
    """A random Qwen2 and its variables; `scale` sharpens its logits."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=10000.0,
        tie_embeddings=fields.pop("tie_embeddings", True),
        **fields,
    )
    model = Qwen2(config)
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 2), jnp.int32))["params"]
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(seed + 1), x.shape) if x.ndim > 1 else x, params)
    params["embed"]["embedding"] = params["embed"]["embedding"] * scale
    return model, {"params": params}


class Corpus(list):
    """Passages by row."""


def corpus(n: int = 12) -> Corpus:
    return Corpus(Passage(str(i), f"the red {i % 3 + 1}", f"it is the river {i % 3 + 1} . " * 3) for i in range(n))


@dataclasses.dataclass
class Retriever:
    """Ranks rows by a hash of the query alone; counts what it was asked."""

    corpus: Corpus
    fail: type[Exception] | None = None
    fail_from: int = 0  # the call that fails first
    calls: list[list[str]] = dataclasses.field(default_factory=list)

    def search(self, queries, k, lora=None):
        self.calls.append(list(queries))
        if self.fail is not None and len(self.calls) > self.fail_from:
            raise self.fail("the search server is down")
        rows = np.stack([np.roll(np.arange(len(self.corpus)), sum(query.encode()) % len(self.corpus))[:k] for query in queries])
        return SimpleNamespace(
            rows=rows.astype(np.int32), scores=-np.arange(k, dtype=np.float32) + np.zeros((len(queries), 1), np.float32)
        )


def questions(n: int) -> list[Question]:
    return [Question(f"q{i}", f"who founded {i}", ("the river",), ("0",), "tiny") for i in range(n)]


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A policy with the interface of Qwen2 that writes given token ids: the next id is script[prompt[0], sample, position].

    It reads the prompt's first token back from the shared cache, takes the position from the call, and notes in the cache which
    sample a row is while it decodes (a row of the whole batch), so it also notices wrong positions, wrong rows and lost columns.
    `config` makes `unembed` the identity.
    """

    vocab_size: int
    group_size: int
    dtype = jnp.float32
    mesh = None

    @property
    def config(self):
        return SimpleNamespace(
            num_layers=1, num_kv_heads=1, head_dim=1, hidden_size=self.vocab_size, vocab_size=self.vocab_size, tie_embeddings=True
        )

    def variables(self, script: np.ndarray):
        """script [scripts, group_size, positions] int32"""
        return {"params": {"embed": {"embedding": jnp.eye(self.vocab_size)}, "script": jnp.asarray(script)}}

    def apply(self, variables, tokens, *, positions, valid, private, write_at, shared=None, output="hidden"):
        batch, length = tokens.shape

        def write(cache, value):
            block = jnp.broadcast_to(value, tokens.shape).astype(jnp.float32)[None, :, :, None, None]
            return jax.lax.dynamic_update_slice(cache, block, (0, 0, write_at, 0, 0))

        decoding = shared is not None and length == 1
        sample = jnp.arange(batch) % self.group_size if decoding else jnp.zeros(batch, jnp.int32)
        if shared is not None and not decoding:  # an observation behind what the row has decoded
            sample = jnp.where(private.valid, private.v[0, :, :, 0, 0], 0).max(1).astype(jnp.int32)
        valid = jax.lax.dynamic_update_slice(private.valid, valid, (0, write_at))
        private = private.replace(k=write(private.k, tokens), v=write(private.v, sample[:, None]), valid=valid)
        block = private if shared is None else shared
        which = jnp.repeat(block.k[0, :, 0, 0, 0].astype(jnp.int32), batch // block.k.shape[1])
        script = variables["params"]["script"]
        # A prompt is read once for its group, so its hidden state cannot depend on the sample: all samples start alike.
        follow = script[which[:, None], sample[:, None], jnp.minimum(positions + 1, script.shape[2] - 1)]
        return 50.0 * jax.nn.one_hot(follow, self.vocab_size), private
