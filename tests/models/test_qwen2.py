"""The decoder on tiny random checkpoints, against transformers; its caches, gradients and files."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rounding import SPREAD
from transformers import AutoModelForCausalLM

from bridge_jax.errors import UserError
from bridge_jax.models import hub, qwen2
from bridge_jax.models.cache import KVBlock

TOKENS = np.random.default_rng(0).integers(1, 97, (4, 24))  # 0 is torch's padding: its embedding gets no gradient there


def reference(model, tokens, **kwargs):
    with torch.no_grad():
        return model(torch.tensor(tokens), **{k: torch.tensor(v) for k, v in kwargs.items()}).logits.numpy()


@pytest.fixture(scope="session")
def ours(tiny):
    return qwen2.load(tiny[1])


@pytest.fixture(scope="session")
def one(tmp_path_factory, tiny_model):
    """One checkpoint, for what does not depend on its kind."""
    folder = tmp_path_factory.mktemp("one")
    tiny_model("untied").save_pretrained(folder)
    return qwen2.load(folder)


@functools.partial(jax.jit, static_argnames=("model", "output"))
def run(model, params, tokens, **kwargs):
    return model.apply({"params": params}, tokens, **kwargs)


def test_logits(tiny, ours):
    model, params = ours
    out = run(model, params, TOKENS)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, reference(tiny[2], TOKENS), atol=5e-5)


@pytest.mark.parametrize("kind", ["qwen3_tied", "llama3_tied"])
def test_tied_embeddings_are_of_any_family(kind, tiny_model, tmp_path):
    """Small Qwen3 and Llama 3.2 models; saved again without a head."""
    torch_model = tiny_model(kind)
    torch_model.save_pretrained(tmp_path / "theirs")
    model, params = qwen2.load(tmp_path / "theirs")
    assert model.config.tie_embeddings and "lm_head" not in params
    np.testing.assert_allclose(run(model, params, TOKENS), reference(torch_model, TOKENS), atol=5e-5)
    qwen2.save(tmp_path / "ours", model, params)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_allclose(reference(again, TOKENS), reference(torch_model, TOKENS), atol=1e-5 * SPREAD)


def test_every_parameter_gradient(tiny, ours):
    """Against torch's, so that a parameter that is read but misplaced shows."""
    (kind, _, torch_model), (model, params) = tiny, ours
    probe = np.random.default_rng(1).normal(size=(4, 24, 97)).astype(np.float32) / 97
    grads = jax.jit(jax.grad(lambda p: (jax.nn.log_softmax(model.apply({"params": p}, TOKENS)) * probe).sum()))(params)
    torch_model.zero_grad()
    (torch.log_softmax(torch_model(torch.tensor(TOKENS)).logits, -1) * torch.tensor(probe)).sum().backward()
    expected = {n: p.grad.numpy() for n, p in torch_model.named_parameters()}
    slots = qwen2.slots(model.config)
    assert set(slots) == set(expected), kind
    for name, slot in slots.items():
        node = grads
        for part in slot.path:
            node = node[part]
        got = node if slot.layer is None else node[slot.layer]
        want = expected[name].T if slot.transpose else expected[name]
        np.testing.assert_allclose(got, want, atol=2e-4 * max(1, np.abs(want).max()), err_msg=name)


def test_left_and_right_padding(tiny, ours):
    model, params = ours
    left = np.ones((4, 24), bool)
    left[0, :7] = left[2, :1] = False
    right = left[:, ::-1]
    want = reference(tiny[2], TOKENS, attention_mask=left.astype(int), position_ids=np.maximum(left.cumsum(1) - 1, 0))
    np.testing.assert_allclose(np.where(left[..., None], run(model, params, TOKENS, valid=left) - want, 0), 0, atol=5e-5)
    alone = run(model, params, TOKENS)
    padded = np.where(right, TOKENS, 999_999)  # also an id beyond the table
    out = run(model, params, padded, valid=right)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(np.where(right[..., None], out - alone, 0), 0, atol=2e-5)


def test_packed_segments(tiny, ours):
    model, params = ours
    segments = np.repeat([[1, 2, 0, 3]], 4, 0).repeat([5, 9, 2, 8], 1)
    out = run(model, params, TOKENS, segment_ids=segments)
    for start, stop in ((0, 5), (5, 14), (16, 24)):
        want = reference(tiny[2], TOKENS[:, start:stop])
        np.testing.assert_allclose(out[:, start:stop], want, atol=5e-5)


