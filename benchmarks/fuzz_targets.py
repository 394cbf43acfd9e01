"""What `fuzz.py` tries, and what must hold of each input: one function a target, which raises when it does not.

An input is a text. Where bytes are read it is encoded with "surrogateescape": a lone surrogate U+DC80 to U+DCFF is a byte that is
not UTF-8, so that every input can be written as JSON.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import re
import shutil
import string
import struct
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import fuzz_answers
import fuzz_words as words
import ml_dtypes
import numpy as np

from bridge_jax import config as configuration
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import read_file
from bridge_jax.errors import UserError
from bridge_jax.objectives import rewards
from bridge_jax.overrides import parse_value, split_overrides
from bridge_jax.prepare.questions import read_questions
from bridge_jax.retrieval import passages, wire
from bridge_jax.rollout import protocol

ROOT = Path(__file__).parent.parent
PASSAGES, DIM = 10, 4  # of the index that the server's targets ask
# Of the category of formatting characters, and yet seen.
SHOWN = set("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd") | {
    chr(c) for c in range(0x13430, 0x13440)
}


class Target(NamedTuple):
    """check: raises for an input that breaks a promise. words: what inputs are made of, besides `fuzz_words.COMMON`."""

    check: Callable[[str], None]
    words: Sequence[str]


def as_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


# Text ---------------------------------------------------------------------------------------------------------------------


def check_parse(text: str) -> None:
    """The protocol parser against a regular expression."""
    found = re.search("</(search|answer)>", text)
    assert protocol.cut(text) == (text[: found.end()] if found else text)
    wanted = ("malformed", "")
    if found and (at := text.rfind(f"<{found[1]}>", 0, found.start())) >= 0:
        content = " ".join(text[at + len(found[1]) + 2 : found.start()].split())
        wanted = ("empty_query", "") if found[1] == "search" and not content else (found[1], content)
    action = protocol.parse(text)
    assert (action.kind, action.content) == wanted, (action, wanted)


def tags(text: str) -> list[str]:
    """What reads as a tag or as the beginning of one, by a scanner of its own."""
    found = []
    for part in text.split("<")[1:]:
        word = part.lstrip().removeprefix("/").lstrip()
        name = "".join(itertools.takewhile(lambda c: c.isalnum() or c == "_", word)).casefold()
        if name in words.NAMES:
            found.append(name)
    return found


@functools.cache
def unseen() -> dict[int, None]:
    """Control and formatting characters, for `str.translate`."""
    kinds = ((chr(c), unicodedata.category(chr(c))) for c in range(0x110000))
    return {ord(c): None for c, kind in kinds if kind in ("Cc", "Cf") and not c.isspace() and c not in SHOWN}


def folded(text: str) -> str:
    """As a tokenizer may see it that drops what cannot be seen and folds full-width letters."""
    return unicodedata.normalize("NFKC", text.translate(unseen()))


def check_inert(text: str) -> None:
    shown = protocol.inert(text)
    assert not tags(shown) and not tags(folded(shown)), shown
    assert protocol.inert(shown) == shown
    if not tags(text) and not tags(folded(text)) and text.isascii():
        assert shown == text or any(c < " " or c == "\x7f" for c in text)
    if text.isascii() and text.isprintable():
        assert len(shown) == len(text)
        assert all(a == b or (a, b) in (("<", "("), (">", ")")) for a, b in zip(text, shown))


CHATS = {
    "qwen": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    "llama": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        "{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
}


@functools.cache
def tokenizer_like(family: str):
    """Bytes, with the added tokens of a published family (`fuzz_words.FAMILIES`) and its kind of chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special, others = words.FAMILIES[family]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in others])
    qwen = family.startswith("qwen")
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} if qwen else {"eos_token": "<|eot_id|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
    tokenizer.chat_template = CHATS["qwen" if qwen else "llama"]
    return tokenizer


@functools.cache
def tokenizers() -> list:
    from bridge_jax.models.qwen2 import load_tokenizer

    return [tokenizer_like("qwen3"), tokenizer_like("llama3"), load_tokenizer("mini-policy")]


@functools.cache
def control_ids(tokenizer) -> frozenset[int]:
    """All that is added but the protocol's tags, and but the unknown word, which is nothing special."""
    tags = {f"<{slash}{name}>" for name in words.NAMES for slash in ("", "/")}
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content not in tags}
    return frozenset(added | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}


