"""What a run reads besides its configuration, by content: with other passages or training questions it is another run."""

from __future__ import annotations

import hashlib
import json

from ml_collections import ConfigDict

from bridge_jax.data.qa import locate
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, as_path, write_text
from bridge_jax.training.search import open_corpus


def claim_inputs(config: ConfigDict, workdir: AnyPath, name: str, write: bool = True) -> None:
    """Write `<workdir>/<name>`, or compare with the one there. What the written one lacks is unknown, and taken as it is now.

    The configuration has been compared before (`workdir.claim_workdir`): the names of corpus and questions are the same.

    Args:
      write: False only compares.

    Raises:
      UserError: naming the field and the file whose content has changed; a file that is not there. Nothing is written.
    """
    path, found = as_path(workdir) / name, fingerprints(config)
    try:
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error}): use another --workdir") from error
    for field, files in found.items():
        for file, content in files.items():
            if old.get(field, {}).get(file, content) != content:
                raise UserError(
                    f"config.{field}: {file} does not hold what it held when {workdir} was begun: put it back as it was, or use "
                    "another --workdir"
                )
    if write:
        write_text(path, json.dumps(found, indent=1) + "\n")


def fingerprints(config: ConfigDict) -> dict[str, dict[str, str]]:
    """{"index.corpus", "data.train": {name in the configuration: SHA-256 of the passages, of the question file}}"""
    questions = {}
    for source in config.data.train:
        path, _ = locate(source, config.data.train_split)
        try:
            with path.open("rb") as file:
                questions[source] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions") from error
    return {"index.corpus": {config.index.corpus: open_corpus(config).fingerprint}, "data.train": questions}
