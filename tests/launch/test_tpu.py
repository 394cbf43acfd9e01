"""launch/tpu.py against a fake gcloud whose workers run job.sh for real."""

import shlex
import subprocess
from pathlib import Path

import pytest
import resume
import tpu
import tpu_types

from bridge_jax.errors import UserError

PLACE = ["--project=p", "--zone=z", "--poll=0.02"]
WORKDIR = "--workdir=gs://bucket/runs/a"
RUN = ["run", "--config=configs/mini.py", WORKDIR, *PLACE]
HOSTILE = ["it's", '"quoted" $HOME `id` $(id)', "a;b|c&d>e", "line\nbreak", "back\\slash", "  spaces  ", "ünïcode", "-x", "*", "!"]
METRICS = """step() { mkdir -p "$root/bucket/bucket/runs/a"; echo "{\\"step\\": $1}" >>"$root/bucket/bucket/runs/a/metrics.jsonl"; }
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(resume, "GRACE", 1)


def launch(*words) -> int:
    return tpu.main([str(word) for word in words])


@pytest.fixture
def ready(cloud):
    cloud.play(exists="v5litepod-16", states="ACTIVE")
    return cloud


@pytest.mark.parametrize(
    ("name", "accelerator", "runtime", "hosts"),
    [
        ("v4-8", "v4-8", "tpu-ubuntu2204-base", 1),
        ("v4-64", "v4-64", "tpu-ubuntu2204-base", 8),
        ("v5e-8", "v5litepod-8", "v2-alpha-tpuv5-lite", 1),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite", 4),
        ("v5litepod-64", "v5litepod-64", "v2-alpha-tpuv5-lite", 16),
        ("V5P-64", "v5p-64", "v2-alpha-tpuv5", 8),
        ("v6e-16", "v6e-16", "v2-alpha-tpuv6e", 4),
    ],
)
def test_slices_by_the_names_people_use(name, accelerator, runtime, hosts):
    assert tpu_types.tpu_type(name) == tpu_types.TpuType(accelerator, runtime, hosts)


@pytest.mark.parametrize(
    ("name", "nearest"), [("v5p-60", "v5p-64"), ("v5e-17", "v5e-16"), ("v5-lite-16", "v5litepod-16"), ("h100", "launch/gpu.py")]
)
def test_the_nearest_name_is_told(name, nearest):
    with pytest.raises(UserError, match=nearest):
        tpu_types.tpu_type(name)


def test_create_run_status_logs_stop_delete(cloud, capfd, monkeypatch):
    cloud.play(plays="WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    cloud.play(
        train=METRICS
        + 'step 7; trap "echo saved; exit 0" TERM; echo "training on $WORKER"; for i in $(seq 300); do sleep 0.1; done'
    )
    assert launch("create", "--accelerator=v5e-16", "--spot", *PLACE) == 0
    said = capfd.readouterr().err
    assert said.count("WAITING_FOR_RESOURCES") == 1 and "PROVISIONING" in said and "ready, v5litepod-16, 2 worker(s)" in said
    created = next(call for call in cloud.calls() if "create" in call)
    assert created[5:] == [
        "bridge", "--project=p", "--zone=z", "--node-id=bridge", "--accelerator-type=v5litepod-16",
        "--runtime-version=v2-alpha-tpuv5-lite", "--spot", "--quiet",
    ]  # fmt: skip

    monkeypatch.setenv("SECRET", "key of mine")
    overrides = [f"--config.data.train={text}" for text in HOSTILE]
    assert launch(*RUN, *overrides, "--env=SECRET", "--env=LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=false --mine=1") == 0
    assert "started on 2 worker(s)" in capfd.readouterr().err
    for worker in ("0", "1"):
        flags = ["-m", "bridge_jax.train", "--distributed", "--config=configs/mini.py", WORKDIR]
        assert cloud.argv(worker) == [*flags, *overrides]
        cloud.heard(worker, f"training on {worker}", int(worker))
        assert "code[tpu,gcs]" in (cloud.root / f"pip-{worker}").read_text()
    script = cloud.root / "worker-1/bridge_jax_jobs/bridge-1/run.sh"
    assert "export SECRET='key of mine'" in script.read_text()
    assert not any("key of mine" in word for call in cloud.calls() for word in call)
    assert script.read_text().count("xla_enable_async_all_gather=") == 1 and "--mine=1" in script.read_text()  # the user's wins

    assert launch(*RUN) == 2
    assert "a job runs already on worker 0, worker 1" in capfd.readouterr().err
    assert launch("status", WORKDIR, *PLACE) == 0
    said = capfd.readouterr().out
    assert "ACTIVE, node READY" in said and "worker 0: running: training on 0" in said and "step 7" in said
    assert launch("logs", "--worker=1", "--lines=1", *PLACE) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "training on 1"
    assert launch("logs", *PLACE) == 0
    assert "[worker 0] training on 0" in (said := capfd.readouterr().out) and "[worker 1] training on 1" in said
    assert launch("logs", "--worker=2", *PLACE) == 2

    assert launch("stop", *PLACE) == 0
    assert capfd.readouterr().out.count("stopped on request: saved") == 2
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert launch("delete", *PLACE) == 1 and "delete" not in cloud.verbs()
    assert launch("delete", "--yes", *PLACE) == 0 and cloud.verbs() == ["create", "delete"]


def test_the_job_outlives_the_connection_and_follow_ends_with_it(ready, capfd):
    ready.play(train="sleep 0.5; echo late; exit 3", hosts="1")
    assert launch(*RUN) == 0  # every ssh of the launcher has ended here
    assert launch("logs", "--follow", *PLACE) == 0
    assert "late" in capfd.readouterr().out
    assert launch("status", *PLACE) == 0
    assert "worker 0: ended with exit code 3: late" in capfd.readouterr().out


def test_without_tmux_it_goes_on_too(ready, capfd):
    (ready.root / "worker-bin/tmux").write_text("#!/bin/bash\nexit 1\n")
    (ready.root / "worker-bin/tmux").chmod(0o755)
    ready.play(train="echo here; sleep 20", hosts="1")
    assert launch(*RUN) == 0
    ready.heard("0", "here")
    assert launch("status", *PLACE) == 0
    assert "running: here" in capfd.readouterr().out


REFUSALS = {
    "ERROR: (gcloud.x) RESOURCE_EXHAUSTED: Quota limit 'TPUV5s' has been exceeded. Limit: 0 in region z.": "quota does not",
    'ERROR: (gcloud.x) There is no more capacity in the zone "z"; you can try in another zone': "has none free now",
    "ERROR: (gcloud.x) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied": "role TPU Admin",
    "ERROR: (gcloud.x) Cloud TPU API has not been used in project 1 before\nor it is disabled.": "gcloud services enable",
    "ERROR: (gcloud.x) You do not currently have an active account selected.\nPlease run:\n  $ gcloud auth login": "not logged in",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_is_one_line_with_its_mend(cloud, capfd, text):
    cloud.play(refuse=text)
    assert launch("create", "--accelerator=v5p-64", *PLACE) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: v5p-64 in z: ") and said.count("\n") == 1 and REFUSALS[text] in said


def test_a_stockout_while_waiting_is_told(cloud, capfd):
    cloud.play(plays="WAITING_FOR_RESOURCES FAILED", why="Insufficient capacity in zone z")
    assert launch("create", "--accelerator=v5p-64", *PLACE) == 2
    assert "is FAILED: the zone has none free now" in capfd.readouterr().err


def test_create_goes_on_waiting_for_what_was_asked_for(cloud, capfd):
    cloud.play(exists="v5p-64", states="PROVISIONING ACTIVE")
    assert launch("create", "--accelerator=v5p-64", *PLACE) == 0
    assert launch("create", "--accelerator=v5p-128", *PLACE) == 2
    assert "bridge exists in z as v5p-64" in capfd.readouterr().err


def test_waiting_can_be_bounded(cloud, capfd):
    cloud.play(plays="WAITING_FOR_RESOURCES")
    assert launch("create", "--accelerator=v5p-64", "--wait-minutes=0.001", *PLACE) == 2
    assert "stays in the queue" in capfd.readouterr().err


def test_a_dead_worker_is_named_and_the_others_are_shown(ready, capfd):
    assert launch(*RUN) == 0
    ready.play(dead="1")
    capfd.readouterr()
    assert launch("status", *PLACE) == 0
    said = capfd.readouterr().out
    assert "worker 0: running" in said and "worker 1: does not answer: ssh: connect to host 1 port 22" in said
    assert launch("logs", *PLACE) == 1
    assert "worker 1: the connection ended with exit code 255" in capfd.readouterr().err


def test_nothing_starts_when_a_worker_is_dead(ready, capfd):
    ready.play(dead="1")
    assert launch(*RUN) == 2
    said = capfd.readouterr().err
    assert "1 of 2 machines are well" in said and "worker 1: does not answer" in said and said.count("\n") == 1
    assert not (ready.root / "argv-0").exists()


def test_an_answer_lost_during_the_start_does_not_start_twice(ready, capfd):
    ready.play(drop="start 1")
    assert launch(*RUN) == 0
    assert "worker 1: connection lost" in capfd.readouterr().err
    ready.argv("1")
    assert (ready.folder("1", 1) / "log").read_text().count("=== run") == 1


def test_a_worker_that_dies_during_the_start_stops_the_others(ready, capfd):
    ready.play(train='trap "exit 0" TERM; for i in $(seq 300); do sleep 0.1; done', **{"drop": "start 1", "drop-kills": "yes"})
    assert launch(*RUN) == 2
    assert "the job was not started (1 of 2 machines are well): worker 1" in capfd.readouterr().err
    ready.play(dead="")
    assert launch("status", *PLACE) == 0
    assert "worker 0: stopped on request" in capfd.readouterr().out


def test_pip_failing_is_named(ready, capfd):
    ready.play(**{"pip-fails": ""})
    assert launch(*RUN) == 2
    assert "cannot be installed" in (said := capfd.readouterr().err) and "worker 0: failed: pip" in said


def test_a_taken_slice_is_asked_for_again_and_the_job_goes_on(cloud, capfd):
    cloud.play(plays="PROVISIONING ACTIVE\nACTIVE")
    taken = 'echo SUSPENDED >"$root/states"; sleep 30'
    first = f'if [ ! -f "$root/once" ]; then touch "$root/once"; step 3; {taken}; fi'
    cloud.play(train=METRICS + f'{first}; cp "$root/argv-$WORKER" "$root/again"; step 5; echo "done: policy"; exit 0', hosts="1")
    assert launch(*RUN, "--accelerator=v5e-16", "--spot", "--auto-resume", "--config.train.steps=5") == 0
    said = capfd.readouterr().err
    assert "the slice was taken away at step 3; restart 1 of 50" in said and "finished at step 5" in said
    assert cloud.verbs() == ["create", "delete", "create"]
    creates = [call for call in cloud.calls() if "create" in call]
    assert creates[0] == creates[1] and "--spot" in creates[0]
    assert (cloud.root / "again").read_text().split("\0")[:-1] == cloud.argv("0")
    assert cloud.argv("0")[-1] == "--config.train.steps=5"


def test_a_node_that_is_gone_counts_as_taken(cloud, capfd):
    first = 'if [ ! -f "$root/once" ]; then touch "$root/once"; echo PREEMPTED >"$root/node"; sleep 30; fi'
    cloud.play(train=f'{first}; echo "done: policy"', hosts="1")
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume") == 0
    assert cloud.verbs() == ["create", "delete", "create"]


def test_a_slice_that_was_taken_while_nobody_watched_is_replaced(cloud, capfd):
    cloud.play(exists="v5litepod-16", states="SUSPENDED", train='echo "done: policy"', hosts="1")
    assert launch("status", *PLACE) == 0
    assert "bridge in z: SUSPENDED" in capfd.readouterr().out
    assert launch("logs", *PLACE) == 2
    assert "bridge in z is SUSPENDED: delete it and create it again" in capfd.readouterr().err
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume") == 0
    assert cloud.verbs() == ["delete", "create"]
    assert "the TPU is still there: python launch/tpu.py delete" in capfd.readouterr().err


def test_the_jobs_own_failure_is_not_retried_for_ever(cloud, capfd):
    cloud.play(train=METRICS + "step 3; echo boom; exit 1", hosts="1")
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume") == 1
    said = capfd.readouterr().err
    assert "ended with exit code 1: boom" in said and "twice without getting beyond step 3" in said
    assert (cloud.folder("0") / "log").read_text().count("=== run") == 3  # the first brought a step
    assert cloud.verbs() == ["create"]


def test_a_wrong_command_is_given_up_at_once(cloud, capfd):
    cloud.play(train='echo "error: config has no field"; exit 2')
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume") == 1
    assert "the command itself is wrong" in capfd.readouterr().err
    assert (cloud.folder("0") / "log").read_text().count("=== run") == 1


def test_a_lost_process_is_not_a_wrong_command(cloud, capfd):
    lost = 'echo "error: process 0 lost contact with another process of the run"; exit 2'
    cloud.play(train=f'if [ ! -f "$root/once" ]; then touch "$root/once"; {lost}; fi; echo "done: policy"', hosts="1")
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume") == 0


def test_restarts_are_bounded(cloud, capfd):
    cloud.play(plays="\n".join(["ACTIVE"] * 9), train='echo SUSPENDED >"$root/states"; sleep 30', hosts="1")
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume", "--max-restarts=2") == 1
    assert "given up after 2 restarts" in capfd.readouterr().err
    assert cloud.verbs().count("create") == 3


def test_no_capacity_for_the_new_slice_is_waited_for(cloud, capfd):
    cloud.play(plays="ACTIVE\nWAITING_FOR_RESOURCES FAILED\nACTIVE", why="no more capacity in the zone", hosts="1")
    cloud.play(
        train='if [ ! -f "$root/once" ]; then touch "$root/once"; echo SUSPENDED >"$root/states"; sleep 30; fi; echo "done: policy"'
    )
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume") == 0
    assert "has none free now" in capfd.readouterr().err


def test_an_interrupted_launcher_goes_on_watching(ready, capfd):
    # Until it has been asked twice beyond the three commands of its start.
    asked = """until [ "$(grep -c '"ssh"' "$root/calls.jsonl")" -ge 5 ]; do sleep 0.05; done"""
    ready.play(train=f'{asked}; echo "done: policy"', hosts="1")
    assert launch(*RUN) == 0
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume", "--delete-after") == 0
    said = capfd.readouterr().err
    assert "a job runs already: watching it" in said and "finished at step 0" in said
    assert ready.verbs() == ["delete"]


def test_a_job_that_is_stopped_is_not_resumed(cloud, capfd):
    cloud.play(train='touch "$PWD/../stopped"; echo saved; exit 0', hosts="1")  # as another launcher's stop leaves it
    assert launch(*RUN, "--accelerator=v5e-16", "--auto-resume") == 0
    assert "stopped at step 0" in capfd.readouterr().err
    assert (cloud.folder("0") / "log").read_text().count("=== run") == 1


def test_a_dry_run_prints_what_a_real_one_calls(cloud, capfd):
    cloud.play(hosts="4")
    words = [
        ["create", "--accelerator=v5e-16", "--spot"],
        [*RUN, "--accelerator=v5e-16", "--config.data.train=it's"],
        ["status", WORKDIR],
    ]
    words += [["logs"], ["stop"], ["delete"]]
    for command in words:
        assert launch(*command, *PLACE, "--dry-run") == 0
    printed = [shlex.split(line) for line in capfd.readouterr().out.splitlines() if line.startswith("gcloud")]
    assert cloud.calls() == []
    for command in words:
        # A dry run knows the workers from --accelerator alone.
        cloud.play(hosts="4" if "run" in command else "1", train="trap 'exit 0' TERM; sleep 1")
        assert launch(*command, *PLACE, *(["--yes"] if command == ["delete"] else [])) == 0
    called = cloud.calls()
    assert len(printed) == len(called)

    def normal(calls):
        return sorted([word.partition("job.sh start")[0] for word in call] for call in calls)

    assert normal(printed) == normal(called)


def test_wrong_use_is_one_line(cloud, capfd, monkeypatch):
    new = ["create", "--accelerator=v5e-16"]
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT", raising=False)
    cases = [
        ([*new, "--zone=z"], "no project: give --project=..., or export CLOUDSDK_CORE_PROJECT=..."),
        ([*new, "--project=p"], "no zone: give --zone=..., or export CLOUDSDK_COMPUTE_ZONE=..."),
        (["create", *PLACE], "no accelerator"),
        (["create", "--accelerator=v5e-15", *PLACE], "did you mean v5e-16?"),
        ([*new, "--name=My TPU", *PLACE], "--name=My TPU"),
        (["status", "--config.a.b=1", *PLACE], "only run takes overrides"),
        (["run", "--config=configs/mini.py", *PLACE], "no workdir"),
        (["run", "--config=configs/mini.py", "--workdir=runs/a", *PLACE], "workers share no disk"),
        (["run", "--config=configs/mini.py", "--bucket=b", WORKDIR, *PLACE], "not both"),
        (["run", "--config=configs/mine.py", WORKDIR, *PLACE], "--config=configs/mine.py is not in commit"),
        ([*RUN, "--commit=nowhere"], "no such commit or branch"),
        ([*RUN, "--config.credit.gama=1"], "config has no field 'credit.gama'; did you mean 'credit.gamma'?"),
        ([*RUN, "--env=NOT_SET_ANYWHERE"], "is not set here"),
        ([*RUN, "--auto-resume"], "no accelerator"),
        ([*RUN, "--delete-after"], "needs --auto-resume"),
        (RUN, "there is no TPU bridge in z: python launch/tpu.py create"),
    ]
    for words, expected in cases:
        assert launch(*words) == 2, words
        said = capfd.readouterr().err
        assert expected in said and said.startswith("error: ") and said.count("\n") == 1, said
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch(*new, *PLACE) == 2
    assert "gcloud is not installed: install the Google Cloud CLI" in capfd.readouterr().err


def test_a_tree_that_differs_from_its_commit_is_not_sent(ready, capfd):
    with (ready.repository / "configs/mini.py").open("a") as file:
        file.write("# changed")
    (ready.repository / "new.py").write_text("")
    assert launch(*RUN) == 2
    assert "not in any commit: configs/mini.py, new.py" in capfd.readouterr().err
    assert launch(*RUN, "--allow-dirty") == 0
    sent = ready.root / "worker-0/bridge_jax_jobs/bridge-0/code"
    assert "changed" not in (sent / "configs/mini.py").read_text() and not (sent / "new.py").exists()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ready.repository, capture_output=True, text=True).stdout[:12]
    assert f"commit {head}" in capfd.readouterr().err


def test_the_end_of_a_run_is_known_by_what_the_loop_says():
    """job.sh takes a log line that begins with `done: ` for the last step; the loop must go on saying it."""
    loop = Path(tpu.__file__).parent.parent / "bridge_jax/training/loop.py"
    assert 'display.say(f"done: ' in loop.read_text()