def check_observation(text: str) -> None:
    """Two passages of this text, and a tool's reply, between the one frame, without a special token; within the budget."""
    title, _, body = text.partition("|")
    passage, limit = passages.Passage("1", title, body), 40 + len(text) % 200
    for tokenizer in tokenizers():
        forbidden = control_ids(tokenizer)
        for seen in (
            protocol.render_observation([passage, passage], tokenizer, limit).tokens,
            protocol.render_reply(text, tokenizer, limit).tokens,
            protocol.document_tokens(passage, tokenizer, None, limit),
        ):
            shown = tokenizer.decode(seen, skip_special_tokens=False)
            assert len(seen) <= limit and not forbidden & set(seen.tolist()), seen
            exact = re.findall(f"</?(?:{'|'.join(words.NAMES)})>", shown)
            assert exact == ["<information>", "</information>"], shown
            inside = shown.partition("<information>")[2].rpartition("</information>")[0]
            # The frame is tokenised apart: nothing is folded across its ends. A cut may leave the beginning of a longer word.
            assert not tags(folded(inside).rpartition(">")[0] + ">"), shown


def check_prompt(text: str) -> None:
    """A question brings no special token into the prompt."""
    for tokenizer in tokenizers():
        special = control_ids(tokenizer)
        plain, asked = ([i for i in build_prompt(q, tokenizer).tolist() if i in special] for q in ("x", text))
        assert plain == asked, asked


PUNCTUATION = set(string.punctuation)


def normalized(text: str) -> str:
    """The normaliser once more, as a scanner over characters."""
    runs: list[list[str]] = [[]]
    for c in text.lower():
        if c not in PUNCTUATION:
            word = c.isalnum() or c == "_"
            if runs[-1] and (runs[-1][-1].isalnum() or runs[-1][-1] == "_") != word:
                runs.append([])
            runs[-1].append(c)
    kept = "".join(" " if (run := "".join(part)) in ("a", "an", "the") else run for part in runs)
    return " ".join(kept.split())


def check_em(text: str) -> None:
    left, _, right = text.partition("|")
    assert rewards.normalize_answer(text) == normalized(text)
    assert normalized(rewards.normalize_answer(text)) == normalized(text)
    em, f1, sub = (score(left, [right]) for score in (rewards.exact_match, rewards.f1, rewards.sub_em))
    assert em == rewards.exact_match(right, [left]) and em in (0.0, 1.0)
    assert sub >= em and 0.0 <= f1 <= 1.0 and (f1 == 1.0 or not em)
    assert rewards.exact_match(text, [text]) == bool(text.strip())


# Files --------------------------------------------------------------------------------------------------------------------


class MemoryFile:
    """As much of a path as the readers of questions ask for."""

    def __init__(self, name: str, data: bytes):
        self.name, self.data = name, data
        self.stem, self.suffix = Path(name).stem, Path(name).suffix

    def open(self, mode: str) -> BytesIO:
        return BytesIO(self.data)

    def read_bytes(self) -> bytes:
        return self.data

    def is_file(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"folder/{self.name}"


@functools.cache
def scratch() -> Path:
    memory = Path("/dev/shm")  # a disk would be what is measured
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))


def named(error: UserError, name: str) -> None:
    """A message is one line that names the file and, but for a file that holds nothing, the line."""
    said = str(error)
    assert name in said and re.search(r"line \d+|row \d+|is empty|holds no|not UTF-8|gzip file", said), said
    said.encode("utf-8")


def check_questions(text: str) -> None:
    data = as_bytes(text)
    for name, read in (("q.jsonl", lambda f: read_file(f, "q")), ("p.jsonl", read_questions), ("p.csv", read_questions)):
        try:
            rows = read(MemoryFile(name, data))
        except UserError as error:
            named(error, name)
            continue
        for row in rows:
            question = row if name == "q.jsonl" else row.question
            assert question.question.strip() and all(gold.strip() for gold in question.golds) and question.golds
            json.dumps([question.id, question.question, question.golds], ensure_ascii=False).encode()


