"""gcloud, ssh, scp, srun or nvidia-smi, as `fake_machines.Cloud` sets them up: `fake_tool.py ROOT TOOL WORDS...`.

Files in ROOT say what happens; each call is appended to ROOT/calls.jsonl. Standard library alone: it starts in a few milliseconds.
"""

import json
import os
import shutil
import subprocess
import sys

ROOT, TOOL, *WORDS = sys.argv[1:]


def said(name, default=""):
    try:
        with open(os.path.join(ROOT, name)) as file:
            return file.read()
    except FileNotFoundError:
        return default


def say(name, text):
    with open(os.path.join(ROOT, name), "w") as file:
        file.write(text)


def flag(name):
    return next((word.partition("=")[2] for word in WORDS if word.startswith(f"--{name}=")), "")


def fail(text, code=1):
    print(text, file=sys.stderr)
    sys.exit(code)


def home(worker):
    path = os.path.join(ROOT, f"worker-{worker}")
    os.makedirs(path, exist_ok=True)
    return path


def reach(worker, command):
    """Run a command on a worker. `dead`: those that do not answer. `drop` ("start 1"): once, obeyed without its answer arriving."""
    if worker in said("dead").split():
        fail(f"ssh: connect to host {worker} port 22: Connection timed out", 255)
    path = f"{ROOT}/worker-bin:/usr/bin:/bin"
    env = dict(os.environ, HOME=home(worker), PATH=path, TMUX_TMPDIR=home(worker), WORKER=worker)
    env.pop("TMUX", None)
    done = subprocess.run(["bash", "-c", command], cwd=home(worker), env=env, capture_output=True, text=True)
    verb, _, whose = said("drop").partition(" ")
    if verb and f"job.sh {verb}" in command and whose == worker:
        say("drop", "")
        if said("drop-kills"):
            say("dead", worker)
        fail("Connection to host closed by remote host.", 255)
    print("Welcome to the machine")  # as some do
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)


def copy(worker, target):
    if worker in said("dead").split():
        fail("scp: Connection closed", 255)
    for name in [word for word in WORDS if word.startswith("/")]:
        shutil.copy(name, os.path.join(home(worker), target))


def queued_resource(verb):
    """`plays`: a line of states for each slice that is created; each look goes one further, the last one stays. `states`: now."""
    if verb == "create":
        if said("refuse"):
            fail(said("refuse"))
        if said("exists"):
            fail("ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: Resource already exists")
        now, _, later = said("plays").partition("\n")
        say("exists", flag("accelerator-type"))
        say("states", now)
        say("plays", later)
        say("node", "READY")
    elif verb == "delete":
        say("exists", "")
        for name in os.listdir(ROOT):
            if name.startswith("worker-") and name != "worker-bin":
                shutil.rmtree(os.path.join(ROOT, name), ignore_errors=True)
    elif not said("exists"):
        fail("ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource 'x' was not found")
    else:
        state, *later = said("states").split()
        if later:
            say("states", " ".join(later))
        error = {"failedData": {"error": {"code": 8, "message": said("why")}}} if state == "FAILED" else {}
        node = {"node": {"acceleratorType": said("exists")}}
        print(json.dumps({"state": {"state": state, **error}, "tpu": {"nodeSpec": [node]}}))


with open(os.path.join(ROOT, "calls.jsonl"), "a") as file:
    file.write(json.dumps([TOOL, *WORDS]) + "\n")

if TOOL == "ssh":
    reach(WORDS[-2], WORDS[-1])
elif TOOL == "scp":
    copy(*WORDS[-1].split(":"))
elif TOOL == "nvidia-smi":
    driver = said("driver", "580.65.06")
    print(f"{driver}, NVIDIA H200" if "name" in " ".join(WORDS) else driver) if driver else fail("NVIDIA-SMI has failed", 9)
elif TOOL == "srun":
    program = next(number for number, word in enumerate(WORDS) if "/python" in word)
    os.execv(WORDS[program], WORDS[program:])
elif WORDS[:2] == ["storage", "cat"]:
    print(said("bucket/" + WORDS[-1].removeprefix("gs://"))[int(flag("range")) :], end="")
elif WORDS[:3] == ["compute", "tpus", "queued-resources"]:
    queued_resource(WORDS[3])
elif WORDS[:4] == ["compute", "tpus", "tpu-vm", "describe"]:
    endpoints = [{"ipAddress": f"10.0.0.{i}"} for i in range(int(said("hosts", "2")))]
    print(json.dumps({"state": said("node", "READY").strip(), "networkEndpoints": endpoints}))
elif WORDS[:4] == ["compute", "tpus", "tpu-vm", "ssh"]:
    reach(flag("worker"), flag("command"))
elif WORDS[:4] == ["compute", "tpus", "tpu-vm", "scp"]:
    copy(flag("worker"), next(word for word in WORDS if ":" in word and not word.startswith(("-", "/"))).partition(":")[2])
else:
    fail(f"ERROR: unknown command {' '.join(WORDS)}")
