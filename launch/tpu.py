"""Train on Cloud TPUs: `python launch/tpu.py create|run|status|logs|ssh|stop|delete`. Needs Python and gcloud, nothing else."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import checkout
import fleet
import job
import resume
import xla_flags
from commands import Runner
from gcloud import Tpu, read_end
from tpu_types import TpuType, tpu_type

from bridge_jax.errors import UserError, main_guard

FLAGS = "LIBTPU_INIT_ARGS"
EXTRAS = "tpu,gcs"
STOP_SECONDS = 120

EXAMPLES = """examples:
  export CLOUDSDK_CORE_PROJECT=my-project CLOUDSDK_COMPUTE_ZONE=us-east5-a          (or --project, --zone each time)
  python launch/tpu.py create --accelerator=v5p-64 --spot
  python launch/tpu.py run    --config=configs/qwen2_5_7b.py --workdir=gs://my-bucket/runs/7b --config.credit.gamma=0.1
  python launch/tpu.py status --workdir=gs://my-bucket/runs/7b
  python launch/tpu.py logs   --worker=all --follow
  python launch/tpu.py stop                                   (the job saves a checkpoint; run again to go on)
  python launch/tpu.py delete
  python launch/tpu.py run    --config=configs/qwen2_5_7b.py --bucket=my-bucket --accelerator=v5p-64 --spot --auto-resume
