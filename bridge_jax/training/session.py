"""A run opened for use: the policy and the retriever of one of its checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ml_collections import ConfigDict

from bridge_jax.errors import UserError
from bridge_jax.files import as_path
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.training.assets import Assets, load_assets, trained_folder
from bridge_jax.training.checkpoints import Checkpoints
from bridge_jax.training.inputs import claim_inputs
from bridge_jax.training.methods import stages_of
from bridge_jax.training.state import Learner, fingerprint
from bridge_jax.training.workdir import claim_workdir, written_field

# A rerun may train longer, keep or log more, and use other devices.
MAY_CHANGE = (
    "train.steps", "train.eval_every", "train.checkpoint_every", "train.keep", "train.log_rollouts_every", "train.tensorboard",
    "train.wandb", "train.max_skipped_updates", "train.max_fault_share",
    "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.rollout_tensor",
)  # fmt: skip
# A finished run may also be used on other questions, corpora and machines, and with other limits: an evaluation says which.
# (Within a run they stay: its evaluations are compared.)
USE_MAY_CHANGE = (
    *MAY_CHANGE, "data.eval", "data.eval_split", "data.eval_limit", "policy.attention",
    "index.corpus", "index.folder", "index.kind", "index.limit",
    "rollout.batch_groups", "rollout.chunk", "rollout.prompt", "rollout.shown", "rollout.candidates", "rollout.max_searches",
    "rollout.max_prompt_tokens", "rollout.max_response_tokens", "rollout.max_new_tokens", "rollout.max_observation_tokens",
    "rollout.max_passage_tokens", "rollout.retry_invalid", "rollout.cut_inside",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Session:
    assets: Assets
    policy_variables: dict
    retriever_lora: dict | None
    step: int


def open_session(config: ConfigDict, workdir: Path, which: str = "best") -> Session:
    """Load a run.

    Args:
      which: "best" (by the run's own evaluations), "latest", or "start" (before the first step; needs no checkpoint).

    Raises:
      UserError: no checkpoint there, or one of another configuration.
    """
    learner, state = open_state(config, workdir, which)
    return Session(learner.assets, learner.policy_variables(state), learner.retriever_lora(state), int(state.step))


def open_state(config: ConfigDict, workdir: Path, which: str = "best") -> tuple[Learner, BridgeState]:
    """The same with everything a step reads, optimisers included."""
    workdir = as_path(workdir)
    folder = workdir / "checkpoints"
    claim_workdir(config, workdir, may_change=USE_MAY_CHANGE, write=False)
    if which != "start" and not folder.is_dir():
        raise UserError(f"{workdir} holds no checkpoint: train first (python -m bridge_jax.train), or use --checkpoint=start")
    step, checkpoints = 0, None
    if which != "start":
        checkpoints = Checkpoints(folder, config.train.keep, {}, read_only=True)
        step = checkpoints.best() if which == "best" else checkpoints.latest()
        if step is None:
            raise UserError(f"{folder} holds no finished checkpoint: train first, or use --checkpoint=start")
    assets = load_assets(config, workdir, trained=trained_folder(config, workdir, step))
    learner = Learner(config, assets)
    state = learner.init()
    if checkpoints is not None:
        checkpoints.fingerprint = fingerprint(config, assets)
        state = checkpoints.restore(step, state)
        checkpoints.close()
    return learner, state


def claim(config: ConfigDict, workdir: Path, write: bool = True) -> None:
    """A training run has one configuration (see MAY_CHANGE) and one content of what it reads.

    A run in stages cannot be lengthened: the next one has begun.
    """
    staged = len(stages_of(config)) > 1
    may_change = [name for name in MAY_CHANGE if not (staged and name == "train.steps")]
    if all(str(judge).startswith("http") for judge in (config.agentic.judge, written_field(workdir, "agentic.judge", ""))):
        may_change.append("agentic.judge")  # the same model at another address
    claim_workdir(config, workdir, may_change=may_change, write=write)
    claim_inputs(config, workdir, "inputs.json", write)
