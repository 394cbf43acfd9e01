"""Tiny random Hugging Face models, saved as folders, as references."""

import pytest

KINDS = ("tied", "untied", "llama", "llama3", "qwen3")
# Wavelengths of 6 to 15,000 tokens at theta = 5000: kept, interpolated and divided ones.
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def tiny_hf(kind: str, seed: int = 0):
    """A random float32 torch model: 2 layers, D 32, 4 query heads over 2 key/value heads; `tied` and `untied` have qkv biases.

    Behind any other kind "_tied" ties the embeddings, too.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    torch.manual_seed(seed)
    tied = kind == "tied" or kind.endswith("_tied")
    kind = kind.removesuffix("_tied")
    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "llama":
        config = LlamaConfig(**shape, head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    elif kind == "llama3":
        config = LlamaConfig(**shape, head_dim=12, rope_parameters={"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3})
    elif kind == "qwen3":
        config = Qwen3Config(**shape, head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    else:
        config = Qwen2Config(**shape, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # zeros and ones would hide a missing term
                p.add_(0.2 * torch.randn_like(p))
    return model


@pytest.fixture(scope="session", params=KINDS)
def tiny(request, tmp_path_factory):
    """(kind, folder, torch model)."""
    model = tiny_hf(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, folder, model


@pytest.fixture(scope="session")
def tiny_model():
    """`tiny_hf`, for tests that make their own."""
    return tiny_hf
