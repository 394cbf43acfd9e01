"""launch/gpu.py against fake ssh, srun and nvidia-smi; the compiler's flags against the installed jaxlib."""

import importlib.util
import os
import shlex
import subprocess
import sys

import gpu
import gpu_check
import pytest
import xla_flags
from fake_machines import wait_for
from hypothesis import given
from hypothesis import strategies as st

RUN = ["run", "--config=configs/mini.py", "--workdir=/shared/run"]
GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
H200 = gpu_check.Gpus("580.65.06", ("NVIDIA H200",) * 8)


def launch(*words) -> int:
    return gpu.main([str(word) for word in words])


@pytest.mark.parametrize(
    ("found", "packages", "expected"),
    [
        (H200, GOOD, None),
        (None, GOOD, "no NVIDIA driver"),
        (gpu_check.Gpus("470.1", ("T4",)), GOOD, "driver 470.1 is too old: JAX needs 525"),
        (gpu_check.Gpus("550.54.15", ("A100",)), GOOD, "driver 550.54.15 is too old for CUDA 13 (needs 580)"),
        (H200, {}, "JAX is not installed: pip install -e '.[cuda13]'"),
        (gpu_check.Gpus("550.54.15", ("A100",)), {"jax": "0.10.2", "jaxlib": "0.10.2"}, "pip install -e '.[cuda12]'"),
        (H200, {**GOOD, "jax-cuda13-plugin": "0.10.1"}, "jax-cuda13-plugin is 0.10.1, jaxlib 0.10.2"),
        (H200, {k: v for k, v in GOOD.items() if not k.endswith("pjrt")}, "pip install 'jax[cuda13]==0.10.2'"),
        (H200, {**GOOD, "jax-cuda12-plugin": "0.10.2"}, "pip uninstall jax-cuda12-plugin"),
    ],
)
def test_what_does_not_fit_is_named_with_the_command(found, packages, expected):
    said = gpu_check.problem(found, packages)
    assert said is None if expected is None else expected in said


def test_nvidia_smi_is_read(cloud):
    assert gpu_check.gpus() == gpu_check.Gpus("580.65.06", ("NVIDIA H200",))
    cloud.play(driver="")
    assert gpu_check.gpus() is None


def test_one_machine_says_what_is_missing_before_it_starts(cloud, capfd, monkeypatch):
    monkeypatch.setattr(gpu_check, "versions", lambda: {"jax": "0.10.2", "jaxlib": "0.10.2"})
    assert launch(*RUN) == 2
    assert "error: JAX has no CUDA plugin and would compute on the CPU: pip install -e '.[cuda13]'" in capfd.readouterr().err
    cloud.play(driver="")
    assert launch(*RUN) == 2
    assert "no NVIDIA driver" in capfd.readouterr().err


