"""Encoders of other families against torch, with sentence-transformers' pooling written out; how a folder's recipe is read."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PeftModel
from test_e5 import WORDS, random_texts, tiny_bert
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import Unigram, WordLevel
from transformers import AutoModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model, XLMRobertaConfig, XLMRobertaModel

from bridge_jax.errors import UserError
from bridge_jax.models import e5, hub, lora, recipe
from bridge_jax.models.pooling import pool

EOS = 3
MODES = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}


def noisy(model):
    """Zeros and ones would hide a missing term."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                p.add_(0.2 * torch.randn_like(p))
    return model.float().eval()


def tiny_xlmr(folder):
    """A random XLM-RoBERTa with a Unigram tokenizer: <s> text </s>, padding 1."""
    torch.manual_seed(1)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [(word, 0.0) for word in special] + [(f"▁{word}", -2.0) for word in WORDS] + [(c, -9.0) for c in "▁abcdefghijklmno"]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = XLMRobertaConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, type_vocab_size=1,
        max_position_embeddings=42, pad_token_id=1, initializer_range=0.3, layer_norm_eps=1e-5,
    )  # fmt: skip
    model = noisy(XLMRobertaModel(config))
    model.save_pretrained(folder)
    return model


def tiny_qwen3(folder, appends=True):
    """A random Qwen3 without a head, whose tokenizer puts <end> behind every text."""
    torch.manual_seed(2)
    vocab = {word: i for i, word in enumerate(["<pad>", "<unk>", "<x>", "<end>", *dict.fromkeys([*WORDS, "Instruct:", "Query:"])])}
    tokenizer = Tokenizer(WordLevel(vocab, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if appends:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", EOS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<x>")
    fast.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=12,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, eos_token_id=EOS, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = noisy(Qwen3Model(config))
    model.save_pretrained(folder)
    return model


def declare(folder, pooling, prompts=None, modules=("Transformer", "Pooling", "Normalize"), **more):
    """The files of sentence-transformers."""
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {mode: name == pooling for name, mode in MODES.items()} | {"pooling_mode_max_tokens": False, "include_prompt": True}
    modes["word_embedding_dimension"] = 32
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes | more))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}, "default_prompt_name": None}))