def test_hidden_and_unembed_are_the_logits(ours):
    model, params = ours
    hidden = run(model, params, TOKENS, output="hidden")
    assert hidden.shape == (4, 24, 32)
    np.testing.assert_array_equal(qwen2.unembed(params, hidden, model.config), run(model, params, TOKENS))


def test_two_block_cache_is_the_full_forward(one):
    """Two ragged prompts shared by two rows each; then a chunk with holes, then token by token, with one compilation a shape."""
    model, params = one
    apply = functools.partial(run, model, params)
    before = run._cache_size()
    prompt_valid = np.arange(8) < np.array([[8], [5]])
    _, shared = apply(TOKENS[::2, :8], private=KVBlock.empty(model.config, 2, 8), write_at=0, valid=prompt_valid)
    private, written, outputs = KVBlock.empty(model.config, 4, 16), np.ones((4, 12), bool), []
    written[1, 2:5] = written[3, 3] = written[3, 8:] = False
    new = TOKENS[:, 8:20]
    for start, stop in ((0, 6), *((i, i + 1) for i in range(6, 12))):
        out, private = apply(
            new[:, start:stop], private=private, shared=shared, write_at=jnp.int32(start), valid=written[:, start:stop]
        )
        outputs.append(out)
    assert run._cache_size() == before + 3
    np.testing.assert_array_equal(private.valid, np.pad(written, ((0, 0), (0, 4))))
    outputs = np.concatenate(outputs, 1)
    assert np.isfinite(outputs).all()
    for row in range(4):
        prompt = TOKENS[row // 2 * 2, :8][prompt_valid[row // 2]]
        full = run(model, params, np.concatenate([prompt, new[row][written[row]]])[None])
        np.testing.assert_allclose(outputs[row][written[row]], full[0, len(prompt) :], atol=1e-5 * np.abs(full).max())
    # The shared block alone, nothing kept: how documents are scored.
    scored = apply(new, shared=shared, valid=written)
    kept = apply(TOKENS[::2, :8], valid=prompt_valid, output="block")
    np.testing.assert_array_equal(kept.valid, shared.valid)
    np.testing.assert_allclose(apply(new, shared=kept, valid=written), scored, atol=1e-5)
    np.testing.assert_allclose(np.where(written[..., None], scored - outputs, 0), 0, atol=1e-5 * np.abs(outputs).max())


def test_explicit_positions_are_used(one):
    model, params = one
    stretched = 3 * np.arange(24)[None].repeat(4, 0)
    full = run(model, params, TOKENS, positions=stretched)
    cached, _ = run(model, params, TOKENS, positions=stretched, private=KVBlock.empty(model.config, 4, 24), write_at=0)
    np.testing.assert_allclose(full, cached, atol=2e-5)
    assert np.abs(full - run(model, params, TOKENS)).max() > 0.01


def test_cache_is_updated_in_place(one):
    """A decode step with a donated cache needs less temporary memory than one copy of the cache."""
    model, params = one
    cache = jax.eval_shape(lambda: KVBlock.empty(model.config, 8, 8192))

    def step(params, tokens, cache, at):
        return model.apply({"params": params}, tokens, private=cache, write_at=at)

    args = params, jax.ShapeDtypeStruct((8, 1), jnp.int32), cache, jax.ShapeDtypeStruct((), jnp.int32)
    memory = jax.jit(step, donate_argnums=2).lower(*args).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 1.5 * size, (memory.temp_size_in_bytes, size)


def test_greedy_continuation(tiny, ours):
    (_, _, torch_model), (model, params) = tiny, ours
    with torch.no_grad():
        want = torch_model.generate(torch.tensor(TOKENS[:, :8]), max_new_tokens=16, do_sample=False, eos_token_id=None)[
            :, 8:
        ].numpy()
    out, cache = run(model, params, TOKENS[:, :8], private=KVBlock.empty(model.config, 4, 24), write_at=0)
    got = [out[:, -1].argmax(-1)]
    for at in range(8, 23):
        out, cache = run(model, params, got[-1][:, None], private=cache, write_at=jnp.int32(at))
        got.append(out[:, -1].argmax(-1))
    np.testing.assert_array_equal(np.stack(got, 1), want)


def test_remat_and_bfloat16(one):
    model, params = one
    loss = lambda m: lambda p: jax.nn.log_softmax(m.apply({"params": p}, TOKENS))[..., 0].mean()  # noqa: E731
    want, got = (jax.jit(jax.grad(loss(m)))(params) for m in (model, model.clone(remat=True)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), want, got)
    programs = [str(jax.make_jaxpr(jax.grad(loss(m)))(params)) for m in (model.clone(remat=True), model)]
    assert ["remat" in p or "checkpoint" in p for p in programs] == [True, False]
    low = model.clone(dtype=jnp.bfloat16)
    assert run(low, params, TOKENS, output="hidden").dtype == jnp.bfloat16
    out, exact = run(low, params, TOKENS), run(model, params, TOKENS)
    assert out.dtype == jnp.float32
    assert 1e-4 < np.abs(out - exact).max() / np.abs(exact).max() < 0.06


def test_saved_folder_is_read_by_transformers(tiny, ours, tmp_path):
    (kind, folder, torch_model), (model, params) = tiny, ours
    qwen2.save(tmp_path, model, params)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(again) is type(torch_model) and again.dtype == torch.float32
    np.testing.assert_array_equal(reference(again, TOKENS), reference(torch_model, TOKENS))
    assert again.generation_config.eos_token_id == 2
    reloaded, params_again = qwen2.load(tmp_path)
    assert reloaded.config == model.config == qwen2.config_from_folder(folder)
    jax.tree.map(np.testing.assert_array_equal, params, params_again)
    assert ("lm_head.weight" in hub.open_tensors(tmp_path)) == (kind != "tied")


def test_bfloat16_round_trip(one, tmp_path):
    model, params = one
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    qwen2.save(tmp_path, model, low)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    jax.tree.map(np.testing.assert_array_equal, qwen2.load(tmp_path, jnp.bfloat16)[1], low)


def test_tied_checkpoint_with_a_stored_head(tmp_path, tiny_model):
    tiny_model("tied").save_pretrained(tmp_path)
    model, params = qwen2.load(tmp_path)
    slots = qwen2.slots(model.config)
    with_head = {**params, "lm_head": {"kernel": params["embed"]["embedding"].T}}
    qwen2.save(tmp_path, model, params)
    hub.write_params(tmp_path / "model.safetensors", slots | {"lm_head.weight": hub.Slot(("lm_head", "kernel"), True)}, with_head)
    jax.tree.map(np.testing.assert_array_equal, qwen2.load(tmp_path)[1], params)
    with_head["lm_head"]["kernel"] = with_head["lm_head"]["kernel"] + 1
    hub.write_params(tmp_path / "model.safetensors", slots | {"lm_head.weight": hub.Slot(("lm_head", "kernel"), True)}, with_head)
    with pytest.raises(UserError, match=r"lm_head\.weight is not the embedding"):
        qwen2.load(tmp_path)


QWEN_05B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "hidden_act": "silu",
    "eos_token_id": 151645,
}


