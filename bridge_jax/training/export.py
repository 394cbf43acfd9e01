"""What a finished run leaves for others: the policy as a Hugging Face folder, and its retriever."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from bridge_jax.files import writing, written_locally
from bridge_jax.models import e5, pocket_models, qwen2
from bridge_jax.models.lora import merge_lora, save_peft
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.training.assets import Assets, policy_lora, policy_source, retriever_lora
from bridge_jax.training.methods import method_of


def export(workdir: Path, config: ConfigDict, assets: Assets, state: BridgeState) -> None:
    """The trained policy as a Hugging Face folder (a LoRA merged into it); the retriever's LoRA in PEFT's format, or the whole
    encoder where the method trained that.

    With several processes all must call it; the main one writes.
    """
    if config.policy.trainable == "lora":
        adapter = policy_lora(config)
        with written_locally(workdir / "policy_lora") as folder:
            save_peft(folder, state.policy, adapter, "qwen2", policy_source(config, workdir))
        params = merge_lora(assets.base_params, state.policy, adapter)
    else:
        params = state.policy
    with writing(workdir / "policy"), written_locally(workdir / "policy") as folder:
        qwen2.save(folder, assets.policy, params, assets.tokenizer)
    with writing(workdir / "retriever"), written_locally(workdir / "retriever") as folder:
        if method_of(config).trains_encoder:
            e5.save(folder, assets.tower)
            return
        shape = assets.encoder.module.config
        adapter, base = retriever_lora(config, shape), pocket_models.upstream(config.retriever.encoder)
        save_peft(folder, state.retriever, adapter, e5.architecture(shape), base)