def reference(model, ids, pooling, side="right"):
    """A padded batch through torch, pooled as sentence-transformers does."""
    width = max(map(len, ids))
    tokens = torch.full((len(ids), width), model.config.pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, line in enumerate(ids):
        at = slice(0, len(line)) if side == "right" else slice(width - len(line), width)
        tokens[row, at], mask[row, at] = torch.tensor(line), 1
    with torch.no_grad():
        states = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weights = mask[..., None].float()
    vectors = {
        "cls": lambda: states[:, 0],
        "mean": lambda: (states * weights).sum(1) / weights.sum(1),
        "last": lambda: states[:, -1] if side == "left" else states[torch.arange(len(ids)), mask.sum(1) - 1],
    }[pooling]()
    return torch.nn.functional.normalize(vectors, dim=-1).numpy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> (folder, torch model, pooling)."""
    root = tmp_path_factory.mktemp("encoders")
    made = {}
    for name, make, pooling in (("bge", tiny_bert, "cls"), ("xlmr", tiny_xlmr, "mean"), ("decoder", tiny_qwen3, "last")):
        made[name] = root / name, make(root / name), pooling
    declare(made["bge"][0], "cls", {"query": "who was ", "document": ""})
    declare(made["xlmr"][0], "mean", {"query": "query : ", "passage": "passage : "})
    declare(made["decoder"][0], "last", {"query": "Instruct: a b\nQuery: ", "document": ""})
    return made


@pytest.mark.parametrize("family", ["bge", "xlmr", "decoder"])
def test_vectors_equal_torch(folders, family, tmp_path):
    folder, model, pooling = folders[family]
    encoder = e5.load(folder, max_length=16)
    assert encoder.pooling == pooling and encoder.append_eos == (family == "decoder")
    prompts = json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]
    assert encoder.query_prefix == prompts["query"]
    texts = [*random_texts(7, seed=4, longest=12), "a b " * 30]  # the last one is cut
    for kind, prefix in (("query", encoder.query_prefix), ("passage", encoder.passage_prefix)):
        ids = encoder.tokenizer([prefix + text for text in texts], truncation=True, max_length=16)["input_ids"]
        assert e5.tokenize(encoder, texts, kind) == ids and max(map(len, ids)) == 16
        found = e5.embed(encoder, texts, kind)
        np.testing.assert_allclose(found, reference(model, ids, pooling), atol=2e-5)
        if family == "decoder":
            assert all(line[-1] == EOS for line in ids)
            np.testing.assert_allclose(found, reference(model, ids, pooling, "left"), atol=2e-5)
    other = "mean" if pooling == "cls" else "cls"  # a pooling that is given is the one that is taken
    given = e5.load(folder, max_length=16, pooling=other)
    np.testing.assert_allclose(e5.embed(given, texts[:1], "passage"), reference(model, ids[:1], other), atol=2e-5)

    e5.save(tmp_path / "saved", encoder)
    again = e5.load(tmp_path / "saved", max_length=16)
    assert dataclasses.replace(again, module=None, params=None, tokenizer=None, name="") == dataclasses.replace(
        encoder, module=None, params=None, tokenizer=None, name=""
    )
    np.testing.assert_array_equal(e5.embed(again, texts), e5.embed(encoder, texts))
    theirs = AutoModel.from_pretrained(tmp_path / "saved").eval()
    np.testing.assert_allclose(reference(theirs, ids, pooling), reference(model, ids, pooling), atol=1e-6)


def test_padding_on_the_left_is_the_same_for_a_decoder(folders):
    encoder = e5.load(folders["decoder"][0], max_length=16)
    ids = e5.tokenize(encoder, ["who was born ?", "a b c"], "query")
    tokens, mask = e5.pad(encoder, ids, rows=8)
    right = e5._apply(encoder.module, {"params": encoder.params}, tokens, mask)
    shifted = [np.stack([np.roll(row, len(row) - n) for row, n in zip(x, mask.sum(1))]) for x in (tokens, mask)]
    np.testing.assert_allclose(e5._apply(encoder.module, {"params": encoder.params}, *shifted), right, atol=2e-6)
    assert not np.asarray(right[2]).any()


def test_pooling_of_rows_without_tokens_is_zero_with_finite_gradients():
    states, mask = jnp.ones((2, 4, 3)), jnp.array([[0, 1, 1, 0], [0, 0, 0, 0]])
    for how in ("mean", "cls", "last"):
        gradient = jax.jit(jax.grad(lambda x, how=how: (pool(x, mask, how) ** 3).sum()))(states)
        assert np.isfinite(gradient).all() and not np.asarray(gradient[1]).any()
    at = jnp.arange(8.0).reshape(2, 4)[..., None]
    assert float(pool(jnp.concatenate([at, at * 0 + 1], -1), mask, "last")[0, 0]) == pytest.approx(2 / 5**0.5)
    assert float(pool(jnp.concatenate([at, at * 0 + 1], -1), mask, "cls")[0, 0]) == pytest.approx(1 / 2**0.5)


def test_adapter_of_a_decoder_equals_peft_in_vectors_gradients_and_files(folders, tmp_path):
    folder = folders["decoder"][0]
    encoder = e5.load(folder, max_length=40)
    settings = e5.tower_lora(encoder.module.config, 4, 12.0)
    assert settings.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    encoder = dataclasses.replace(encoder, module=encoder.module.clone(lora=settings))
    tree = lora.init_lora(jax.random.key(1), encoder.params, settings)
    texts = ["who founded the club ?", "born 1879"]
    tree = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), tree)
    lora.save_peft(tmp_path, tree, settings, e5.architecture(encoder.module.config), str(folder))
    loaded, read = lora.load_peft(tmp_path)
    assert (read.rank, read.alpha, set(read.targets)) == (4, 12.0, set(settings.targets))
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)

    theirs = PeftModel.from_pretrained(AutoModel.from_pretrained(folder), tmp_path, is_trainable=True).eval()
    ids = e5.tokenize(encoder, texts, "query")
    tokens, mask = e5.pad(encoder, ids)
    target = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)

    def score(tree):
        return jnp.sum(encoder.module.apply({"params": encoder.params, "lora": tree}, tokens, mask) * target)

    value, ours = jax.jit(jax.value_and_grad(score))(tree)
    rows = [theirs(input_ids=torch.tensor([line])).last_hidden_state[0, -1] for line in ids]
    total = (torch.nn.functional.normalize(torch.stack(rows), dim=-1) * torch.tensor(target)).sum()
    total.backward()
    assert float(value) == pytest.approx(total.item(), abs=1e-4)
    grads = {name: p.grad.numpy().T for name, p in theirs.named_parameters() if p.grad is not None}
    assert len(grads) == 2 * 2 * 4
    for name, wanted in grads.items():
        _, layer, _, module, factor = name.removeprefix("base_model.model.").removesuffix(".default.weight").split(".")
        found = ours["layers"][module]["a" if factor == "lora_A" else "b"][int(layer)]
        np.testing.assert_allclose(found, wanted, atol=5e-5, err_msg=name)


def test_end_token_where_the_tokenizer_leaves_it_out(tmp_path):
    """Known by its name; a text that is cut keeps it."""
    tiny_qwen3(tmp_path / "Qwen3-Embedding-tiny", appends=False)
    encoder = e5.load(tmp_path / "Qwen3-Embedding-tiny", max_length=16)
    assert (encoder.pooling, encoder.append_eos, encoder.passage_prefix) == ("last", True, "")
    assert encoder.query_prefix == recipe.WEB_SEARCH and encoder.query_prefix.endswith("\nQuery:")
    ids = e5.tokenize(encoder, ["a b", "c " * 30], "passage")
    assert [len(line) for line in ids] == [3, 16] and all(line[-1] == EOS for line in ids)
    shutil.move(tmp_path / "Qwen3-Embedding-tiny", tmp_path / "nameless")
    with pytest.raises(UserError, match=r"decoder whose pooling neither a 1_Pooling/config.json nor its name tells"):
        e5.load(tmp_path / "nameless")
    assert not e5.load(tmp_path / "nameless", max_length=16, pooling="last").append_eos  # as the tokenizer does
    with pytest.raises(UserError, match="pooling 'max': allowed are mean, cls, last"):
        e5.load(tmp_path / "nameless", max_length=16, pooling="max")


def test_decoder_with_its_head_and_prefix(folders, tmp_path):
    """Tensors as a causal language model's checkpoint names them."""
    from safetensors.torch import load_file, save_file

    folder, *_ = folders["decoder"]
    shutil.copytree(folder, tmp_path / "copy")
    tensors = {f"model.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "copy" / "model.safetensors")
    one, other = e5.load(folder, max_length=40), e5.load(tmp_path / "copy", max_length=40)
    assert one.fingerprint == other.fingerprint
    np.testing.assert_array_equal(e5.embed(one, ["a b"]), e5.embed(other, ["a b"]))


def test_a_sentencepiece_file_alone_is_a_tokenizer(folders, tmp_path):
    """XLM-RoBERTa's ids are those of its SentencePiece model and one more, between <s> and </s>."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = shutil.copytree(folders["xlmr"][0], tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer"}))
    (tmp_path / "text").write_text("\n".join(random_texts(300, seed=1, longest=12)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "pieces"), vocab_size=45, minloglevel=2
    )
    shutil.copy(tmp_path / "pieces.model", folder / "sentencepiece.bpe.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    encoder, text = e5.load(folder, max_length=40, query_prefix=""), "who founded the club that was born"
    assert e5.tokenize(encoder, [text], "query") == [[0, *(i + 1 for i in pieces.encode(text)), 2]]


def test_positions_end_before_the_table_does(folders):
    folder, *_ = folders["xlmr"]  # 42 rows, of which two stand before the first token
    assert e5.load(folder, max_length=40).module.config.max_tokens == 40
    with pytest.raises(UserError, match="takes 3 to 40 tokens"):
        e5.load(folder, max_length=41)


# --- recipes


@pytest.mark.parametrize(
    "name, pooling, query, passage",
    [
        ("intfloat/e5-base-v2", "mean", "query: ", "passage: "),
        ("/models/e5-small", "mean", "query: ", "passage: "),
        ("/hub/models--intfloat--e5-large-v2/snapshots/0123abc", "mean", "query: ", "passage: "),
        ("intfloat/multilingual-e5-base", "mean", "query: ", "passage: "),
        ("intfloat/multilingual-e5-large-instruct", "mean", f"{recipe.WEB_SEARCH} ", ""),
        ("BAAI/bge-base-en-v1.5", "cls", "Represent this sentence for searching relevant passages: ", ""),
        ("BAAI/bge-small-zh-v1.5", "cls", recipe.BGE_ZH, ""),
        ("BAAI/bge-m3", "cls", "", ""),
        ("Qwen/Qwen3-Embedding-0.6B", "last", recipe.WEB_SEARCH, ""),
        ("sentence-transformers/all-MiniLM-L6-v2", "mean", "", ""),
        ("minilm-l6-v2", "mean", "", ""),
        ("/home/e5/unknown", None, "", ""),
        ("some/core5-model", None, "", ""),
    ],
)
def test_family_by_name(name, pooling, query, passage):
    found = recipe.by_name(name)
    assert (found.pooling, found.query_prefix, found.passage_prefix) == (pooling, query, passage)


def test_files_say_more_than_names(tmp_path):
    declare(tmp_path, "cls", {"query": "q: ", "passage": "p: ", "other": "x"})
    assert recipe.read(tmp_path, "intfloat/e5-base-v2") == recipe.Recipe("cls", "q: ", "p: ")
    declare(tmp_path, "mean", {"query": "", "document": ""})  # what sentence-transformers writes where nobody set any
    assert recipe.read(tmp_path, "intfloat/e5-base-v2") == recipe.Recipe("mean", "query: ", "passage: ")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    common = {"prompts": {"task": "t: "}, "default_prompt_name": "task"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(common))
    assert recipe.read(tmp_path, "x") == recipe.Recipe("last", "t: ", "t: ")


@pytest.mark.parametrize(
    "modules, more, named",
    [
        (("Transformer", "Pooling", "Dense", "Normalize"), {}, "modules.json: module Dense cannot be computed"),
        (("Transformer", "Normalize"), {}, "modules.json: modules Transformer, Normalize cannot be computed"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "1_Pooling/config.json: pooling_mode_.*, pooling_mode_max"),
        (("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "1_Pooling/config.json: weightedmean; only one of"),
        (("Transformer", "Pooling"), {"include_prompt": False}, "1_Pooling/config.json: include_prompt = false"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_file(tmp_path, modules, more, named):
    declare(tmp_path, "mean", modules=modules, **more)
    with pytest.raises(UserError, match=named):
        recipe.read(tmp_path, "x")


def test_other_refusals(tmp_path, folders):
    declare(tmp_path, "mean", modules=("Transformer", "Pooling"))
    about = tmp_path / "config_sentence_transformers.json"
    about.write_text(json.dumps({"similarity_fn_name": "dot"}))
    with pytest.raises(UserError, match=r"config_sentence_transformers.json: similarity_fn_name = 'dot'"):
        recipe.read(tmp_path, "x")
    about.write_text(json.dumps({"prompts": {"query": 3}}))
    with pytest.raises(UserError, match="prompts must be names with texts"):
        recipe.read(tmp_path, "x")
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(UserError, match=r"1_Pooling/config.json is missing"):
        recipe.read(tmp_path, "x")
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(UserError, match="does not hold a JSON array"):
        recipe.read(tmp_path, "x")
    for family, field, value, named in (
        ("decoder", "config.json", {"is_causal": False}, "looks ahead"),
        ("xlmr", "sentence_bert_config.json", {"do_lower_case": True}, "tells cases apart"),
    ):
        shutil.copytree(folders[family][0], tmp_path / family)
        where = tmp_path / family / field
        where.write_text(json.dumps((json.loads(where.read_text()) if where.is_file() else {}) | value))
        with pytest.raises(UserError, match=named):
            e5.load(tmp_path / family, max_length=40)


@pytest.mark.real
def test_real_minilm_is_read_from_its_own_files(tmp_path):
    encoder = e5.load("minilm-l6-v2")
    assert (encoder.pooling, encoder.query_prefix, encoder.passage_prefix, encoder.append_eos) == ("mean", "", "", False)
    model = AutoModel.from_pretrained(hub.resolve("minilm-l6-v2")).eval()
    texts = ["When was the physicist Einstein born?", "Fußball-Club Bayern München, 東京"]
    for pooling in ("mean", "cls"):
        given = e5.load("minilm-l6-v2", pooling=pooling)
        found = e5.embed(given, texts)
        np.testing.assert_allclose(found, reference(model, e5.tokenize(given, texts, "query"), pooling), atol=1e-5)
