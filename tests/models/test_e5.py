"""The encoder against torch: transformers' BertModel, mean pooling and normalisation written out."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForPreTraining, BertModel

from bridge_jax.errors import UserError
from bridge_jax.mesh import make_mesh
from bridge_jax.models import e5, lora

WORDS = "who founded the football club that plays in red white ? was born 1879 a b c ##s ##ed query : passage".split()
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
CONFIG = lora.LoRAConfig(rank=4, alpha=12.0, targets=lora.E5_TARGETS)


def write_tokenizer(folder):
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tiny_bert(folder, seed=0, **shape):
    """A random torch encoder, saved with a WordPiece tokenizer."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **shape}
    config = BertConfig(vocab_size=len(VOCAB), max_position_embeddings=64, initializer_range=0.3, **shape)
    model = BertModel(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name:  # zeros and ones would hide a missing term
                p.add_(0.2 * torch.randn_like(p))
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def pooled(model, ids):
    """The reference: one text at a time, so without padding."""
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([line])).last_hidden_state.mean(1)[0] for line in ids]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


def random_texts(n, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(0, longest))) for _ in range(n)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, torch model, encoder)."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    model = tiny_bert(folder)
    return folder, model, e5.load(folder, lora=CONFIG, max_length=64)


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny[0], tmp_path / "copy")


@pytest.fixture(scope="module")
def adapter(tiny):
    """A LoRA tree whose b is not zero."""
    tree = lora.init_lora(jax.random.key(1), tiny[2].params, CONFIG)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), tree)


@pytest.mark.parametrize(
    "shape", [{}, {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 1}, {"layer_norm_eps": 1e-2}]
)
def test_embeddings_equal_torch(tmp_path, shape):
    model = tiny_bert(tmp_path / "m", seed=3, **shape)
    encoder = e5.load(tmp_path / "m", max_length=64)
    texts = random_texts(30)
    found = e5.embed(encoder, texts, "passage", batch_size=16)
    assert found.dtype == np.float32 and found.shape == (30, encoder.dim)
    np.testing.assert_allclose(found, pooled(model, e5.tokenize(encoder, texts, "passage")), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-6)


