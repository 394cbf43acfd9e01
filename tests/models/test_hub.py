"""Streaming checkpoints: sharded files, mixed dtypes, both kinds of strictness, damaged files, and finding folders."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file

from bridge_jax.errors import UserError
from bridge_jax.models import hub, qwen2


@pytest.fixture
def folder(tmp_path, tiny_model):
    tiny_model("tied").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    """Rewrite model.safetensors with another library, after `change(tensors)`."""
    tensors = {n: torch.tensor(t.array()) for n, t in hub.open_tensors(folder).items()}
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")


def test_sharded_files(folder, tmp_path_factory, tiny_model):
    sharded = tmp_path_factory.mktemp("sharded")
    tiny_model("tied").save_pretrained(sharded, max_shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    jax.tree.map(np.testing.assert_array_equal, qwen2.load(sharded)[1], qwen2.load(folder)[1])

    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    shutil.move(sharded / shard, sharded / "away")
    with pytest.raises(UserError, match=shard):
        qwen2.load(sharded)
    other = next(s for s in sorted(set(index["weight_map"].values())) if s != shard)
    shutil.copy(sharded / other, sharded / shard)
    with pytest.raises(UserError, match=f"{shard}: tensor .* is missing"):
        qwen2.load(sharded)


def test_every_tensor_has_its_own_dtype(folder):
    names = {
        "model.norm.weight": torch.float16,
        "model.layers.0.mlp.up_proj.weight": torch.bfloat16,
        "model.embed_tokens.weight": torch.float64,
    }
    before = {n: torch.tensor(t.array()) for n, t in hub.open_tensors(folder).items()}
    rewrite(folder, lambda tensors: tensors.update({n: tensors[n].to(d) for n, d in names.items()}))
    _, params = qwen2.load(folder)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(params["norm"]["scale"], before["model.norm.weight"].half().float())
    up = before["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(params["layers"]["up_proj"]["kernel"][0], up.bfloat16().float().T)
    np.testing.assert_array_equal(params["embed"]["embedding"], before["model.embed_tokens.weight"])
    assert {x.dtype for x in jax.tree.leaves(qwen2.load(folder, jnp.bfloat16)[1])} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"model\.layers\.1\.self_attn\.k_proj\.bias missing"),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.ones(1)}), r"model\.layers\.0\.extra\.weight has no place"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)}),
            r"model\.layers\.2\.mlp\.up_proj\.weight has no place",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(32, 48)}),
            r"up_proj\.weight has shape \(32, 48\).*\(48, 32\)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), r"model\.norm\.weight is int8"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
            r"model\.norm\.weight has dtype F8_E4M3",
        ),
    ],
)
def test_strict_both_ways(folder, change, named):
    rewrite(folder, change)
    with pytest.raises(UserError, match=named) as caught:
        qwen2.load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_known_harmless_extra(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    qwen2.load(folder)


@pytest.mark.parametrize("size", [0, 5, 100, -4])
def test_damaged_files(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match="damaged"):
        qwen2.load(folder)
    path.write_bytes(b"<html>not found</html>" * 10)
    with pytest.raises(UserError, match="damaged"):
        qwen2.load(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        qwen2.load(folder)


def test_written_files_are_read_by_the_reference_library(tmp_path):
    r = np.random.default_rng(0)
    tensors = {
        "b": r.normal(size=(3, 5)).astype(np.float32),
        "a": r.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "i": np.arange(4),
    }
    tensors["t"] = tensors["b"].T  # not contiguous
    hub.write_tensors(tmp_path / "new" / "x.safetensors", tensors)
    back = safetensors.numpy.load_file(tmp_path / "new" / "x.safetensors")
    mine = hub.open_file(tmp_path / "new" / "x.safetensors")
    assert set(back) == set(tensors) == set(mine)
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype == mine[name].array().dtype
        np.testing.assert_array_equal(back[name], value)
        np.testing.assert_array_equal(mine[name].array(), value)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.safetensors"]


def test_a_failed_write_leaves_the_previous_file(tmp_path):
    path = tmp_path / "x.safetensors"
    hub.write_tensors(path, {"a": np.ones(3, np.float32)})

    class Broken(Exception):
        pass

    def values():
        raise Broken
        yield

    with pytest.raises(Broken):
        hub._write_safetensors(path, {"a": (np.dtype(np.float32), (3,))}, values())
    np.testing.assert_array_equal(hub.open_file(path)["a"].array(), np.ones(3))


def test_resolve(folder, tmp_path_factory, monkeypatch):
    from bridge_jax.models import pocket_models

    assert hub.resolve(folder) == folder == hub.resolve(str(folder))
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UserError, match=r"no config\.json"):
        hub.resolve(empty)
    for missing in (empty / "nowhere", "./nowhere", "nowhere", "runs/a/b"):
        with pytest.raises(UserError, match="does not exist"):
            hub.resolve(missing)
    monkeypatch.setattr(pocket_models, "is_known", lambda name: name == "known")
    monkeypatch.setattr(pocket_models, "fetch", lambda name: folder)
    assert hub.resolve("known") == folder


def test_resolve_offline(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_, **__):
        raise LocalEntryNotFoundError("several\nlines")

    def refused(*_, **__):
        raise ValueError("gated\nrepo")

    for fail, named in ((offline, "hub cannot be reached"), (refused, "cannot be fetched .*gated")):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UserError, match=named) as caught:
            hub.resolve("owner/name")
        assert "owner/name" in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name))
    assert hub.resolve("owner/name") == tmp_path / "owner" / "name"


def test_broken_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        qwen2.load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="JSON object"):
        qwen2.load(folder)


def test_tokenizer_missing(folder):
    with pytest.raises(UserError, match="has no tokenizer"):
        qwen2.load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="no usable tokenizer"):
        qwen2.load_tokenizer(folder)
