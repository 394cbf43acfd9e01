#!/usr/bin/env bash
# A job on one machine: bash job.sh VERB. The launcher copies it there, beside code.tar.gz (the commit) and run.sh (the command).
# It answers with a line that begins with "job:"; what else comes out of an ssh connection is the machine's own.
#
#   install EXTRAS    unpack the code; make the environment, unless it is there; answers state=installed
#   start RUN         run run.sh, detached; nothing when RUN runs already
#   status            state=none|installed|running|ended|lost, run=, code=, finished=0|1, stopped=0|1; then the log's last line
#   stop SECONDS      SIGTERM, which has the job save a checkpoint; wait
#   log LINES [follow]
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

born() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; } # when a process began: ids are used again

alive() { # the job's process, whose id and birth are in the file "process"
  [ -f process ] && read -r pid when <process && [ -n "$when" ] && [ "$(born "$pid")" = "$when" ]
}

last_run() { tac log 2>/dev/null | sed '/^=== run /q'; } # the log since the last start, newest line first

report() {
  local state=none code=- finished=0 stopped=0
  if [ -f process ] && ! alive; then # its supervisor may be about to say how it ended
    for _ in $(seq 20); do [ -f exit_code ] && break; sleep 0.1; done
  fi
  [ -f installed ] && state=installed
  if alive; then state=running
  elif [ -f exit_code ]; then state=ended; code=$(cat exit_code); last_run | grep -q '^done: ' && finished=1
  elif [ -f process ]; then state=lost; fi # killed with its supervisor: the machine was restarted
  [ -f stopped ] && stopped=1
  echo "job: state=$state run=$(cat run 2>/dev/null || echo -) code=$code finished=$finished stopped=$stopped"
  last_run | grep -v '^=== run ' | grep -m1 . | cut -c1-300
  return 0
}

fail() { echo "job: state=failed $*"; exit 1; }

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

environment() { # TPU machines come with Python 3.10, and often without venv: uv brings an interpreter
  venv/bin/python -m pip --version >/dev/null 2>&1 && return
  rm -rf venv
  local name
  for name in python3.13 python3.12 python3.11 python3; do
    suitable "$name" && { "$name" -m venv venv; return; }
  done
  python3 -m uv --version >/dev/null 2>&1 || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv || return
  python3 -m uv venv --quiet --seed --python 3.12 venv
}

case "${1:-}" in
  install)
    rm -rf code.new && mkdir code.new && tar -xzf code.tar.gz -C code.new || fail "the code cannot be unpacked"
    rm -rf code && mv code.new code
    wanted="$2 $(sha256sum <code/setup.py)"
    if [ "$(cat installed 2>/dev/null)" != "$wanted" ] || [ ! -x venv/bin/python ]; then
      rm -f installed
      environment >install.log 2>&1 || fail "no Python 3.11 to 3.13 here, and uv cannot be installed: $(tail -n 1 install.log)"
      venv/bin/python -m pip install --quiet --upgrade --editable "code[$2]" >>install.log 2>&1 || fail "pip: $(tail -n 1 install.log)"
      echo "$wanted" >installed
    fi
    echo "job: state=installed"
    ;;
  start)
    if alive && [ "$(cat run)" != "$2" ]; then fail "another job runs here; stop it first"; fi
    if [ "$(cat run 2>/dev/null)" != "$2" ]; then # else the answer to an earlier start was lost
      rm -f exit_code process stopped
      echo "$2" >run
      (umask 077 && export -p >environment) # a tmux server has its own
      # tmux is for people who look in; without it the job outlives the connection just as well.
      if ! tmux new-session -d -s "bridge-$(basename "$PWD")" "bash '$PWD/job.sh' supervise" >/dev/null 2>&1; then
        setsid nohup bash job.sh supervise </dev/null >/dev/null 2>&1 &
      fi
      for _ in $(seq 100); do [ -f process ] && break; sleep 0.1; done
    fi
    report
    ;;
  supervise)
    trap '' HUP
    . ./environment
    echo "=== run $(cat run) $(date -u +%Y-%m-%dT%H:%M:%SZ)" >>log
    bash run.sh </dev/null >>log 2>&1 &
    child=$!
    echo "$child $(born "$child")" >process.part && mv process.part process
    wait "$child"
    echo $? >exit_code.part && mv exit_code.part exit_code
    ;;
  status) report ;;
  stop)
    if alive; then
      touch stopped
      kill -TERM "$pid"
      for _ in $(seq "$(($2 * 10))"); do alive || break; sleep 0.1; done
    fi
    report
    ;;
  log)
    if [ "${3:-}" = follow ] && alive; then exec tail -n "$2" --pid="$pid" -F log; fi
    tail -n "$2" log 2>/dev/null || echo "no log yet"
    ;;
  *) fail "unknown verb ${1:-}" ;;
esac
