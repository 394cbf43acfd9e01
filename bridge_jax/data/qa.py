"""Questions by file, by official name or from the embedded set, in one internal form.

    load_questions("runs/my.jsonl")                a file: .jsonl, .jsonl.gz or .parquet; its format is seen from its columns
    load_questions("data/hotpotqa", "train")       a folder with <split>.jsonl, .jsonl.gz or .parquet
    load_questions("embedded/hotpotqa", "train")   what is shipped in the package (`embedded`)
    load_questions("mini/two_hop", "train")        the generated closed world (`mini`)
    load_questions("hotpotqa", "dev")              an official set: $BRIDGE_JAX_DATA/<name>/<split>.jsonl, else the hub

`split=None` is the split that published numbers are measured on ("test" for embedded and mini sets). A row that cannot be used is a
`UserError` with file, line and field.
"""

from __future__ import annotations

import difflib
import gzip
import importlib.util
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from bridge_jax.data import embedded, mini
from bridge_jax.data.cache import cache_dir
from bridge_jax.data.formats import PARSERS, Question, RowError, canonical_name, detect_format
from bridge_jax.errors import UserError
from bridge_jax.files import local_copy

__all__ = ["EVALUATION_SPLITS", "OFFICIAL", "Question", "load_questions", "locate", "read_file"]

log = logging.getLogger("bridge_jax.data")

