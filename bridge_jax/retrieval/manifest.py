"""What an index folder was built from, and the refusal to use it with anything else."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.retrieval.vectors import STORES

FORMAT = 1
FINISHED = "manifest.json"
UNFINISHED = "building.json"

# Each compared field: what it is called in a message, and how to mend a difference when opening.
ENCODER_FIELDS = {
    "encoder_fingerprint": ("encoder weights", "load that encoder"),
    "pooling": ("pooling", "load the encoder with that pooling"),
    "query_prefix": ("query prefix", "load the encoder with that prefix"),
    "passage_prefix": ("passage prefix", "load the encoder with that prefix"),
    "append_eos": ("an end token after every text:", "load the encoder with the same tokenizer"),
    "max_length": ("max length", "load the encoder with that length"),
    "dim": ("vector dimensions", "load that encoder"),
}
CORPUS_FIELDS = {
    "rows": ("number of passages", "open that corpus, with limit= for a prefix of it"),
    "corpus_fingerprint": ("corpus content", "open that corpus"),
}
STORE_FIELDS = {"store": ("vectors kept as", "open it as it is")}
_TEXTS = ("encoder_name", "encoder_fingerprint", "pooling", "query_prefix", "passage_prefix", "corpus_fingerprint", "kind", "store")
_SIZES = ("max_length", "dim", "rows")


@dataclass(frozen=True)
class Manifest:
    """The fields of manifest.json.

    corpus_path: a file or a list of files; with `limit`, what `Corpus.open` takes. kind: "scann" or "exact". store: as
    `vectors.STORES`. scann: the searcher's parameters, None without one. tuned: what `tuning.tune` measured, None without a tuning.
    unusable: vectors that are zero or were not finite. imported: the file the vectors come from, None when they were encoded.
    append_eos: as `models.e5.Encoder`.
    """

    encoder_name: str
    encoder_fingerprint: str
    pooling: str
    query_prefix: str
    passage_prefix: str
    max_length: int
    dim: int
    rows: int
    corpus_path: str | list[str]
    corpus_fingerprint: str
    kind: str
    limit: int | None = None
    store: str = "bfloat16"
    scann: dict | None = None
    tuned: dict | None = None
    unusable: int = 0
    imported: str | None = None
    append_eos: bool = False
    versions: dict = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path, name: str = FINISHED) -> None:
        """Writes atomically: the file is there in full or not at all."""
        temporary = folder / f"{name}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)


def make_manifest(encoder, corpus, kind: str, store: str = "bfloat16") -> Manifest:
    """The manifest an index of this corpus by this encoder gets."""
    return Manifest(
        **of_encoder(encoder), **of_corpus(corpus), corpus_path=_path(corpus), limit=corpus.limit, kind=kind, store=store,
        versions=_versions(),
    )  # fmt: skip


def of_encoder(encoder) -> dict:
    """The manifest's fields that an encoder decides."""
    names = ("pooling", "query_prefix", "passage_prefix", "append_eos", "max_length")
    own = {name: getattr(encoder, name) for name in names}
    return {"encoder_name": str(encoder.name), "encoder_fingerprint": encoder.fingerprint, "dim": encoder.dim, **own}


def of_corpus(corpus) -> dict:
    """The manifest's fields that a corpus's passages decide."""
    return {"corpus_fingerprint": corpus.fingerprint, "rows": len(corpus)}


def _path(corpus) -> str | list[str]:
    return [str(file) for file in corpus.path] if isinstance(corpus.path, list) else str(corpus.path)


def read(folder: Path, name: str = FINISHED) -> Manifest | None:
    """The manifest in a folder; None when it has none. UserError when it is not one."""
    file = folder / name
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read ({error}); rebuild the index with --force") from None
    return from_json(values, str(file))


def from_json(values: object, where: str) -> Manifest:
    """A manifest from the contents of its file, of this format or an older one, whose fields are fewer."""
    fields = {f.name: f for f in dataclasses.fields(Manifest)}
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f"{where}: is not an index manifest of format {FORMAT}; rebuild the index with --force")
    needed = {name for name, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    for name in (needed - values.keys()) | (values.keys() - fields.keys()):
        raise UserError(f"{where}: field {name!r} is {'missing' if name in fields else 'unknown'}; rebuild the index with --force")
    for name in _TEXTS + _SIZES:
        value = values.get(name, fields[name].default)
        wrong = type(value) is not int or value < 1 if name in _SIZES else not isinstance(value, str)
        if wrong or (name == "store" and value not in STORES):
            raise UserError(f"{where}: field {name!r} is {str(value)[:40]!r}; rebuild the index with --force")
    return Manifest(**values)


def fingerprint(manifest: Manifest) -> str:
    """The same for two indexes of one encoder and one corpus, wherever they lie: either may answer a run's searches."""
    compared = [[name, getattr(manifest, name)] for name in (ENCODER_FIELDS | CORPUS_FIELDS | STORE_FIELDS)]
    return hashlib.sha256(json.dumps(compared).encode()).hexdigest()[:32]


def difference(have: Manifest, want: Manifest) -> tuple[str, str] | None:
    """The first field in which two indexes differ in what they were built from -> (what it is, how to mend); None when in none."""
    for name, (label, mend) in (ENCODER_FIELDS | CORPUS_FIELDS | STORE_FIELDS).items():
        a, b = getattr(have, name), getattr(want, name)
        if a != b:
            return f"{label} {_show(name, a, have)}, not {_show(name, b, want)}", mend
    return None


def refuse_other(folder: Path, manifest: Manifest, encoder=None, corpus=None) -> None:
    """UserError when the index was built with another encoder, or from another corpus, than the given ones (None: not compared)."""
    given = of_encoder(encoder) if encoder is not None else {}
    given |= of_corpus(corpus) | {"corpus_path": _path(corpus)} if corpus is not None else {}
    found = difference(manifest, dataclasses.replace(manifest, **given))
    if found:
        what, mend = found
        raise UserError(f"{folder}: the index was built with {what}; {mend}, or build an index for this one")


def _show(name: str, value, manifest: Manifest) -> str:
    if name == "encoder_fingerprint":
        return f"{value[:12]} ({manifest.encoder_name})"
    if name == "corpus_fingerprint":
        return f"{value[:12]} ({manifest.corpus_path})"
    if name == "rows":
        return f"{value:,} ({manifest.corpus_path})"
    return repr(value)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("bridge-jax", "jax", "numpy", "scann"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