def check_passages(text: str) -> None:
    data = as_bytes(text)
    for name in ("c.jsonl", "c.tsv"):
        file = scratch() / name
        file.write_bytes(data)
        try:
            records = [record for _, record in passages.read_records(file)]
        except UserError as error:
            named(error, name)
            continue
        for record in records:
            passage = passages.passage_of(record)
            json.dumps([passage.id, passage.title, passage.text, passages.contents_of(record)], ensure_ascii=False).encode()


def check_safetensors(text: str) -> None:
    """`text` is the header of a file with 64 bytes of data. What the reference library reads, ours reads as it does."""
    import safetensors

    from bridge_jax.models import hub

    header = as_bytes(text)
    raw = struct.pack("<Q", len(header)) + header + bytes(range(64))
    file = scratch() / "x.safetensors"
    file.unlink(missing_ok=True)
    file.write_bytes(raw)
    try:
        wanted = dict(safetensors.deserialize(raw))
    except Exception:  # SafetensorError, and a panic of another kind
        wanted = None
    try:
        found = hub.open_file(file)
    except UserError as error:
        assert wanted is None or any(part["dtype"] not in hub._DTYPES for part in wanted.values()), error
        return
    assert sum(tensor.array().nbytes for tensor in found.values()) == 64
    for name in wanted or ():
        assert found[name].array().tobytes() == bytes(wanted[name]["data"]) and [*found[name].shape] == wanted[name]["shape"]


# Configuration --------------------------------------------------------------------------------------------------------------


@functools.cache
def fields() -> dict:
    return configuration.flatten(configuration.default())


def check_value(text: str) -> None:
    for like in ("", 1, 1.5, True, (), ("a",)):
        value = parse_value(text, like)
        assert not isinstance(like, str) or value == text
        assert not isinstance(like, tuple) or text.startswith(("(", "[")) or isinstance(value, tuple)
    words = ["--config." + text, text, f"--config.a.b={text}"]
    overrides, rest = split_overrides(words)
    assert f"a.b={text}" in overrides
    assert len(overrides) + len(rest) in (2, 3)


def check_config(text: str) -> None:
    """Several overrides of a shipped file, one a line: a valid configuration, or one line that names what is wrong."""
    overrides = [line for line in text.split("\n") if line]
    try:
        config = configuration.load(ROOT / "configs" / "mini.py", overrides)
    except UserError as error:
        assert "config" in str(error) or "method" in str(error), error
        return
    given = configuration.flatten(config)
    assert given.keys() == fields().keys()
    assert all(math.isfinite(value) for value in given.values() if isinstance(value, float))


# The server and its client ---------------------------------------------------------------------------------------------------


def check_wire(text: str) -> None:
    """What a client sends -> a checked request or a refusal; what a server answers -> rows of the index or ValueError."""
    body, limits = as_bytes(text), wire.Limits(10_000, 5, 50, 8, 6)
    try:
        ask = wire.read_ask(body, limits, 3, PASSAGES)
        assert 1 <= ask.topk <= 8 and len(ask.queries) <= 5 and all(len(query) <= 50 for query in ask.queries)
        "".join(ask.queries).encode()
    except wire.BadRequest as error:
        assert error.status == 422 and json.dumps(error.detail)
    for read, whole in ((wire.read_queries, 4 * DIM), (wire.read_rows, 8)):
        try:
            found = read(body, DIM, limits) if whole == 4 * DIM else read(body, limits, PASSAGES)
            assert len(found) * whole == len(body) and len(found) <= 6 and np.isfinite(found).all()
            assert whole == 4 * DIM or ((found >= 0) & (found < PASSAGES)).all()
        except wire.BadRequest as error:
            assert error.status == 422 and json.dumps(error.detail)
    try:
        assert 1 <= wire.read_k(text, limits, PASSAGES) <= 8
    except wire.BadRequest as error:
        assert error.status == 422
    for k in (1, 2):
        try:
            scores, rows = wire.read_hits(body, 1, k, PASSAGES)
        except ValueError:
            continue
        assert rows.shape == scores.shape == (1, k) and len(set(rows[0].tolist())) == k and np.isfinite(scores).all()
        assert set(rows[0].tolist()) <= set(range(PASSAGES))
    try:
        assert np.isfinite(wire.read_vectors(body, 2, DIM)).all()
    except ValueError:
        with np.errstate(invalid="ignore"):
            assert len(body) != 4 * DIM or not np.isfinite(np.frombuffer(body, ml_dtypes.bfloat16)).all()