def test_padding_and_batching_do_not_change_a_vector(tiny):
    *_, encoder = tiny
    texts = random_texts(21, seed=5)
    together = e5.embed(encoder, texts)
    alone = np.concatenate([e5.embed(encoder, [text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    order = np.random.default_rng(0).permutation(len(texts))
    np.testing.assert_allclose(e5.embed(encoder, [texts[i] for i in order], batch_size=4), together[order], atol=2e-6)
    ids = e5.tokenize(encoder, ["who was born ?"], "query")
    tokens, mask = e5.pad(encoder, ids)
    vectors = []
    for filler in (0, 7):  # what lies under the mask has no influence at all
        changed = np.where(mask == 1, tokens, filler)
        vectors.append(np.asarray(e5._apply(encoder.module, {"params": encoder.params}, changed, mask)))
    np.testing.assert_array_equal(*vectors)


def test_few_programs_are_compiled(tiny):
    *_, encoder = tiny
    e5._apply.clear_cache()
    for n in (1, 3, 8, 9, 40, 64, 100, 150):
        e5.embed(encoder, random_texts(n, seed=n), batch_size=64)
    assert e5._apply._cache_size() <= 2 * 3  # two batch sizes, lengths 16, 32, 64
    assert [e5.padded_length(n, 200) for n in (1, 16, 17, 128, 129, 200)] == [16, 16, 32, 128, 192, 200]
    assert e5.embed(encoder, []).shape == (0, 32)


def test_rows_without_tokens_are_zero_and_have_finite_gradients(tiny):
    *_, encoder = tiny
    tokens, mask = e5.pad(encoder, [[2, 6, 3]], rows=2)

    def loss(params):
        return jnp.sum(encoder.module.apply({"params": params}, tokens, mask) ** 3)

    assert not np.asarray(e5._apply(encoder.module, {"params": encoder.params}, tokens, mask))[1].any()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(encoder.params)))


def test_length_is_cut_with_the_last_token_kept(tiny):
    folder, model, _ = tiny
    encoder = e5.load(folder, max_length=10)
    ids = e5.tokenize(encoder, ["who founded the football club that plays in red white ?"], "query")
    assert len(ids[0]) == 10 and ids[0][0] == VOCAB.index("[CLS]") and ids[0][-1] == VOCAB.index("[SEP]")
    np.testing.assert_allclose(
        e5.embed(encoder, ["a b " * 50]), pooled(model, e5.tokenize(encoder, ["a b " * 50], "query")), atol=1e-5
    )
    for bad in (2, 65):
        with pytest.raises(UserError, match=f"max_length {bad}"):
            e5.load(folder, max_length=bad)


# --- prefixes


def test_prefix_is_added_once_in_tokenize(tmp_path):
    tiny_bert(tmp_path / "e5-tiny")
    encoder = e5.load(tmp_path / "e5-tiny", max_length=64)
    assert (encoder.query_prefix, encoder.passage_prefix) == ("query: ", "passage: ")
    plain = e5.load(tmp_path / "e5-tiny", max_length=64, query_prefix="", passage_prefix="")
    for kind in ("query", "passage"):
        assert e5.tokenize(encoder, ["a b"], kind) == e5.tokenize(plain, [f"{kind}: a b"], kind)
        np.testing.assert_array_equal(e5.embed(encoder, ["a b"], kind), e5.embed(plain, [f"{kind}: a b"], kind))
    assert e5.tokenize(plain, ["a b"], "query") == [[VOCAB.index(w) for w in ("[CLS]", "a", "b", "[SEP]")]]
    assert encoder.fingerprint == plain.fingerprint  # prefixes are recorded beside it
    with pytest.raises(ValueError, match="document"):
        e5.embed(encoder, ["a"], "document")
    e5.save(tmp_path / "saved", encoder)  # a name without "e5": the family is remembered
    assert e5.load(tmp_path / "saved", max_length=64).query_prefix == "query: "


# --- adapters


def test_fresh_adapter_changes_no_bit(tiny):
    *_, encoder = tiny
    fresh = lora.init_lora(jax.random.key(0), encoder.params, CONFIG)
    texts = random_texts(40, seed=9)
    np.testing.assert_array_equal(e5.embed(encoder, texts, lora=fresh), e5.embed(encoder, texts))


def test_adapter_equals_peft_both_ways(tiny, adapter, tmp_path):
    folder, _, encoder = tiny
    lora.save_peft(tmp_path, adapter, CONFIG, "bert", str(folder))
    theirs = PeftModel.from_pretrained(AutoModel.from_pretrained(folder), tmp_path).eval()
    texts = random_texts(12, seed=2)
    ids = e5.tokenize(encoder, texts, "query")
    found = e5.embed(encoder, texts, lora=adapter)
    np.testing.assert_allclose(found, pooled(theirs, ids), atol=1e-5)
    assert np.abs(found - e5.embed(encoder, texts)).max() > 1e-2
    np.testing.assert_allclose(
        e5.embed(dataclasses.replace(encoder, params=lora.merge_lora(encoder.params, adapter, CONFIG)), texts), found, atol=1e-5
    )

    settings = LoraConfig(r=2, lora_alpha=6, target_modules=["query", "value"], init_lora_weights=False)
    theirs = get_peft_model(BertModel.from_pretrained(folder), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    tree, config = lora.load_peft(tmp_path / "theirs")
    ours = dataclasses.replace(encoder, module=encoder.module.clone(lora=config))
    np.testing.assert_allclose(e5.embed(ours, texts, lora=tree), pooled(theirs, ids), atol=1e-5)


def test_gradient_of_the_adapter_equals_torch(tiny, adapter, tmp_path):
    folder, _, encoder = tiny
    ids = e5.tokenize(encoder, ["who founded the club ?", "born 1879"], "query")
    tokens, mask = e5.pad(encoder, ids)
    target = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)

    def score(tree):
        return jnp.sum(encoder.module.apply({"params": encoder.params, "lora": tree}, tokens, mask) * target)

    ours = jax.jit(jax.grad(score))(adapter)
    lora.save_peft(tmp_path, adapter, CONFIG, "bert", str(folder))
    theirs = PeftModel.from_pretrained(AutoModel.from_pretrained(folder), tmp_path, is_trainable=True).eval()
    rows = [theirs(input_ids=torch.tensor([line])).last_hidden_state.mean(1)[0] for line in ids]
    (torch.nn.functional.normalize(torch.stack(rows), dim=-1) * torch.tensor(target)).sum().backward()
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for module, tail in (("query", "attention.self.query"), ("attention_output", "attention.output.dense")):
        for layer in range(2):
            for factor, name in (("a", "lora_A"), ("b", "lora_B")):
                wanted = grads[f"base_model.model.encoder.layer.{layer}.{tail}.{name}.default.weight"].numpy().T
                np.testing.assert_allclose(ours["layers"][module][factor][layer], wanted, atol=2e-5)
    assert len(grads) == 2 * 2 * len(CONFIG.targets)


def test_adapter_needs_its_scale_and_its_layers(tiny, adapter):
    folder, _, encoder = tiny
    with pytest.raises(ValueError, match="LoRAConfig"):
        e5.embed(e5.load(folder, max_length=64), ["a"], lora=adapter)
    with pytest.raises(UserError, match="no layer"):
        e5.embed(encoder, ["a"], lora={"layers": {"q_proj": adapter["layers"]["query"]}})
    with pytest.raises(UserError, match="q_proj"):
        lora.init_lora(jax.random.key(0), encoder.params, lora.LoRAConfig(targets=("q_proj",)))


# --- files


def test_save_is_read_by_transformers(tiny, adapter, tmp_path):
    _, model, encoder = tiny
    e5.save(tmp_path, encoder)
    theirs = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    texts = random_texts(5)
    ids = AutoTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]
    assert ids == e5.tokenize(encoder, texts, "query")
    np.testing.assert_array_equal(pooled(theirs, ids), pooled(model, ids))
    again = e5.load(tmp_path, max_length=64)
    assert again.fingerprint == encoder.fingerprint
    jax.tree.map(np.testing.assert_array_equal, again.params, encoder.params)


def test_pretraining_checkpoint_with_prefix_and_heads(tiny, tmp_path):
    """BertForPreTraining: tensors under "bert.", pooler and heads, and (old files) a buffer of positions."""
    _, model, encoder = tiny
    whole = BertForPreTraining(model.config)
    whole.bert.load_state_dict(model.state_dict())
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "bert.pooler.dense.weight" in tensors and any(name.startswith("cls.") for name in tensors)
    save_file({**tensors, "bert.embeddings.position_ids": torch.arange(64)[None]}, tmp_path / "model.safetensors")
    other = e5.load(tmp_path, max_length=64)
    assert other.fingerprint == encoder.fingerprint
    np.testing.assert_array_equal(e5.embed(other, ["who was born ?"]), e5.embed(encoder, ["who was born ?"]))


def test_fingerprint_sees_weights_shape_and_vocabulary(tiny, copy):
    *_, encoder = tiny
    tensors = load_file(copy / "model.safetensors")
    tensors["encoder.layer.1.output.dense.bias"][3] += 1e-6
    save_file(tensors, copy / "model.safetensors")
    changed = {e5.load(copy, max_length=64).fingerprint}
    shutil.copy(tiny[0] / "model.safetensors", copy)
    assert e5.load(copy, max_length=64).fingerprint == encoder.fingerprint
    assert e5.load(copy, max_length=32, dtype=jnp.bfloat16).fingerprint == encoder.fingerprint  # of what is stored
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))
    changed.add(e5.load(copy, max_length=64).fingerprint)
    shutil.copy(tiny[0] / "config.json", copy)
    (copy / "vocab.txt").write_text("\n".join([*VOCAB[:-2], VOCAB[-1], VOCAB[-2]]) + "\n")
    changed.add(e5.load(copy, max_length=64).fingerprint)
    assert len(changed) == 3 and encoder.fingerprint not in changed