# FlashRAG's splits of each official set; the last one is where published results are measured (METHOD.md 7).
OFFICIAL = {
    "nq": ("train", "dev", "test"),
    "triviaqa": ("train", "dev", "test"),
    "popqa": ("test",),
    "hotpotqa": ("train", "dev"),
    "2wikimultihopqa": ("train", "dev"),
    "musique": ("train", "dev"),
    "bamboogle": ("test",),
}
EVALUATION_SPLITS = {name: splits[-1] for name, splits in OFFICIAL.items()}
HUB_REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def load_questions(
    spec: str | os.PathLike, split: str | None = None, limit: int | None = None, *, data_dir: str | os.PathLike | None = None
) -> Sequence[Question]:
    """The questions `spec` names (see the module's text), the first `limit` of them.

    spec: a path, "embedded/<set>" or an official name. split: ignored for a single file, which is one split by itself.
    data_dir: where official sets lie as <name>/<split>.jsonl; default $BRIDGE_JAX_DATA.
    Raises UserError for an unknown name, an unreachable set, an empty file or a bad row.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} for questions '{spec}'; give a number of at least 1, or none for all")
    path, dataset = locate(spec, split, data_dir)
    try:
        questions = _open(path, dataset)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions") from error
    return questions if limit is None or limit >= len(questions) else questions[:limit]


def _open(path: Path, dataset: str) -> Sequence[Question]:
    missing = [name for name in ("tensorflow_datasets", "array_record") if importlib.util.find_spec(name) is None]
    if missing:
        log.warning("%s has no package on this platform: reading %s directly", missing[-1], path)
        return read_file(path, dataset)
    from bridge_jax.data import tfds_qa

    return tfds_qa.open_questions(path, dataset, read_file)


# ---- from a name to a file -------------------------------------------------------------------------------------------------------


def locate(spec: str | os.PathLike, split: str | None = None, data_dir: str | os.PathLike | None = None) -> tuple[Path, str]:
    """The file that `spec` and `split` mean, and the name of its data set. May download an official set."""
    text = os.fspath(spec)
    if text.startswith("embedded/"):
        name = canonical_name(text.removeprefix("embedded/"))
        return embedded.questions_path(name, split), name
    if text.startswith("mini/"):
        name = text.removeprefix("mini/")
        return mini.questions_path(name, split), name
    if canonical_name(text) in OFFICIAL:
        return _official(canonical_name(text), split, data_dir)
    path = local_copy(text, cache_dir()).expanduser()
    if path.is_dir():
        return _in_folder(path, split), canonical_name(path.resolve().name)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise UserError(f"question file {path} is not one of {', '.join(SUFFIXES)}; convert it or rename it")
        return path, _name_of(path)
    known = [*OFFICIAL, *(f"embedded/{name}" for name in embedded.SETS), *(f"mini/{name}" for name in mini.SETS)]
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"did you mean '{near[0]}'" if near else f"give a file, a folder or one of {', '.join(known)}"
    raise UserError(f"no question file or set '{text}'; {hint}")


def _name_of(path: Path) -> str:
    """FlashRAG lays files out as <name>/<split>.jsonl; any other file is named by itself."""
    folder = canonical_name(path.resolve().parent.name)
    return folder if folder in OFFICIAL else canonical_name(path.name.split(".")[0])


def _in_folder(folder: Path, split: str | None) -> Path:
    files = sorted(p for p in folder.iterdir() if p.name.endswith(SUFFIXES))
    wanted = [p for p in files if split is None or p.name.split(".")[0] == split]
    if len(wanted) == 1:
        return wanted[0]
    have = ", ".join(p.name for p in files) or "no question file"
    if not wanted:
        raise UserError(f"folder {folder} has no split '{split}' (it has {have}); name one of its splits")
    raise UserError(f"folder {folder} has several files ({', '.join(p.name for p in wanted)}); name the split or the file")


def _official(name: str, split: str | None, data_dir: str | os.PathLike | None) -> tuple[Path, str]:
    root = data_dir or os.environ.get("BRIDGE_JAX_DATA")
    # Local copies often hold an evaluation split under another name (HotpotQA's dev as test.jsonl): without a wish, either will do.
    splits = (split,) if split else dict.fromkeys((EVALUATION_SPLITS[name], "test", "dev"))
    for candidate in splits if root else ():
        path = Path(root).expanduser() / name / f"{candidate}.jsonl"
        if path.is_file():
            return path, name
    split = split or EVALUATION_SPLITS[name]
    if split not in OFFICIAL[name]:
        raise UserError(f"'{name}' has no split '{split}'; its splits are {', '.join(OFFICIAL[name])}")
    try:
        return _from_hub(f"{name}/{split}.jsonl"), name
    except Exception as error:  # the hub's client raises a dozen kinds: offline, proxy, time-out, not found, no space
        where = f"not in {Path(root) / name}" if root else "BRIDGE_JAX_DATA is not set"
        raise UserError(
            f"'{name}' split '{split}': {where}, and the Hugging Face hub gave {type(error).__name__}; put {name}/{split}.jsonl of "
            f"{HUB_REPOSITORY} into a folder and set BRIDGE_JAX_DATA to it, or use 'embedded/hotpotqa'"
        ) from error


def _from_hub(file: str) -> Path:
    """A file of the hub's repository: from the hub's own cache, else downloaded (with its progress bar)."""
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hub.hf_hub_download(HUB_REPOSITORY, file, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        # One short probe: the client by itself retries for half a minute before it says that there is no network.
        hub.get_session().head(hub.hf_hub_url(HUB_REPOSITORY, file, repo_type="dataset"), timeout=10)
        return Path(hub.hf_hub_download(HUB_REPOSITORY, file, repo_type="dataset"))


# ---- from a file to questions ----------------------------------------------------------------------------------------------------


def read_file(path: Path, dataset: str) -> list[Question]:
    """Parse and check every row. UserError with file, line, field and mend; also for no rows and for an id used twice in a set."""
    questions: list[Question] = []
    first_line: dict[tuple[str, str], int] = {}
    parser = None
    unit = "row" if path.name.endswith(".parquet") else "line"
    for number, row in _rows(path):
        try:
            parser = parser or PARSERS[detect_format(row)]
            question = parser(row, dataset, number)
            key = (question.dataset, question.id)  # files of several sets number each set from 0
            if key in first_line:
                raise RowError("id", f"'{question.id}' was used on {unit} {first_line[key]} already", "make the ids different")
        except RowError as error:
            raise UserError(f"{path}, {unit} {number}: {error}") from error
        first_line[key] = number
        questions.append(question)
    if not questions:
        raise UserError(f"question file {path} is empty; give a file with at least one row")
    return questions


def _rows(path: Path) -> Iterator[tuple[int, dict]]:
    return _parquet_rows(path) if path.name.endswith(".parquet") else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[int, dict]]:
    r"""(line number from 1, object). Lines end at \n alone: U+2028, U+0085 and the like are text inside a string."""
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):  # a binary file splits at b"\n" only
                if line.strip():
                    yield number, _json_object(line, path, number)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is not a whole gzip file; download it again") from error


def _json_object(line: bytes, path: Path, number: int) -> dict:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: a {type(row).__name__}, not an object; write one JSON object a line")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict]]:
    import pyarrow
    import pyarrow.parquet

    # Damage shows as pyarrow's own error, text that is not UTF-8, a date beyond the calendar, or an OSError without a number.
    damage = (pyarrow.ArrowException, ValueError, OverflowError, OSError)
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except damage as error:
        if getattr(error, "errno", None):
            raise
        raise UserError(f"{path} is not a parquet file; download it again") from error
    number = 0
    with file:
        try:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, after row {number}: text that is not UTF-8; write the file anew") from error
        except damage as error:
            if getattr(error, "errno", None):
                raise
            raise UserError(f"{path}, after row {number}: damaged parquet; download it again") from error