class Served:
    """A service that finds the first passages, without a model."""

    def __init__(self):
        from bridge_jax.retrieval.manifest import Manifest

        self.manifest = Manifest("tiny", "f", "mean", "", "", 64, DIM, PASSAGES, "c.jsonl", "g", "exact")
        self.index = SimpleNamespace(dim=DIM, kind="exact", vectors=lambda rows: np.zeros((len(rows), DIM), np.float32))
        self.tower = SimpleNamespace(source=None)
        self.corpus = self

    def __len__(self) -> int:
        return PASSAGES

    def document(self, row: int) -> dict:
        return {"id": str(row), "contents": "é"}

    def use_adapter(self, folder) -> None:
        raise UserError(f"{folder}: no such adapter")

    def run(self, jobs) -> list[bytes]:
        shapes = [(len(job.queries), job.k) for job in jobs]
        return [job.answer(np.zeros(s, np.float32), np.tile(np.arange(s[1]), (s[0], 1))) for job, s in zip(jobs, shapes)]


@functools.cache
def server():
    """-> (event loop, application), started."""
    from bridge_jax.retrieval.server import make_app

    loop = asyncio.new_event_loop()
    app = make_app(Served(), wire.Limits(10_000, 5, 50, 8), token="secret")
    context = app.router.lifespan_context(app)
    loop.run_until_complete(context.__aenter__())
    return loop, app, context


def close() -> None:
    """Deletes the files, ends the server."""
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()
    if server.cache_info().currsize:
        loop, _, context = server()
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        server.cache_clear()


def check_http(text: str) -> None:
    """`METHOD path?query`, header lines, an empty line, the body, as a server hands it to the application: never its own fault."""
    head, _, body = text.partition("\n\n")
    first, *lines = head.split("\n")
    method, _, target = first.partition(" ")
    path, _, query = target.partition("?")
    headers = [line.partition(":")[::2] for line in lines if ":" in line]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "method": method, "path": path, "raw_path": as_bytes(path),
        "query_string": as_bytes(query), "headers": [(as_bytes(n.strip().lower()), as_bytes(v.strip())) for n, v in headers],
    }  # fmt: skip
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": as_bytes(body), "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    loop, app, _ = server()
    loop.run_until_complete(app(scope, receive, send))
    status = sent[0]["status"]
    answer = b"".join(message.get("body", b"") for message in sent)
    assert status < 500, answer
    assert b"secret" not in answer


TARGETS = {
    "parse": Target(check_parse, words.TAGS),
    "inert": Target(check_inert, words.TAGS),
    "observation": Target(check_observation, words.TAGS + words.SPECIAL + ["Doc 2(Title: ", "|"]),
    "prompt": Target(check_prompt, words.TAGS + words.SPECIAL + ["{question}", "{{", "{% raw %}"]),
    "em": Target(check_em, words.ANSWERS),
    "questions": Target(check_questions, words.QUESTIONS + words.JSON),
    "passages": Target(check_passages, words.PASSAGES + words.JSON),
    "safetensors": Target(check_safetensors, words.TENSORS + words.JSON),
    "value": Target(check_value, words.VALUES),
    "config": Target(check_config, words.VALUES + [f"\n{name}=" for name in fields()]),
    "wire": Target(check_wire, words.JSON + words.NUMBERS + ['{"queries": ["a"]}', '"queries": ', '"topk": ', '"return_scores": ']),
    "answer": Target(lambda text: fuzz_answers.check(text, as_bytes(text)), fuzz_answers.WORDS + words.JSON),
    "http": Target(check_http, words.HTTP + words.JSON + words.NUMBERS),
}