@pytest.mark.parametrize(
    "extra, missing", [("encoder.layer.0.new.weight", None), ("cls.predictions.bias", None), (None, "embeddings.LayerNorm.bias")]
)
def test_tensors_must_fit(copy, extra, missing):
    tensors = load_file(copy / "model.safetensors")
    if extra:
        tensors[extra] = torch.zeros(3)
    else:
        del tensors[missing]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=extra or missing):
        e5.load(copy, max_length=64)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"model_type": "qwen2", "hidden_act": "silu"}, "qwen2 decoder whose pooling"),
        ({"model_type": "t5"}, "'t5' is no text encoder"),
        ({"hidden_act": "gelu_new"}, "gelu_new"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": 5}, "no multiple"),
        ({"intermediate_size": 49}, "intermediate"),
    ],
)
def test_another_architecture_is_refused_by_name(copy, change, named):
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(UserError, match=named):
        e5.load(copy, max_length=64)


def test_another_pooling_is_refused(copy):
    (copy / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 32, "pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    with pytest.raises(UserError, match="pooling_mode_max_tokens"):
        e5.load(copy, max_length=64)
    modes = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert e5.load(copy, max_length=64).pooling == "mean"
    (copy / "2_Dense").mkdir()
    with pytest.raises(UserError, match="Dense"):
        e5.load(copy, max_length=64)


def test_on_a_mesh_and_in_bfloat16(tiny, adapter):
    folder, _, encoder = tiny
    texts = random_texts(10)
    on_mesh = e5.load(folder, mesh=make_mesh(devices=jax.devices()[:1]), lora=CONFIG, max_length=64)
    np.testing.assert_allclose(e5.embed(on_mesh, texts, lora=adapter), e5.embed(encoder, texts, lora=adapter), atol=1e-6)
    half = e5.load(folder, dtype=jnp.bfloat16, lora=CONFIG, max_length=64)
    assert half.params["layers"]["query"]["kernel"].dtype == jnp.bfloat16
    assert np.sum(e5.embed(half, texts) * e5.embed(encoder, texts), -1).min() > 0.99


# --- the real one


@pytest.mark.real
def test_real_minilm_equals_torch_and_finds_passages():
    encoder = e5.load("minilm-l6-v2", lora=CONFIG)
    assert encoder.query_prefix == "" and encoder.dim == 384
    texts = [
        '"Albert Einstein"\nAlbert Einstein (14 March 1879 – 18 April 1955) was a German-born theoretical physicist.',
        '"FC Bayern Munich"\nFußball-Club Bayern München e. V. is a German sports club, founded in 1900.',
        '"Tokyo"\n東京 is the capital of Japan. ' + "It has many districts and railway lines. " * 60,
        '"Mount Everest"\nMount Everest is the highest mountain above sea level, in the Himalayas.',
        "",
    ]
    from bridge_jax.models import hub

    model = BertModel.from_pretrained(hub.resolve("minilm-l6-v2")).eval()
    passages = e5.embed(encoder, texts, "passage")
    ids = e5.tokenize(encoder, texts, "passage")
    assert max(map(len, ids)) == 256
    np.testing.assert_allclose(passages, pooled(model, ids), atol=1e-5)
    questions = ["When was the physicist Einstein born?", "which club was founded in 1900", "capital of Japan", "tallest mountain"]
    queries = e5.embed(encoder, questions)
    assert (queries @ passages.T).argmax(-1).tolist() == [0, 1, 2, 3]
    fresh = lora.init_lora(jax.random.key(0), encoder.params, CONFIG)
    np.testing.assert_array_equal(e5.embed(encoder, questions, lora=fresh), queries)