def test_config_of_both_transformers_generations():
    config = qwen2.Qwen2Config.from_hf(QWEN_05B)
    assert (config.rope_theta, config.head_dim, config.qkv_bias, config.eos_token_ids) == (1e6, 64, True, (151645,))
    new = {k: v for k, v in QWEN_05B.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}
    }
    assert qwen2.Qwen2Config.from_hf(new) == config == qwen2.Qwen2Config.from_hf(config.to_hf())
    with_list = dataclasses.replace(config, eos_token_ids=(5, 3))
    assert qwen2.Qwen2Config.from_hf(with_list.to_hf()) == with_list
    assert sum(np.prod(x.shape) for x in jax.tree.leaves(qwen2.abstract_params(config))) == 494_032_768


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "bert"}, "model_type 'bert'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling = yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "low_freq_factor is missing"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_unsupported_configs_are_named(change, named, tmp_path):
    changed = {k: v for k, v in (QWEN_05B | change).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match=named) as caught:
        qwen2.load(tmp_path)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_end_of_text_ids(tmp_path):
    class Tokenizer:
        eos_token_id = 7

    assert qwen2.eos_ids(tmp_path, Tokenizer) == (7,)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_05B | {"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert qwen2.eos_ids(tmp_path, Tokenizer) == (3, 7, 9)
    assert qwen2.config_from_folder(tmp_path).eos_token_ids == (3, 9)
    Tokenizer.eos_token_id = None
    with pytest.raises(UserError, match="end-of-text"):
        qwen2.eos_ids(tmp_path / "empty", Tokenizer)


def test_misuse_is_refused(one):
    model, params = one
    cache = KVBlock.empty(model.config, 4, 24)
    for bad in ({"private": cache}, {"private": cache, "write_at": 0, "segment_ids": np.ones((4, 24), int)}, {"output": "probs"}):
        with pytest.raises(ValueError):
            model.apply({"params": params}, TOKENS, **bad)
