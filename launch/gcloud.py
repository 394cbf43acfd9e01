"""Cloud TPUs through the gcloud command: a queued resource with one node of the same name."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence

import commands
from fleet import Fleet
from tpu_types import TpuType

from bridge_jax.errors import UserError

# What a queued resource goes through (REST: QueuedResourceState.State).
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
GONE = ("SUSPENDING", "SUSPENDED", "FAILED", "DELETING", "ABSENT")  # ABSENT: ours, there is none of the name
LOST_NODE = ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "ABSENT")

# What gcloud says when it refuses -> what a person can do.
REFUSALS = (
    (
        r"quota",
        "the project's quota does not cover it: ask for more (https://cloud.google.com/tpu/docs/quota), or try --spot, a smaller "
        "--accelerator or another --zone",
    ),
    (
        r"no more capacity|insufficient (reserved )?capacity|pool_exhausted|not have enough resources|stockout|out of capacity",
        "the zone has none free now: try another --zone, --spot, or later",
    ),
    (r"permission|IAM_", "you may not do this in the project: ask its owner for the role TPU Admin"),
    (r"has not been used in project|SERVICE_DISABLED", "the API is off: gcloud services enable tpu.googleapis.com"),
    (r"auth login|reauth|credentials|UNAUTHENTICATED", "you are not logged in: gcloud auth login"),
    (r"accelerator ?type", "the zone has no such TPU: gcloud compute tpus accelerator-types list --zone=ZONE"),
)


@dataclasses.dataclass(frozen=True)
class State:
    """queued: state of the queued resource, or ABSENT. node: of its node, or ABSENT. reason: why it failed, if it did."""

    queued: str
    node: str = "ABSENT"
    reason: str = ""
    accelerator: str = ""
    hosts: int = 0

    def __str__(self) -> str:
        return f"{self.queued}, node {self.node}" if self.queued == "ACTIVE" else self.queued

    @property
    def usable(self) -> bool:
        return self.queued == "ACTIVE" and self.node == "READY"

    @property
    def lost(self) -> bool:
        """It was there and has been taken away, or will be."""
        return self.queued in GONE or (self.queued == "ACTIVE" and self.node in LOST_NODE)


@dataclasses.dataclass(frozen=True)
class Tpu:
    """One slice. poll: seconds between looks at it."""

    name: str
    project: str
    zone: str
    runner: commands.Runner
    poll: float = 20.0

    @property
    def _where(self) -> list[str]:
        return [f"--project={self.project}", f"--zone={self.zone}"]

    def _queued(self, verb: str, *words: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", verb, self.name, *self._where, *words]

    def _node(self, verb: str, *words: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", verb, *words, *self._where]

    def create(self, kind: TpuType, spot: bool, extra: Sequence[str] = ()) -> None:
        """Ask for the slice; one that is asked for already is left as it is.

        Raises:
          UserError: refused, with the reason and what can be done; a slice of the name but of another type.
        """
        words = [f"--node-id={self.name}", f"--accelerator-type={kind.accelerator}", f"--runtime-version={kind.runtime}"]
        result = self.runner.run(self._queued("create", *words, *["--spot"] * spot, "--quiet", *extra))
        if result.code == 0:
            return
        if not re.search(r"already exists|ALREADY_EXISTS", result.err):
            raise UserError(f"{kind.accelerator} in {self.zone}: {refusal(commands.complaint(result))}")
        state = self.state()
        if state.accelerator and state.accelerator != kind.accelerator:
            raise UserError(f"{self.name} exists in {self.zone} as {state.accelerator}: delete it first, or give another --name")
        self.runner.say(f"{self.name} was asked for before ({state.queued})")

    def wait(self, minutes: float | None = None) -> State:
        """Until it can be used; says every change. Without `minutes`, for as long as it takes.

        Raises:
          UserError: it failed, was deleted, or is not there in time.
        """
        began, shown, state = time.monotonic(), "", self.state()
        while not (state.usable or self.runner.dry):
            if state.queued in GONE:
                why = refusal(state.reason) or "delete it and create it again"
                raise UserError(f"{self.name} in {self.zone} is {state.queued}: {why}")
            now, waited = str(state), (time.monotonic() - began) / 60
            if now != shown:
                self.runner.say(f"{self.name}: {now} ({waited:.0f} min)")
                shown = now
            if minutes is not None and waited >= minutes:
                raise UserError(
                    f"{self.name} is still {now} after {minutes:.0f} minutes; it stays in the queue: run create again, or delete"
                )
            time.sleep(self.poll)
            state = self.state()
        return state

    def state(self) -> State:
        """Raises UserError when gcloud itself does not work."""
        queued = self._describe(self._queued("describe", "--format=json"))
        if queued is None:
            return State("ABSENT")
        about = queued.get("state") or {}
        specs = (queued.get("tpu") or {}).get("nodeSpec") or [{}]
        accelerator = (specs[0].get("node") or {}).get("acceleratorType", "")
        reason = ((about.get("failedData") or {}).get("error") or {}).get("message", "")
        state = State(about.get("state", "STATE_UNSPECIFIED"), reason=reason, accelerator=accelerator)
        if state.queued != "ACTIVE":
            return state
        node = self._describe(self._node("describe", self.name, "--format=json"))
        if node is None:
            return state
        return dataclasses.replace(
            state, node=node.get("state", "STATE_UNSPECIFIED"), hosts=len(node.get("networkEndpoints") or [1])
        )

    def _describe(self, words: Sequence[str]) -> dict | None:
        """None: not there."""
        result = self.runner.run(words)
        if self.runner.dry:
            return {"state": "ACTIVE"} if "tpu-vm" in words else {"state": {"state": "ACTIVE"}}
        if result.code:
            if re.search(r"NOT_FOUND|not found|was not found", result.err):
                return None
            raise UserError(f"{self.name} in {self.zone}: {refusal(commands.complaint(result))}")
        try:
            return json.loads(result.out)
        except ValueError as error:
            raise UserError(f"gcloud's answer cannot be read ({error}): {result.out[:200]!r}") from error

    def delete(self) -> None:
        """Delete the slice and the request for it; returns when it is gone."""
        result = self.runner.run(self._queued("delete", "--force", "--quiet"))
        if result.code and not re.search(r"NOT_FOUND|not found|was not found", result.err):
            raise UserError(f"{self.name} in {self.zone} cannot be deleted: {refusal(commands.complaint(result))}")

    def fleet(self, hosts: int, pause: float = 5.0) -> Fleet:
        """The slice's workers."""

        def ssh(machine: int, command: str) -> list[str]:
            return self._node("ssh", self.name, f"--worker={machine}", "--quiet", f"--command={command}")

        def scp(machine: int, files: Sequence[str], folder: str) -> list[str]:
            return self._node("scp", *files, f"{self.name}:{folder}/", f"--worker={machine}", "--quiet")

        return Fleet(tuple(f"worker {i}" for i in range(hosts)), ssh, scp, self.runner, pause)

    def shell(self, machine: int) -> list[str]:
        return self._node("ssh", self.name, f"--worker={machine}")


def read_end(runner: commands.Runner, address: str, size: int) -> str:
    """The last `size` bytes of an object in a bucket; "" when it is not there."""
    result = runner.run(["gcloud", "storage", "cat", f"--range=-{size}", address])
    return result.out if result.code == 0 else ""


def refusal(text: str) -> str:
    """gcloud's complaint, with what can be done about it."""
    for pattern, mend in REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return f"{mend} [{' '.join(text.split())[:300]}]"
    return text
