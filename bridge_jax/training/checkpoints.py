"""Orbax checkpoints of a run: the latest ones for resuming, the best one by evaluation.

Items are separate, so that a tool can read one without the others: `policy`, `retriever`, `optimiser`, `critic` (with PPO), `star`
(the second retriever of `two_state`), `position` (what the run needs besides arrays: the step, and the arrays' checksums) and
`metadata` (the fingerprint that a restore compares first). Frozen weights are never saved.
"""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, absolute, writing
from bridge_jax.mesh import put
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.training.checksums import checksums

# Seconds that a save may take: Orbax asks the machine's clock, which jumps when it is set, or when the machine was asleep.
# Directories are made before a save returns: it would wait for them by that clock, and with a limit that cannot be set.
PATIENCE = ocp.options.AsyncOptions(timeout_secs=10 * 365 * 86_400, create_directories_asynchronously=False)


def _score(metrics: dict) -> float:
    return metrics["score"]


def _first_line(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return str(error).split("\n")[0][:200]


def _items(state: BridgeState) -> dict[str, dict]:
    """Item name -> its arrays."""
    optimisers = {"policy": state.policy_opt, "retriever": state.retriever_opt}
    items = {"policy": state.policy, "retriever": state.retriever, "optimiser": optimisers}
    if state.critic is not None:
        items["critic"] = state.critic
        optimisers["critic"] = state.critic_opt
    if state.star is not None:
        items["star"] = state.star
        optimisers["star"] = state.star_opt
    return items


def newest(folder: AnyPath) -> int:
    """The step of the newest whole checkpoint; 0 without one."""
    if not folder.is_dir():
        return 0
    checkpoints = Checkpoints(folder, 1, {}, read_only=True)
    step = checkpoints.latest() or 0
    checkpoints.close()
    return step


class Checkpoints:
    """The `checkpoints/` folder of a run.

    Args:
      folder: where the steps lie, one folder each.
      keep: how many of the latest to keep; the best by `score` is kept besides.
      fingerprint: {"what": value} that a restored checkpoint must share (model shapes, LoRA ranks, method).
    """

    def __init__(self, folder: AnyPath, keep: int, fingerprint: dict[str, object], read_only: bool = False):
        self.folder = absolute(folder)
        self.fingerprint = fingerprint
        best = managers.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(n=keep), best]),
            best_fn=_score,  # without it, scores are not written
            async_options=PATIENCE,
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step with the highest evaluation score, else the latest; a tie goes to the earlier step."""
        scored = [(info["score"], -step) for step, info in self._scores().items()]
        return -max(scored)[1] if scored else self.latest()

    def _scores(self) -> dict[int, dict]:
        found = {step: self._manager.metrics(step) for step in self._manager.all_steps()}
        return {step: metrics for step, metrics in found.items() if metrics}

    def save(self, step: int, state: BridgeState, score: float | None = None) -> None:
        """Write the state after `step`; the previous ones stay until it is whole. `score`: evaluation result, higher is better.

        Returns when the state is copied to the host (and the save before is whole): the files are written meanwhile. With several
        processes all must call it; each writes its own parts.

        Raises:
          UserError: the disk is full (found now, or while the save before was written); the older checkpoints stay.
        """
        items = _items(state)
        with writing(self.folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardSave(tree) for name, tree in items.items()},
                    position=ocp.args.JsonSave({"step": step, "checksums": checksums(items)}),
                    metadata=ocp.args.JsonSave(self.fingerprint),
                ),
                metrics=None if score is None else {"score": float(score)},
            )

    def restore(self, step: int, like: BridgeState) -> BridgeState:
        """The saved state in the shapes, dtypes and shardings of `like` (arrays or abstract), on whatever mesh they name.

        Raises:
          UserError: the checkpoint is of another configuration (the difference is named) or cannot be read.
        """
        where = self.folder / str(step)
        try:
            saved = self._manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore()))["metadata"]
        except Exception as error:  # Orbax raises many kinds, from threads too
            raise UserError(
                f"checkpoint {where} cannot be read ({_first_line(error)}): if it is damaged, move it away to use the one before"
            ) from error
        for name, value in self.fingerprint.items():
            if saved.get(name) != value:
                raise UserError(f"checkpoint {where} has {name}={saved.get(name)!r}, this run {value!r}: use another --workdir")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            items = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardRestore(tree) for name, tree in _items(abstract).items()},
                    position=ocp.args.JsonRestore(),
                ),
            )
        except Exception as error:  # Orbax raises many kinds, from threads too
            raise UserError(
                f"checkpoint {where} cannot be read ({_first_line(error)}): if it is damaged, move it away to use the one before"
            ) from error
        position = items["position"]
        if position.get("step") != step:
            raise UserError(
                f"checkpoint {where} is damaged: it says step {position.get('step')}: move it away to use the one before"
            )
        expected = position.get("checksums", {})  # none in checkpoints of older versions
        found = checksums({name: items[name] for name in _items(abstract)})
        damaged = [name for name, value in expected.items() if found.get(name) != value]
        if damaged:
            raise UserError(
                f"checkpoint {where} is damaged: {damaged[0]} is not what was saved (and {len(damaged) - 1} other arrays): move it "
                "away to use the one before"
            )
        return like.replace(
            step=put(np.asarray(step, np.int32), like.step.sharding),
            policy=items["policy"],
            policy_opt=items["optimiser"]["policy"],
            retriever=items["retriever"],
            retriever_opt=items["optimiser"]["retriever"],
            critic=None if like.critic is None else items["critic"],
            critic_opt=None if like.critic is None else items["optimiser"]["critic"],
            star=None if like.star is None else items["star"],
            star_opt=None if like.star is None else items["optimiser"]["star"],
        )

    def wait(self) -> None:
        """Block until the last save is whole on disk. Raises as `save`."""
        with writing(self.folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()
