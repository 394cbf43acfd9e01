"""`--auto-resume`: keep a job going on machines that are taken away.

One round is: have the slice, run the job, watch it. The job itself goes on from the newest checkpoint of its workdir, so a new
round is the same command again. What ends a round decides what follows:

    finished           the end
    stopped            somebody asked for it: the end
    slice lost         delete what is left, wait, ask for a new one
    job ended, or was told to, though the slice is there
                       once more on the same slice; given up when two rounds in a row bring no new step, and at once when the
                       command itself is wrong (all machines say exit code 2)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from gcloud import State
from job import Status, describe

from bridge_jax.errors import UserError

T = TypeVar("T")

USER_ERROR = 2  # exit code of bridge_jax.errors.main_guard
GRACE = 5  # looks until an end counts as the job's own: a slice says that it is lost later than its machines vanish
LOST_CONTACT = "lost contact with another process"  # what the others of a lost process say, with the same exit code


@dataclasses.dataclass(frozen=True)
class Actions:
    """What the loop does to the world. Each may raise UserError."""

    obtain: Callable[[], object]  # have a usable slice
    run: Callable[[], object]  # start the job on it
    stop: Callable[[], object]  # end what is left of the job
    discard: Callable[[], object]  # delete the slice
    state: Callable[[], State]  # of the slice
    statuses: Callable[[], Sequence[Status]]  # of the job, by machine
    last_step: Callable[[], int]  # of the run; 0 when none is known
    say: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Patience:
    restarts: int = 50  # rounds after the first
    poll: float = 60.0  # seconds between looks
    first: float = 30.0  # seconds between two rounds: at first, and after one that brought a step
    longest: float = 900.0  # doubled up to here


def keep_going(actions: Actions, patience: Patience) -> int:
    """Returns the exit code: 0 finished or stopped, 1 given up.

    Raises:
      UserError: the first round could not begin though the slice is there, or no slice is to be had from the start.
    """
    pause, idle, step = patience.first, 0, actions.last_step()
    for number in range(patience.restarts + 1):
        outcome = _watch(actions, patience) if _begin(actions, first=number == 0) else "lost"
        before, step = step, max(step, actions.last_step())
        if outcome in ("finished", "stopped"):
            actions.say(f"{outcome} at step {step}")
            return 0
        moved = step > before
        idle = 0 if moved or outcome == "lost" else idle + 1
        if outcome == "wrong" or idle >= 2:
            why = "the command itself is wrong" if outcome == "wrong" else f"twice without getting beyond step {step}"
            actions.say(f"given up: the job ended on a slice that is there, {why}")
            return 1
        if number == patience.restarts:
            break
        pause = patience.first if moved else pause
        what = "the slice was taken away" if outcome == "lost" else "the job ended"
        actions.say(f"{what} at step {step}; restart {number + 1} of {patience.restarts} in {pause:.0f} s")
        _patiently(actions, patience, actions.discard if outcome == "lost" else actions.stop)
        time.sleep(pause)
        pause = min(2 * pause, patience.longest)
    actions.say(f"given up after {patience.restarts} restarts (--max-restarts), at step {step}")
    return 1


def _begin(actions: Actions, first: bool) -> bool:
    """Have the slice and start the job; False when there is none, or it was lost before the job ran."""
    try:
        actions.obtain()
    except UserError as error:  # refused from the start: the user's to mend; later: the zone has none free
        if first:
            raise
        actions.say(str(error))
        return False
    try:
        actions.run()
    except UserError as error:
        if not actions.state().lost:
            raise
        actions.say(str(error))
        return False
    return True


def _watch(actions: Actions, patience: Patience) -> str:
    """Until the job or the slice has ended -> finished, stopped, lost, wrong, failed."""
    strikes = 0
    while True:
        if _patiently(actions, patience, actions.state).lost:
            return "lost"
        found = actions.statuses()
        states = {status.state for status in found}
        if states == {"ended"} and any(status.finished for status in found):
            return "finished"
        if "running" in states and states <= {"running", "unreachable"}:  # were the silent one dead, the others would end
            strikes = 0
        else:
            strikes += 1
            if strikes == 1:
                for status in [status for status in found if status.state != "running"][:4]:
                    actions.say(f"on a machine the job {describe(status)}")
        if strikes > GRACE:
            return _verdict(found)
        time.sleep(patience.poll)


def _verdict(found: Sequence[Status]) -> str:
    if any(status.stopped for status in found):
        return "stopped"
    if all(status.state == "ended" and status.code == USER_ERROR and LOST_CONTACT not in status.said for status in found):
        return "wrong"
    return "failed"


def _patiently(actions: Actions, patience: Patience, call: Callable[[], T]) -> T:
    """`call`, again after a while when it fails: this machine's own network comes and goes."""
    for _ in range(GRACE):
        try:
            return call()
        except UserError as error:
            actions.say(f"{error}; trying again in {patience.poll:.0f} s")
            time.sleep(patience.poll)
    return call()
