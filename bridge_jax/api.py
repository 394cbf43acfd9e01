"""The short way in from Python: `load_config`, `train_run`, `open_run`, also as attributes of `bridge_jax`.

Nothing heavy is imported before one of them is called.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bridge_jax.files import AnyPath
    from bridge_jax.rollout.rows import Episode
    from bridge_jax.training.session import Session


def load_config(path: str | os.PathLike[str], fields: Mapping[str, object] | None = None) -> ConfigDict:
    """A configuration file with some fields set, checked and locked.

    Args:
      fields: {"group.field": value}, as `--config.group.field=value` on the command line.

    Raises:
      UserError: naming the file, the field or the value and what is allowed.
    """
    from bridge_jax import config as configuration

    return configuration.load(os.fspath(path), [f"{name}={_text(value)}" for name, value in (fields or {}).items()])


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _quiet() -> None:
    """Orbax remarks on every save without a score, and on every folder that it only reads."""
    logging.getLogger("absl").setLevel(logging.ERROR)


def train_run(config: ConfigDict, workdir: str | os.PathLike[str]) -> AnyPath:
    """What `python -m bridge_jax.train` does: train in `workdir`, or go on there. Returns it.

    Raises:
      UserError: as `training.loop.run`.
    """
    from bridge_jax import train
    from bridge_jax.files import as_path

    _quiet()
    return train.train(config, as_path(workdir))


def open_run(
    workdir: str | os.PathLike[str],
    checkpoint: str = "best",
    config: ConfigDict | None = None,
    fields: Mapping[str, object] | None = None,
) -> Run:
    """Load a run for use.

    Args:
      checkpoint: "best" (by the run's own evaluations), "latest", or "start" (before the first step; needs no checkpoint).
      config: None reads <workdir>/config.json. fields: of it to be changed, such as {"rollout.candidates": 10}.

    Raises:
      UserError: no run or no checkpoint there.
    """
    from bridge_jax import config as configuration
    from bridge_jax.evaluation import cli
    from bridge_jax.files import as_path
    from bridge_jax.training.session import open_session

    _quiet()
    folder = as_path(workdir)
    if config is None:
        own = cli.workdir_fields(folder) | {name: _text(value) for name, value in (fields or {}).items()}
        config = configuration.load(cli.__file__, [f"{name}={text}" for name, text in own.items()], training=False)
    return Run(config, open_session(config, folder, checkpoint))


@dataclasses.dataclass(frozen=True)
class Run:
    """A checkpoint in use: `session` holds models, corpus and index (`session.assets`) and the trained weights."""

    config: ConfigDict
    session: Session

    def ask(self, question: str, golds: tuple[str, ...] = (), temperature: float = 0.0, seed: int = 0) -> Episode:
        """One rollout: what it thought, searched and read, and its answer.

        golds: for scoring it afterwards; the policy never sees them.

        Raises:
          UserError: a question that is longer than `rollout.max_prompt_tokens`.
        """
        import jax

        from bridge_jax.data.prompts import build_prompt
        from bridge_jax.data.qa import Question

        session, rollout = self.session, self.config.rollout
        asked = Question("ask", question, golds, (), "ask")
        prompt = build_prompt(asked, session.assets.tokenizer, rollout.prompt, max_tokens=rollout.max_prompt_tokens)
        [episode], _ = session.assets.engine.run(
            session.policy_variables,
            [asked],
            prompts=[prompt],
            group_size=1,
            key=jax.random.key(seed),
            temperature=temperature,
            retriever_lora=session.retriever_lora,
        )
        return episode

    def show(self, episode: Episode) -> None:
        """Print an episode as `python -m bridge_jax.ask` does."""
        from rich.console import Console

        from bridge_jax.evaluation import ask_view

        ask_view.show(Console(), episode, self.session.assets.corpus, self.config.credit.tau)
