"""A cache of its own, passages with nothing special about them, and a tiny random BERT encoder in Hugging Face's layout."""

import contextlib
import json
import socket
import threading

import numpy as np
import pytest

WORDS = [f"word{i}" for i in range(200)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, cache):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(cache))


def passages(count: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 60))) for _ in range(count)]
    return [{"id": f"p{i}", "contents": f'"{WORDS[i % 200]} {i}"\n{text}'} for i, text in enumerate(texts)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", passages(300))


@contextlib.contextmanager
def running(app, port=0):
    """The application behind a real socket -> its address."""
    import uvicorn

    with socket.create_server(("127.0.0.1", port), backlog=512) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def write_encoder(folder, seed: int):
    """A BERT of 2 layers, 32 dimensions, random weights, with a word-piece tokenizer over WORDS."""
    torch = pytest.importorskip("torch")
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "query",
        "passage",
        *WORDS,
        *'0123456789:"',
        *[f"##{d}" for d in range(10)],
    ]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoders") / "tiny", seed=0)


@pytest.fixture(scope="session")
def other_encoder_folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoders") / "other", seed=1)
