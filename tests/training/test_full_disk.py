"""A full disk is one line that names the path, whichever library notices; what was whole before stays whole."""

import contextlib
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_jax import files
from bridge_jax.errors import UserError, main_guard
from bridge_jax.models import hub
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.training.checkpoints import Checkpoints
from bridge_jax.training.workdir import exclusive


@contextlib.contextmanager
def files_of_at_most(size):
    """A real error of the system, in this process alone: no file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_file_that_cannot_be_written(tmp_path):
    whole = tmp_path / "eval.json"
    files.write_text(whole, "whole")
    (tmp_path / "eval.json.part").symlink_to("/dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "x.safetensors.part").symlink_to("/dev/full")
    for path, write in (
        (whole, lambda: files.write_text(whole, "new")),
        (tmp_path / "metrics.jsonl", lambda: files.append_text(tmp_path / "metrics.jsonl", "{}\n")),
        (tmp_path / "x.safetensors", lambda: hub.write_tensors(tmp_path / "x.safetensors", {"a": np.zeros(10**5, np.float32)})),
    ):
        with pytest.raises(UserError, match=f"^{path} cannot be written \\(No space left on device\\): make room there, and run"):
            write()
    assert whole.read_text() == "whole" and not (tmp_path / "x.safetensors").exists()


def state(seed):
    tree = {"kernel": jax.random.normal(jax.random.key(seed), (300, 200))}
    return BridgeState(jnp.int32(seed), tree, {"m": tree}, tree, {"m": tree}, jax.random.key(0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves coroutines behind
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, capfd):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1, fingerprint={})
    checkpoints.save(1, state(1))
    checkpoints.wait()

    @main_guard
    def command():
        with contextlib.closing(checkpoints), files_of_at_most(50_000):
            checkpoints.save(2, state(2))
            checkpoints.wait()

    assert command() == 2
    said = capfd.readouterr().err
    assert said.splitlines()[-1].startswith(f"error: {folder} cannot be written (File too large): make room there")
    assert "Traceback" not in said

    again = Checkpoints(folder, keep=1, fingerprint={})
    assert again.latest() == 1
    jax.tree.map(np.testing.assert_array_equal, again.restore(1, state(0)).policy_opt, state(1).policy_opt)
    again.save(2, state(2))
    again.close()
    assert again.latest() == 2 and [path.name for path in folder.iterdir()] == ["2"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "/runs/a"),
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        ExceptionGroup(
            "of threads", [ValueError("x"), ExceptionGroup("inner", [RuntimeError("RESOURCE_EXHAUSTED: No space left on device")])]
        ),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_whoever_notices_the_command_says_it_in_one_line(error, capsys):
    @main_guard
    def command():
        raise error

    assert command() == 2
    said = capsys.readouterr().err
    where = getattr(error, "filename", None) or "the disk"
    assert said.startswith(f"error: {where}: ") and said.endswith("make room there, and run the same command again\n")
    assert said.count("\n") == 1


def test_other_errors_keep_their_traceback():
    @main_guard
    def command():
        raise ExceptionGroup("of threads", [ValueError("a defect")])

    with pytest.raises(ExceptionGroup):
        command()


@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="a folder in which not even root makes files is Linux's")
def test_a_folder_without_the_right_to_write():
    with (
        pytest.raises(UserError, match=r"--workdir=/sys/kernel: cannot be written \(Permission denied\)"),
        exclusive("/sys/kernel"),
    ):
        pass