Add --dry-run to any of them to see every command and run none."""


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    args = job.parsed(_parser(), argv)
    tpu = Tpu(*_place(args), Runner(args.dry_run), args.poll)
    return COMMANDS[args.command](args, tpu)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--name", default="bridge", help="of the TPU and of the job on it (default: bridge)")
    shared.add_argument("--project", default=os.environ.get("CLOUDSDK_CORE_PROJECT", ""), help="default: $CLOUDSDK_CORE_PROJECT")
    shared.add_argument("--zone", default=os.environ.get("CLOUDSDK_COMPUTE_ZONE", ""), help="default: $CLOUDSDK_COMPUTE_ZONE")
    shared.add_argument("--dry-run", action="store_true", help="print every command, run none")
    shared.add_argument("--poll", type=float, default=20.0, metavar="SECONDS", help="between two looks at the TPU (default: 20)")
    slice_ = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    slice_.add_argument("--accelerator", default="", metavar="TYPE", help="v4-8, v5e-16, v5p-64, v6e-16, ...")
    slice_.add_argument("--spot", action="store_true", help="cheaper, and may be taken away at any time")
    slice_.add_argument("--create-arg", action="append", default=[], metavar="FLAG", help="passed to gcloud's create as it is")
    slice_.add_argument("--wait-minutes", type=float, metavar="N", help="wait no longer for the TPU (default: as long as it takes)")
    place = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    place.add_argument("--workdir", default="", metavar="gs://...", help="the run's folder in a bucket")
    place.add_argument("--bucket", default="", help="short for --workdir=gs://BUCKET/runs/NAME")
    workers = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    workers.add_argument("--worker", default="all", metavar="all|N", help="default: all")

    parser = argparse.ArgumentParser(
        prog="python launch/tpu.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="command", required=True)

    def add(name: str, what: str, *parents) -> argparse.ArgumentParser:
        looks = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        return verbs.add_parser(name, help=what, description=what, parents=[shared, *parents], **looks)

    add("create", "ask for a TPU and wait until it can be used", slice_)
    run = add("run", "send a commit to all workers, install it, start training", slice_, place)
    run.add_argument("--config", required=True, metavar="FILE", help="in the commit; --config.group.field=value overrides a field")
    run.add_argument("--commit", "--branch", default="HEAD", help="what to run (default: HEAD)")
    run.add_argument("--allow-dirty", action="store_true", help="run HEAD although files differ from it")
    run.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable of the job's environment; repeatable"
    )
    run.add_argument("--auto-resume", action="store_true", help="stay, and go on on a new TPU when this one is taken away")
    run.add_argument("--delete-after", action="store_true", help="with --auto-resume: delete the TPU once the job has finished")
    run.add_argument("--max-restarts", type=int, default=50, metavar="N", help="with --auto-resume (default: 50)")
    add("status", "what the TPU and the job do", place)
    logs = add("logs", "what the job says", workers)
    logs.add_argument("--follow", action="store_true", help="until the job ends, or Ctrl-C")
    logs.add_argument("--lines", type=int, default=50, help="from the end (default: 50)")
    add("ssh", "a shell on a worker (default: 0)", workers)
    add("stop", "have the job save a checkpoint and end")
    delete = add("delete", "delete the TPU")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _place(args: argparse.Namespace) -> tuple[str, str, str]:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,60}[a-z0-9])?", args.name):
        raise UserError(f"--name={args.name}: small letters, digits and dashes, beginning with a letter")
    for flag, variable in (("project", "CLOUDSDK_CORE_PROJECT"), ("zone", "CLOUDSDK_COMPUTE_ZONE")):
        if not getattr(args, flag):
            raise UserError(f"no {flag}: give --{flag}=..., or export {variable}=...")
    return args.name, args.project, args.zone


def _kind(args: argparse.Namespace) -> TpuType:
    if not args.accelerator:
        raise UserError("no accelerator: give --accelerator=v5e-16, v5p-64, ...")
    return tpu_type(args.accelerator)


def _workdir(args: argparse.Namespace, required: bool = True) -> str:
    if args.workdir and args.bucket:
        raise UserError("give --workdir or --bucket, not both")
    if args.bucket:
        return f"gs://{args.bucket.removeprefix('gs://').strip('/')}/runs/{args.name}"
    if args.workdir and not re.fullmatch(r"gs://[^/]+/.+", args.workdir):
        raise UserError(f"--workdir={args.workdir}: workers share no disk; give a folder in a bucket, gs://bucket/folder")
    if required and not args.workdir:
        raise UserError("no workdir: give --workdir=gs://bucket/folder, or --bucket=NAME")
    return args.workdir.rstrip("/")


def create(args: argparse.Namespace, tpu: Tpu) -> int:
    kind = _kind(args)
    tpu.create(kind, args.spot, args.create_arg)
    state = tpu.wait(args.wait_minutes)
    if not tpu.runner.dry:
        tpu.runner.say(f"{args.name}: ready, {kind.accelerator}, {state.hosts} worker(s). Next: python launch/tpu.py run")
    return 0


def run(args: argparse.Namespace, tpu: Tpu) -> int:
    workdir = _workdir(args)
    kind = _kind(args) if args.accelerator or args.auto_resume else None
    if args.delete_after and not args.auto_resume:
        raise UserError("--delete-after needs --auto-resume: without it nobody sees the job finish")
    if args.max_restarts < 0:
        raise UserError(f"--max-restarts={args.max_restarts}: must be at least 0")
    commit = checkout.commit(tpu.runner, args.commit, args.allow_dirty)
    checkout.refuse_missing(tpu.runner, commit, args.config)
    checkout.refuse_config(args.config, args.overrides)
    files = _pack(args, tpu, commit, workdir)

    workers = tpu.fleet(kind.hosts if kind else 1)

    def begin() -> None:
        nonlocal workers
        workers = _workers(tpu, kind)
        if args.auto_resume and fleet.tell_status(workers, args.name, 0).state == "running":  # this launcher was interrupted
            tpu.runner.say("a job runs already: watching it (stop it first to start another)")
            return
        fleet.prepare(workers, args.name)
        fleet.copy(workers, args.name, lambda _: files)
        fleet.install(workers, args.name, EXTRAS)
        fleet.start(workers, args.name, job.run_id(commit, tpu.runner.dry))
        if not tpu.runner.dry:
            tpu.runner.say(
                f"started on {len(workers.names)} worker(s), commit {commit[:12]}. Next: python launch/tpu.py logs --follow"
            )

    def obtain() -> None:
        state = tpu.state()
        if state.lost and state.queued != "ABSENT":  # taken away while nobody watched
            tpu.delete()
        if tpu.runner.dry or not state.usable:
            tpu.create(kind, args.spot, args.create_arg)
            tpu.wait(args.wait_minutes)

    if not args.auto_resume or tpu.runner.dry:
        if args.auto_resume:
            obtain()
        begin()
        return 0

    actions = resume.Actions(
        obtain=obtain,
        run=begin,
        stop=lambda: fleet.stop(workers, args.name, STOP_SECONDS),
        discard=tpu.delete,
        state=tpu.state,
        statuses=lambda: fleet.status(workers, args.name),
        last_step=lambda: _last_step(tpu, workdir) or 0,
        say=tpu.runner.say,
    )
    patience = resume.Patience(args.max_restarts, poll=3 * args.poll, first=1.5 * args.poll, longest=45 * args.poll)
    code = resume.keep_going(actions, patience)
    if code == 0 and args.delete_after:
        tpu.delete()
    else:
        tpu.runner.say(f"the TPU is still there: python launch/tpu.py delete --name={args.name}")
    return code


def _pack(args: argparse.Namespace, tpu: Tpu, commit: str, workdir: str) -> list[Path]:
    """The files that every worker gets."""
    env = job.environment(args.env, args.dry_run)
    env[FLAGS] = xla_flags.merged(xla_flags.TPU, env.get(FLAGS, os.environ.get(FLAGS, "")))
    words = job.train_words("../venv/bin/python", args.config, workdir, args.overrides, distributed=True)
    code = job.cache() / args.name / "code.tar.gz"
    checkout.archive(tpu.runner, commit, code)
    script = job.cache() / args.name / "run.sh"
    job.write_script(script, job.script(words, env), tpu.runner.dry)
    return [code, job.SCRIPT, script]


def _workers(tpu: Tpu, kind: TpuType | None = None) -> fleet.Fleet:
    """The workers of the slice.

    Raises:
      UserError: it is not there, or cannot be used.
    """
    state = tpu.state()
    if tpu.runner.dry:
        return tpu.fleet(kind.hosts if kind else 1)
    if state.usable:
        return tpu.fleet(state.hosts, pause=tpu.poll / 4)
    if state.queued == "ABSENT":
        raise UserError(f"there is no TPU {tpu.name} in {tpu.zone}: python launch/tpu.py create --name={tpu.name} first")
    mend = "delete it and create it again" if state.lost else "wait for it with python launch/tpu.py create"
    raise UserError(f"{tpu.name} in {tpu.zone} is {state}: {mend}")


def status(args: argparse.Namespace, tpu: Tpu) -> int:
    workdir = _workdir(args, required=False)
    state = tpu.state()
    if not tpu.runner.dry:
        print(f"{args.name} in {args.zone}: {state}{': ' + state.reason if state.reason else ''}")
    if state.usable or tpu.runner.dry:
        workers = tpu.fleet(state.hosts or 1)
        for name, found in zip(workers.names, fleet.status(workers, args.name)):
            if not tpu.runner.dry:
                print(f"  {name}: {job.describe(found)}")
    if workdir:
        step = _last_step(tpu, workdir)
        if not tpu.runner.dry:
            print(f"  {workdir}: " + (f"step {step}" if step is not None else "no step yet"))
    return 0


def _last_step(tpu: Tpu, workdir: str) -> int | None:
    """Of metrics.jsonl; None without one."""
    steps = []
    for line in read_end(tpu.runner, f"{workdir}/metrics.jsonl", 65536).splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the first is cut
            continue
        steps += [row["step"]] if isinstance(row, dict) and isinstance(row.get("step"), int) else []
    return steps[-1] if steps else None


def logs(args: argparse.Namespace, tpu: Tpu) -> int:
    workers = _workers(tpu)
    return fleet.logs(workers, args.name, fleet.chosen(workers, args.worker), args.lines, args.follow)


def ssh(args: argparse.Namespace, tpu: Tpu) -> int:
    args.worker = "0" if args.worker == "all" else args.worker
    return tpu.runner.attach(tpu.shell(fleet.chosen(_workers(tpu), args.worker)[0]))


def stop(args: argparse.Namespace, tpu: Tpu) -> int:
    workers = _workers(tpu)
    return fleet.report_stop(workers, fleet.stop(workers, args.name, STOP_SECONDS))


def delete(args: argparse.Namespace, tpu: Tpu) -> int:
    if not (args.yes or tpu.runner.dry):
        try:
            answer = input(f"delete {args.name} in {args.zone}, and whatever runs on it? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            tpu.runner.say("nothing was deleted (--yes deletes without asking)")
            return 1
    tpu.delete()
    tpu.runner.say(f"{args.name}: deleted")
    return 0


COMMANDS = {"create": create, "run": run, "status": status, "logs": logs, "ssh": ssh, "stop": stop, "delete": delete}


if __name__ == "__main__":
    sys.exit(main())
