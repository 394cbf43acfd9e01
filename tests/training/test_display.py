"""What `train` shows: a panel on a terminal that moves its cursor, plain lines everywhere else."""

import contextlib
import io
import re
import time

import pytest

from bridge_jax.retrieval import progress
from bridge_jax.training import sft
from bridge_jax.training.display import Display

METRICS = {
    "reward/mean": 0.25, "retrieval/recall@3": 0.5, "rollout/searches": 1.5, "rollout/tokens_per_second": 1234.0, "policy/kl": None,
    "time/step": 4.0, "time/rollout": 1.0, "time/policy": 3.0,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "100"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return made


def play(terminal, **settings):
    """Two of four steps, an evaluation between them."""
    with contextlib.redirect_stderr(terminal), Display(4, 0, **settings) as display:
        display.phase("rollout")
        display.step(1, METRICS)
        display.phase("evaluation")
        display.say("evaluation after step 1: [em] 0.5")
        display.phase("policy")
        display.step(2, METRICS | {"reward/mean": 0.75})
        if display._live:
            display._live.refresh()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_has_one_panel(terminal):
    play(terminal)
    text = terminal.getvalue()
    last = plain(text[text.rindex("╭") :])
    for part in (
        "step 2/4",
        "policy 0:00:00",
        "ETA",
        "reward",
        "0.75",
        "▁█",
        "recall@3",
        "last step 4.0 s: rollout 1.0  policy 3.0",
    ):
        assert part in last, part
    assert "KL" not in last  # has no number
    assert "step 1/4  reward" not in plain(text)  # no line a step
    before, after = text.split("evaluation after step 1: [em] 0.5\n")
    assert "\x1b[2K" in before[before.rindex("╯") :] and "╭" in after  # the panel has gone before, and comes back behind it
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2  # the cursor is given back


def test_an_interrupted_run_leaves_no_panel(terminal):
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stderr(terminal), Display(4, 0) as display:
        display.step(1, METRICS)
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\x1b[2K") and terminal.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("why", ["CI", "dumb", "file"])
def test_elsewhere_there_is_one_plain_line_a_step(terminal, monkeypatch, why):
    if why == "file":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    else:
        monkeypatch.setenv(*{"CI": ("CI", "true"), "dumb": ("TERM", "dumb")}[why])
    play(terminal)
    lines = plain(terminal.getvalue()).splitlines()
    assert len(lines) == 3 and lines[1] == "evaluation after step 1: [em] 0.5"
    said = r"  recall@3 0.500  searches 1.50  1234 tokens/s  4.0 s  "
    assert re.fullmatch(rf"step 1/4  reward 0.250{said}ETA after the next step", lines[0])
    assert re.fullmatch(rf"step 2/4  reward 0.750{said}ETA 0:00:00", lines[2])


def test_the_first_step_counts_for_nothing_in_what_is_left(monkeypatch, capsys):
    """100 s of compiling, then 2 s a step: 4 more steps are 8 s. Each progress says so, and an end once."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = {}
    with Display(6, 0) as display, sft._Meter("trial", 6, 0) as meter, progress.track("loop", 6, "units") as advance:
        for number in range(1, 7):
            now[0] += 100 if number == 1 else 2
            monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
            display.step(number, METRICS)
            meter.step(number, 1.0, 10, 1.0)
            advance(1)
            said[number] = capsys.readouterr().err.splitlines()
        advance(0)
        advance(0)
        assert capsys.readouterr().err == ""
    assert [line.rpartition("  ")[2].rpartition(", ")[2] for line in said[1]] == ["ETA after the next step"] * 3
    assert [line[line.index("ETA") :] for line in said[2]] == ["ETA 0:00:08"] * 3
    assert [line[line.index("ETA") :] for line in said[6]] == ["ETA 0:00:00"] * 3
    assert said[2][1].startswith("trial 2/6")


def test_other_processes_are_quiet(terminal):
    play(terminal, quiet=True)
    assert terminal.getvalue() == ""
