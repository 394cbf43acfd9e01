"""The commands as a shell sees them: exit codes, one line for what is wrong, help with examples."""

import importlib
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bridge_jax
from bridge_jax import __main__ as commands
from bridge_jax import errors

COMMANDS = ("ask", "evaluate", "index", "judge", "report.__main__", "serve", "train", "warmstart")


def shell(*words, stdin=""):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *(words if words[0] == "-c" else ("-m", *words))],
        capture_output=True,
        text=True,
        input=stdin,
        env=environment,
        timeout=120,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name, capsys):
    command = importlib.import_module(f"bridge_jax.{name}")
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert re.search(
        rf"\n *examples?:.*?\n +python -m bridge_jax.{name.removesuffix('.__main__')} ", out, re.IGNORECASE | re.DOTALL
    )


def test_the_package_lists_its_commands(capsys):
    package = Path(bridge_jax.__file__).parent
    files = [*package.glob("*.py"), *package.glob("*/__main__.py")]
    runnable = [path for path in files if 'if __name__ == "__main__":' in path.read_text() and path != package / "__main__.py"]
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in runnable}
    assert set(commands.COMMANDS) == names
    for words, code, first in (
        (["--help"], 0, "The commands"),
        ([], 2, "The commands"),
        (["train", "--help"], 2, "error: python -m bridge_jax train is no command; write python -m bridge_jax.train"),
        (["trian"], 2, "error: python -m bridge_jax trian is no command; the commands are:"),
    ):
        assert commands.main(words) == code
        told = capsys.readouterr()
        shown, silent = (told.out, told.err) if code == 0 else (told.err, told.out)
        assert shown.startswith(first) and silent == ""
        listed = {line.split()[2].removeprefix("bridge_jax.") for line in shown.splitlines() if line.startswith("  ")}
        assert listed == (set() if words[:1] == ["train"] else names)


def test_ctrl_c_while_a_command_imports_its_libraries_is_one_line():
    program = "import sys; sys.argv[:] = ['-m']; import bridge_jax; raise {}"
    ended = [shell("-c", program.format(error)) for error in ("KeyboardInterrupt", "ValueError(3)")]
    assert (ended[0].returncode, ended[0].stderr) == (130, f"{errors.INTERRUPTED}\n")
    assert ended[1].returncode == 1 and "Traceback" in ended[1].stderr


def test_a_library_that_logs_a_ctrl_c_is_not_heard(capsys):
    @errors.main_guard
    def main():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            logging.getLogger("absl").exception("broken off")
            logging.getLogger("absl").error("something else")
            raise

    before = signal.getsignal(signal.SIGINT)
    assert main() == 130 and capsys.readouterr().err == f"something else\n{errors.INTERRUPTED}\n"
    assert signal.getsignal(signal.SIGINT) is before  # nobody's process but a command's own


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("bridge_jax",), 2, "python -m bridge_jax.train "),
        (("bridge_jax.report", "--help"), 0, ""),
        (("bridge_jax.report", "--workdir=/nowhere/run"), 2, "error: /nowhere/run holds no run"),
        (("bridge_jax.report", "--nonsense"), 2, "required: --workdir"),
        (("bridge_jax.ask", "--workdir=/nowhere/run", "Who?"), 2, "error: /nowhere/run/config.json does not exist: give a run's"),
        (
            ("bridge_jax.train", "--config=/nowhere.py", "--workdir=/nowhere/run"),
            2,
            "error: config file /nowhere.py does not exist",
        ),
    ],
)
def test_exit_codes(words, code, said):
    ended = shell(*words)
    assert (ended.returncode, said in ended.stderr, "Traceback" in ended.stderr) == (code, True, False), ended.stderr
    if said.startswith("error: "):
        assert len([line for line in ended.stderr.splitlines() if line.startswith("error: ")]) == 1