def test_one_machine_becomes_the_training(cloud, monkeypatch):
    called = []

    def become(*words):
        called.extend(words)
        sys.exit(0)

    monkeypatch.setattr(gpu_check, "problem", lambda *_: None)
    monkeypatch.setattr(gpu_check, "unknown_flags", lambda _: [])
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "environ", dict(os.environ, XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=false"))
    with pytest.raises(SystemExit):
        launch(*RUN, "--config.train.steps=3")
    assert called == [sys.executable, [sys.executable, "-m", "bridge_jax.train", *RUN[1:], "--config.train.steps=3"]]
    flags = os.environ["XLA_FLAGS"].split()
    assert "--xla_gpu_enable_latency_hiding_scheduler=false" in flags  # the user's
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" not in flags
    assert "--xla_gpu_enable_pipelined_all_gather=true" in flags
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"


def test_several_hosts_start_status_logs_stop(cloud, capfd):
    cloud.play(train='trap "echo saved; exit 0" TERM; echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES"; while :; do sleep 0.1; done')
    hosts = "--hosts=a,me@b,c"
    assert launch(*RUN, hosts, "--config.data.train=it's $HOME") == 0
    assert "started on 3 host(s)" in capfd.readouterr().err
    for number, host in enumerate(("a", "me@b", "c")):
        assert cloud.argv(host) == ["-m", "bridge_jax.train", "--distributed", *RUN[1:], "--config.data.train=it's $HOME"]
        seen = cloud.environment(host)
        cloud.heard(host, f"{number} of 3", number)
        assert f'JAX_PROCESS_ID="{number}"' in seen and 'JAX_COORDINATOR_ADDRESS="a:8476"' in seen
        assert "xla_gpu_enable_pipelined_all_gather=true" in seen
        assert "code[cuda13,gcs]" in (cloud.root / f"pip-{host}").read_text()
    cloud.play(dead="c")
    assert launch("status", hosts) == 0
    assert "a: running: 0 of 3\nme@b: running: 1 of 3\nc: does not answer" in capfd.readouterr().out
    cloud.play(dead="")
    assert launch("logs", hosts, "--worker=2") == 0
    assert "2 of 3" in capfd.readouterr().out
    assert launch("stop", hosts) == 0
    assert capfd.readouterr().out.count("stopped on request: saved") == 3


def test_the_oldest_driver_decides_and_a_host_without_one_is_named(cloud, capfd):
    cloud.play(driver="550.54.15")
    assert launch(*RUN, "--hosts=a") == 0
    assert "code[cuda12,gcs]" in (cloud.root / "pip-a").read_text()
    assert cloud.argv("a")[:3] == ["-m", "bridge_jax.train", "--config=configs/mini.py"]  # alone: not --distributed
    cloud.play(driver="")
    assert launch(*RUN, "--hosts=b,c", "--name=other") == 2
    assert "error: b: no NVIDIA driver" in capfd.readouterr().err


def test_a_host_that_is_not_fit_is_named_and_nothing_starts(cloud, capfd):
    cloud.play(unfit="jax-cuda13-plugin is 0.10.1, jaxlib 0.10.2")
    assert launch(*RUN, "--hosts=a,b") == 2
    assert "error: a: error: jax-cuda13-plugin is 0.10.1" in capfd.readouterr().err
    assert not (cloud.root / "argv-a").exists()


def test_slurm_and_a_detached_job_on_this_machine(cloud, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("WORKER", "here")
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(sys, "executable", str(cloud.root / "worker-bin/python3.13"))
    cloud.play(train='trap "echo saved; exit 0" TERM; echo going; for i in $(seq 300); do sleep 0.1; done')
    assert launch(*RUN, "--slurm", "--nodes=4", "--gpus=8", "--srun-arg=--partition=gpu") == 0
    call = next(call for call in cloud.calls() if call[0] == "srun")
    assert call[1:9] == [
        "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--kill-on-bad-exit=0", "--job-name=bridge",
        "--partition=gpu", sys.executable,
    ]  # fmt: skip
    assert cloud.argv("here") == ["-m", "bridge_jax.train", "--distributed", *RUN[1:]]
    assert 'JAX_LOCAL_DEVICE_IDS="0,1,2,3,4,5,6,7"' in cloud.environment("here")
    wait_for(lambda: "going" in (tmp_path / "home/bridge_jax_jobs/bridge-0/log").read_text())
    assert launch("status") == 0 and "here: running: going" in capfd.readouterr().out
    assert launch("stop") == 0 and "here: stopped on request: saved" in capfd.readouterr().out
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert launch(*RUN, "--slurm") == 2
    assert "srun is not installed" in capfd.readouterr().err


def test_a_dry_run_prints_what_a_real_one_calls(cloud, capfd):
    words = [*RUN, "--hosts=a,b", "--config.data.train=it's"]
    assert launch(*words, "--dry-run") == 0
    printed = [shlex.split(line) for line in capfd.readouterr().out.splitlines() if line.startswith(("ssh", "scp"))]
    assert cloud.calls() == []
    assert launch(*words) == 0

    def normal(calls):
        return sorted([word.partition("job.sh start")[0] for word in call] for call in calls)

    called = [call for call in cloud.calls() if call[0] in ("ssh", "scp")]
    assert normal(printed) == normal(called)


def test_wrong_use_is_one_line(cloud, capfd):
    cases = [
        (["run", "--config=configs/mini.py", "--workdir=runs/a", "--hosts=a,b"], "give a folder that all hosts see"),
        ([*RUN, "--hosts=a,-oProxyCommand=x"], "'-oProxyCommand=x' is no host's name"),
        ([*RUN, "--hosts=a,a"], "one of them is there twice"),
        ([*RUN, "--hosts=a", "--slurm"], "not both"),
        ([*RUN, "--slurm", "--nodes=0"], "must be at least 1"),
        (["run", "--config=configs/nope.py", "--workdir=/shared/a", "--hosts=a"], "is not in commit"),
        (["status", "--name=../x"], "--name=../x"),
        (["logs", "--hosts=a,b", "--worker=2"], "must be all, or 0 to 1"),
    ]
    for words, expected in cases:
        assert launch(*words) == 2, words
        said = capfd.readouterr().err
        assert expected in said and said.count("\n") == 1, said


def test_this_jaxlib_knows_every_gpu_flag():
    """XLA aborts a process on a flag that it does not know: one process has them all; another, with one more, names that one."""
    flags = xla_flags.merged(xla_flags.GPU)
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", "import jax; print(jax.devices())"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "CpuDevice" in done.stdout, done.stderr
    assert gpu_check.unknown_flags(f"{flags} --xla_gpu_no_such_flag=1") == ["--xla_gpu_no_such_flag=1"]


COMPILE = """
import jax, numpy as np
from jax.experimental import topologies
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
sharding = jax.sharding.SingleDeviceSharding(devices[0])
jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)).compile()
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install -e '.[tpu]' brings libtpu")
def test_libtpu_knows_every_tpu_flag():
    """libtpu ends a process on a flag that it does not know: as above, with its compiler."""
    given = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

    def compiled(flags):
        env = {**os.environ, **given, "LIBTPU_INIT_ARGS": flags}
        return subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)

    done = compiled(xla_flags.merged(xla_flags.TPU))
    assert done.returncode == 0, done.stderr
    done = compiled(f"{xla_flags.merged(xla_flags.TPU)} --xla_tpu_no_such_flag=1")
    assert done.returncode and "Unknown command line flag 'xla_tpu_no_such_flag'" in done.stderr


NAMES = st.sampled_from([*xla_flags.GPU, "xla_dump_to", "xla_gpu_autotune_level"])


@given(st.lists(st.tuples(NAMES, st.sampled_from(["true", "false", "3"]))))
def test_the_users_flags_win(given_flags):
    users = " ".join(f"--{name}={value}" for name, value in given_flags)
    flags = xla_flags.merged(xla_flags.GPU, users).split()
    assert flags[len(flags) - len(given_flags) :] == users.split()  # as they are, and last
    ours = [flag.removeprefix("--").partition("=")[0] for flag in flags[: len(flags) - len(given_flags)]]
    assert sorted(ours) == sorted(set(xla_flags.GPU) - {name for name, _ in given_flags})
