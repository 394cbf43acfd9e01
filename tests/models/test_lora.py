"""Adapters against PEFT: forward, gradients, files both ways; and that the base stays the base."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from bridge_jax.errors import UserError
from bridge_jax.models import hub, lora, qwen2
from bridge_jax.models.lora import LoRAConfig

CONFIG = LoRAConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "*_proj"))
TOKENS = np.random.default_rng(0).integers(1, 97, (2, 10))


@functools.partial(jax.jit, static_argnames="model")
def run(model, variables, tokens):
    return model.apply(variables, tokens)


@pytest.fixture(scope="module")
def ours(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("base")
    tiny_model("untied").save_pretrained(folder)
    return qwen2.load(folder, lora=CONFIG)


@pytest.fixture(scope="module")
def adapter(ours):
    """A non-trivial adapter: `b` is not zero."""
    tree = lora.init_lora(jax.random.key(0), ours[1], CONFIG)
    keys = iter(jax.random.split(jax.random.key(1), 99))
    return jax.tree_util.tree_map_with_path(
        lambda p, x: x + 0.1 * jax.random.normal(next(keys), x.shape) if p[-1].key == "b" else x, tree
    )


@pytest.fixture(scope="module")
def torch_adapted(adapter, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    lora.save_peft(folder, adapter, CONFIG, "qwen2", "some/base")
    return folder, peft.PeftModel.from_pretrained(tiny_model("untied"), folder, is_trainable=True).eval()


def test_base_is_exactly_the_base(ours, adapter):
    model, params = ours
    plain = run(model.clone(lora=None), {"params": params}, TOKENS)
    np.testing.assert_array_equal(run(model, {"params": params}, TOKENS), plain)
    fresh = lora.init_lora(jax.random.key(0), params, CONFIG)
    np.testing.assert_array_equal(run(model, {"params": params, "lora": fresh}, TOKENS), plain)
    assert np.abs(run(model, {"params": params, "lora": adapter}, TOKENS) - plain).max() > 0.1


def test_forward_and_gradient_are_pefts(ours, adapter, torch_adapted):
    model, params = ours
    _, torch_model = torch_adapted
    output = torch_model(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(run(model, {"params": params, "lora": adapter}, TOKENS), output.detach().numpy(), atol=5e-5)

    probe = np.random.default_rng(1).normal(size=output.shape).astype(np.float32) / 97
    (torch.log_softmax(output, -1) * torch.tensor(probe)).sum().backward()
    expected = {n: p.grad.numpy() for n, p in torch_model.named_parameters() if p.grad is not None}

    def loss(tree):
        return (jax.nn.log_softmax(model.apply({"params": params, "lora": tree}, TOKENS)) * probe).sum()

    grads = jax.jit(jax.grad(loss))(adapter)
    compared = 0
    for name, module in grads["layers"].items():
        for layer in range(2):
            for ours_, theirs in (("a", "A"), ("b", "B")):
                stem = hub.MODULES["qwen2"][("layers", name)].format(layer)
                want = expected[f"base_model.model.{stem}.lora_{theirs}.default.weight"].T
                np.testing.assert_allclose(module[ours_][layer], want, atol=2e-4 * max(1, np.abs(want).max()), err_msg=stem)
                compared += 1
    assert compared == len(expected) == 7 * 2 * 2


def test_peft_reads_every_factor(adapter, torch_adapted):
    folder, torch_model = torch_adapted
    state = peft.get_peft_model_state_dict(torch_model)
    assert set(state) == set(hub.open_file(folder / "adapter_model.safetensors"))
    np.testing.assert_array_equal(
        state["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].numpy().T, adapter["layers"]["down_proj"]["a"][1]
    )


def test_our_adapter_comes_back(adapter, torch_adapted):
    tree, config = lora.load_peft(torch_adapted[0])
    jax.tree.map(np.testing.assert_array_equal, tree, adapter)
    assert (config.rank, config.alpha) == (3, 6.0)
    assert set(config.targets) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapter_made_by_peft_is_read(ours, tiny_model, tmp_path):
    settings = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch_model = peft.get_peft_model(tiny_model("untied"), settings).eval()
    torch_model.save_pretrained(tmp_path)
    tree, config = lora.load_peft(tmp_path)
    assert config == LoRAConfig(4, 12.0, ("q_proj", "up_proj"))
    with torch.no_grad():
        want = torch_model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(run(ours[0].clone(lora=config), {"params": ours[1], "lora": tree}, TOKENS), want, atol=1e-4)


def test_encoder_names_are_pefts(tmp_path):
    """An adapter over BERT's attention goes through PEFT's own loader onto a torch encoder."""
    from transformers import BertConfig, BertModel

    bert = BertModel(BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24))
    names = ("query", "key", "value", "attention_output", "intermediate", "output")
    shapes = {"intermediate": (2, 16, 24), "output": (2, 24, 16)}
    params = {"layers": {n: {"kernel": jnp.zeros(shapes.get(n, (2, 16, 16)))} for n in names}}
    config = LoRAConfig(2, 4.0, lora.E5_TARGETS)
    tree = lora.init_lora(jax.random.key(0), params, config)
    assert set(tree["layers"]) == {"query", "key", "value", "attention_output"}
    lora.save_peft(tmp_path, tree, config, "bert", "base")
    state = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(bert, tmp_path))
    written = hub.open_file(tmp_path / "adapter_model.safetensors")
    assert set(state) == set(written)
    for name, tensor in written.items():
        np.testing.assert_array_equal(state[name].numpy(), tensor.array())
    back, _ = lora.load_peft(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_merged_parameters_are_the_adapted_model(ours, adapter):
    model, params = ours
    merged = lora.merge_lora(params, adapter, CONFIG)
    want = run(model, {"params": params, "lora": adapter}, TOKENS)
    np.testing.assert_allclose(run(model, {"params": merged}, TOKENS), want, atol=5e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(params)


def test_initial_factors_are_pefts_distribution(ours):
    big = LoRAConfig(rank=64, targets=("q_proj", "down_proj"))
    tree = lora.init_lora(jax.random.key(3), ours[1], big)["layers"]
    assert set(tree) == {"q_proj", "down_proj"} and tree["down_proj"]["a"].shape == (2, 48, 64)
    for name, fan_in in (("q_proj", 32), ("down_proj", 48)):
        a, b = np.asarray(tree[name]["a"]), np.asarray(tree[name]["b"])
        assert 0.95 * fan_in**-0.5 < np.abs(a).max() <= fan_in**-0.5 and not b.any()
        np.testing.assert_allclose(a.std(), (3 * fan_in) ** -0.5, rtol=0.05)
    assert np.abs(tree["q_proj"]["a"][0] - tree["q_proj"]["a"][1]).max() > 0


def test_an_adapter_bound_to_nothing_is_refused(ours, adapter):
    model, params = ours
    with pytest.raises(UserError, match="'qproj' matches no layer"):
        lora.init_lora(jax.random.key(0), params, LoRAConfig(targets=("q_proj", "qproj")))
    with pytest.raises(UserError, match="rank 0"):
        lora.init_lora(jax.random.key(0), params, LoRAConfig(rank=0))
    with pytest.raises(ValueError, match="lora="):
        model.clone(lora=None).apply({"params": params, "lora": adapter}, TOKENS)
    stranger = {"layers": {"query": adapter["layers"]["q_proj"]}}
    small = {"layers": {"q_proj": {n: x[..., :1, :] for n, x in adapter["layers"]["q_proj"].items()}}}
    for tree, named in ((stranger, "layers/query"), (small, "do not fit"), ({}, "empty")):
        with pytest.raises(UserError, match=named):
            model.apply({"params": params, "lora": tree}, TOKENS)


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("use_rslora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("peft_type", "IA3")],
)
def test_other_peft_settings_are_refused(torch_adapted, tmp_path, key, value):
    settings = json.loads((torch_adapted[0] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
    with pytest.raises(UserError, match=key):
        lora.load_peft(tmp_path)


def test_incomplete_adapters_are_refused(torch_adapted, tmp_path):
    (tmp_path / "adapter_config.json").write_text((torch_adapted[0] / "adapter_config.json").read_text())
    path = tmp_path / "adapter_model.safetensors"
    with pytest.raises(UserError, match="is missing"):
        lora.load_peft(tmp_path)
    tensors = {n: t.array() for n, t in hub.open_file(torch_adapted[0] / "adapter_model.safetensors").items()}
    lost = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    hub.write_tensors(path, {n: t for n, t in tensors.items() if n != lost})
    with pytest.raises(UserError, match=lost):
        lora.load_peft(tmp_path)
    hub.write_tensors(path, tensors | {"base_model.model.model.conv.lora_A.weight": tensors[lost]})
    with pytest.raises(UserError, match="conv"):
        lora.load_peft(tmp_path)
