"""Train on NVIDIA GPUs: `python launch/gpu.py check|run|status|logs|stop`, on this machine, on several over ssh, or under SLURM."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import checkout
import commands
import fleet
import gpu_check
import job
import xla_flags
from commands import Runner

from bridge_jax.errors import UserError, main_guard

FLAGS, MEMORY = "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"
SSH = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
STOP_SECONDS = 120

EXAMPLES = """examples:
  python launch/gpu.py check
  python launch/gpu.py run --config=configs/qwen2_5_3b.py --workdir=runs/3b                     (this machine, all GPUs)
  python launch/gpu.py run --config=configs/qwen2_5_3b.py --workdir=runs/3b --detach            (goes on when you log out)
  python launch/gpu.py run --config=configs/qwen2_5_7b.py --workdir=/shared/7b --hosts=a,b,c    (sent there over ssh)
  python launch/gpu.py run --config=configs/qwen2_5_7b.py --workdir=/shared/7b --slurm --nodes=4 --gpus=8
  python launch/gpu.py status|logs|stop [--hosts=a,b,c]
One process a machine has all its GPUs. Interrupted or stopped? The same run goes on from the newest checkpoint.
Add --dry-run to any of them to see every command and run none."""


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    args = job.parsed(_parser(), argv)
    if not re.fullmatch(r"[A-Za-z0-9][-\w]*", args.name, re.ASCII):
        raise UserError(f"--name={args.name}: letters, digits and dashes")
    return COMMANDS[args.command](args, Runner(args.dry_run))


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--name", default="bridge", help="of the job (default: bridge)")
    shared.add_argument(
        "--hosts", default="", metavar="A,B", help="machines that ssh reaches, [user@]host; the first one coordinates"
    )
    shared.add_argument("--dry-run", action="store_true", help="print every command, run none")
    looks = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="python launch/gpu.py", description=__doc__, **looks)
    verbs = parser.add_subparsers(dest="command", required=True)

    def add(name: str, what: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=what, description=what, parents=[shared], **looks)

    add("check", "are driver, JAX and its CUDA plugin fit for each other?")
    run = add("run", "set the compiler's flags and train")
    run.add_argument("--config", required=True, metavar="FILE", help="--config.group.field=value overrides a field")
    run.add_argument("--workdir", required=True, metavar="FOLDER", help="the run's folder; with several machines one that all see")
    run.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable of the job's environment; repeatable"
    )
    run.add_argument("--detach", action="store_true", help="on this machine: go on when the terminal is closed")
    run.add_argument("--commit", "--branch", default="HEAD", help="with --hosts: what to run (default: HEAD)")
    run.add_argument("--allow-dirty", action="store_true", help="with --hosts: run HEAD although files differ from it")
    run.add_argument("--coordinator", default="", metavar="ADDRESS", help="with --hosts: of the first one, as the others see it")
    run.add_argument("--port", type=int, default=8476, help="with --hosts: of the coordinator (default: 8476)")
    run.add_argument(
        "--slurm", action="store_true", help="start it with srun, detached; inside an allocation or with one of its own"
    )
    run.add_argument("--nodes", type=int, default=1, help="with --slurm (default: 1)")
    run.add_argument("--gpus", type=int, default=8, help="with --slurm: of each node (default: 8)")
    run.add_argument(
        "--srun-arg", action="append", default=[], metavar="FLAG", help="passed to srun, such as --partition=gpu; repeatable"
    )
    add("status", "what the job does")
    logs = add("logs", "what the job says")
    logs.add_argument("--worker", default="all", metavar="all|N", help="which of the hosts (default: all)")
    logs.add_argument("--follow", action="store_true", help="until the job ends, or Ctrl-C")
    logs.add_argument("--lines", type=int, default=50, help="from the end (default: 50)")
    add("stop", "have the job save a checkpoint and end")
    return parser


def _hosts(args: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(name.strip() for name in args.hosts.split(",") if name.strip())
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][\w.@:-]*", name, re.ASCII):  # none that ssh would take for an option
            raise UserError(f"--hosts: {name!r} is no host's name")
    if len(set(names)) < len(names):
        raise UserError(f"--hosts={args.hosts}: one of them is there twice; a process has all GPUs of its machine")
    return names


def _machines(args: argparse.Namespace, runner: Runner) -> fleet.Fleet:
    """The hosts, or this machine."""
    hosts = _hosts(args)
    if hosts:
        return fleet.Fleet(
            hosts,
            lambda i, command: ["ssh", *SSH, hosts[i], command],
            lambda i, files, folder: ["scp", *SSH, "-q", *files, f"{hosts[i]}:{folder}/"],
            runner,
        )
    home = Path.home()
    return fleet.Fleet(
        ("here",),
        lambda i, command: ["bash", "-c", f"cd && {command}"],
        lambda i, files, folder: ["cp", *files, str(home / folder)],
        runner,
    )


def _environment(args: argparse.Namespace) -> dict[str, str]:
    env = job.environment(args.env, args.dry_run)
    env[FLAGS] = xla_flags.merged(xla_flags.GPU, env.get(FLAGS, os.environ.get(FLAGS, "")))
    env.setdefault(MEMORY, os.environ.get(MEMORY, "0.92"))
    return env


def check(args: argparse.Namespace, runner: Runner) -> int:
    if not _hosts(args):
        return gpu_check.main()
    machines = _machines(args, runner)
    found = _look(machines, args.name, {})
    for name, result in zip(machines.names, found):
        if not runner.dry:
            print(f"{name}: {commands.complaint(result) if result.code else result.out.strip()}")
    return max(result.code for result in found)


def run(args: argparse.Namespace, runner: Runner) -> int:
    hosts = _hosts(args)
    if args.slurm and hosts:
        raise UserError("give --hosts or --slurm, not both")
    if args.slurm and (args.nodes < 1 or args.gpus < 1):
        raise UserError("--nodes and --gpus must be at least 1")
    if len(hosts) > 1 and not (args.workdir.startswith(("gs://", "/"))):
        raise UserError(f"--workdir={args.workdir}: give a folder that all hosts see by the same name: /shared/... or gs://...")
    if hosts:
        return _run_hosts(args, runner, hosts)
    return _run_here(args, runner)


def _run_here(args: argparse.Namespace, runner: Runner) -> int:
    """On this machine or, through srun, from it."""
    env = _environment(args)
    words = job.train_words(sys.executable, args.config, args.workdir, args.overrides, distributed=args.slurm)
    if args.slurm:
        if not (runner.dry or shutil.which("srun")):
            raise UserError(f"srun is not installed: {commands.MISSING['srun']}")
        # jax gives a process that SLURM started one device, unless it is told which it has.
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(args.gpus)))
        nodes = [f"--nodes={args.nodes}", f"--ntasks={args.nodes}", "--ntasks-per-node=1", f"--gpus-per-node={args.gpus}"]
        words = ["srun", *nodes, "--kill-on-bad-exit=0", f"--job-name={args.name}", *args.srun_arg, *words]
    else:
        _refuse_unfit(env)
    if not (args.detach or args.slurm):
        if runner.dry:
            runner.run(["env", *(f"{name}={value}" for name, value in env.items()), *words])
            return 0
        sys.stdout.flush()
        os.environ.update(env)
        os.execv(words[0], words)
    script = job.cache() / args.name / "run.sh"
    job.write_script(script, job.script(words, env, where=Path.cwd()), runner.dry)
    machines = _machines(args, runner)
    fleet.prepare(machines, args.name)
    fleet.copy(machines, args.name, lambda _: [job.SCRIPT, script])
    fleet.start(machines, args.name, job.run_id("here", runner.dry))
    if not runner.dry:
        runner.say("started. Next: python launch/gpu.py logs --follow")
    return 0


def _refuse_unfit(env: dict[str, str]) -> None:
    wrong = gpu_check.problem(gpu_check.gpus(), gpu_check.versions())
    if wrong:
        raise UserError(wrong)
    unknown = gpu_check.unknown_flags(env[FLAGS])
    if unknown:
        raise UserError(f"this jaxlib does not know {' '.join(unknown)}: take it out of {FLAGS}")


def _run_hosts(args: argparse.Namespace, runner: Runner, hosts: tuple[str, ...]) -> int:
    commit = checkout.commit(runner, args.commit, args.allow_dirty)
    checkout.refuse_missing(runner, commit, args.config)
    checkout.refuse_config(args.config, args.overrides)
    env = _environment(args)
    code = job.cache() / args.name / "code.tar.gz"
    checkout.archive(runner, commit, code)
    words = job.train_words("../venv/bin/python", args.config, args.workdir, args.overrides, distributed=len(hosts) > 1)
    coordinator = args.coordinator or hosts[0].rpartition("@")[2]
    scripts = [job.cache() / args.name / str(i) / "run.sh" for i in range(len(hosts))]
    for i, script in enumerate(scripts):
        place = {
            "JAX_COORDINATOR_ADDRESS": f"{coordinator}:{args.port}",
            "JAX_NUM_PROCESSES": str(len(hosts)),
            "JAX_PROCESS_ID": str(i),
        }
        job.write_script(script, job.script(words, {**env, **(place if len(hosts) > 1 else {})}), runner.dry)
    machines = _machines(args, runner)
    fleet.prepare(machines, args.name)
    cuda = _cuda(machines)
    fleet.copy(machines, args.name, lambda i: [code, job.SCRIPT, scripts[i]])
    fleet.install(machines, args.name, f"cuda{cuda},gcs")
    bad = [f"{name}: {commands.complaint(found)}" for name, found in zip(hosts, _look(machines, args.name, env)) if found.code]
    if bad:
        raise UserError("; ".join(bad[:4]))
    fleet.start(machines, args.name, job.run_id(commit, runner.dry))
    if not runner.dry:
        runner.say(
            f"started on {len(hosts)} host(s), commit {commit[:12]}. Next: python launch/gpu.py logs --hosts={args.hosts} --follow"
        )
    return 0


def _cuda(machines: fleet.Fleet) -> int:
    """The CUDA generation that all drivers run.

    Raises:
      UserError: a machine without a driver, or with one that is too old.
    """
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    found = commands.parallel(lambda i: machines.runner.run(machines.ssh(i, query), fleet.ASK), machines.all())
    if machines.runner.dry:
        return max(gpu_check.DRIVERS)
    usable = []
    for name, result in zip(machines.names, found):
        driver = next((line.strip() for line in result.out.splitlines() if re.match(r"\d+\.", line)), None)
        wrong = gpu_check.NO_DRIVER if driver is None else None if gpu_check.cuda_for(driver) else f"driver {driver} is too old"
        if wrong:
            raise UserError(f"{name}: {wrong} [{commands.complaint(result)}]")
        usable.append(gpu_check.cuda_for(driver))
    return min(usable)


def _look(machines: fleet.Fleet, name: str, env: dict[str, str]) -> list[commands.Result]:
    """gpu_check on every machine, in the job's environment and with the flags in `env`."""

    def look(i: int) -> commands.Result:
        folder = job.folder(name, i)
        words = [f"{FLAGS}={env.get(FLAGS, '')}", f"{folder}/venv/bin/python", f"{folder}/code/launch/gpu_check.py"]
        return machines.runner.run(machines.ssh(i, shlex.join(["env", *words])), fleet.ASK)

    return commands.parallel(look, machines.all())


def status(args: argparse.Namespace, runner: Runner) -> int:
    machines = _machines(args, runner)
    for name, found in zip(machines.names, fleet.status(machines, args.name)):
        if not runner.dry:
            print(f"{name}: {job.describe(found)}")
    return 0


def logs(args: argparse.Namespace, runner: Runner) -> int:
    machines = _machines(args, runner)
    return fleet.logs(machines, args.name, fleet.chosen(machines, args.worker), args.lines, args.follow)


def stop(args: argparse.Namespace, runner: Runner) -> int:
    machines = _machines(args, runner)
    return fleet.report_stop(machines, fleet.stop(machines, args.name, STOP_SECONDS))


COMMANDS = {"check": check, "run": run, "status": status, "logs": logs, "stop": stop}


if __name__ == "__main__":
    sys.exit(main())
