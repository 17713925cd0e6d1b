#!/bin/sh
# Make a virtual environment that runs the explorer: sh tools/setup.sh EXTRAS, with EXTRAS "probe" or "probe,test".
# Says what it does; does nothing, in milliseconds, where nothing changed; ends with one sentence where it cannot go on.
# PYTHON, VENV and VENV_FLAGS come from the environment (see the Makefile).
set -eu

EXTRAS=${1:-probe}
VENV=${VENV:-.venv}
LOG=$VENV/setup.log
STAMP=$VENV/.set-up-$(echo "$EXTRAS" | tr , -)
NEEDED_KIB=2097152 # 2 GiB: PyTorch's CPU build and the rest; the CUDA build takes about three times that

say() { printf '%s\n' "$*"; }
die() { printf 'Cannot set up: %s\n' "$*" >&2; exit 1; }

good_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    good_python "$PYTHON" || die "PYTHON=$PYTHON does not run or is older than Python 3.11."
    echo "$PYTHON"
    return
  fi
  for name in python3 python3.12 python3.11 python3.13 python; do
    if good_python "$name"; then echo "$name"; return; fi
  done
  die "no Python 3.11 or newer was found; install one, or name it with make PYTHON=/path/to/python3."
}

# What it was set up from: where this differs, it is set up again.
fingerprint() { cat pyproject.toml constraints.txt tools/setup.sh | cksum; printf '%s %s\n' "${VENV_FLAGS:-}" "$(pwd)"; }

is_set_up() { [ -f "$1" ] && [ "$(fingerprint)" = "$(cat "$1")" ]; }

why_pip_failed() {
  if grep -qi 'no space left' "$LOG"; then
    echo "the disk is full."
  elif grep -qiE 'connection|resolution|unreachable|timed out|proxy|certificate|no matching distribution' "$LOG"; then
    echo "pip could not get a package; is there a network, and does pip reach a package index?"
  else
    echo "pip failed."
  fi
}

pip() {
  if ! "$VENV/bin/python" -m pip install --disable-pip-version-check -q -c "$PINS" "$@" >>"$LOG" 2>&1; then
    tail -n 5 "$LOG" >&2
    die "$(why_pip_failed) All it said is in $LOG."
  fi
}

has_room() {
  free=$(df -Pk "$1" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$NEEDED_KIB" ] || die "$(pwd) has $((free / 1024)) MiB of free disk; about $((NEEDED_KIB / 1024)) are needed."
}

make_venv() {
  python=$(find_python)
  has_room .
  say "Making a virtual environment in $VENV ($("$python" --version 2>&1))"
  # shellcheck disable=SC2086 # several flags may be given
  "$python" -m venv ${VENV_FLAGS:-} "$VENV" >/dev/null 2>&1 && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
    { rm -rf "$VENV"; die "$python cannot make a virtual environment with pip in it (on Debian and Ubuntu: apt install python3-venv)."; }
}

# A PyTorch that is there already is kept, whatever the pin says: it may be the one built for this machine's GPU.
pins() {
  if "$VENV/bin/python" -c 'import torch' >/dev/null 2>&1; then
    say "Keeping PyTorch $("$VENV/bin/python" -c 'import torch; print(torch.__version__)')"
    grep -v '^torch==' constraints.txt >"$PINS"
  else
    cp constraints.txt "$PINS"
  fi
}

install() {
  : >"$LOG"
  pins
  say "Installing PyTorch"
  pip torch
  say "Installing DeepSpeed (its setup needs PyTorch in place)"
  pip setuptools wheel packaging ninja numpy psutil py-cpuinfo
  pip --no-build-isolation deepspeed
  say "Installing the explorer with [$EXTRAS]"
  pip -e ".[$EXTRAS]"
}

cd "$(dirname "$0")/.."
export DS_BUILD_OPS=0 # DeepSpeed compiles what it needs when it needs it, not now
is_set_up "$STAMP" && exit 0
[ "$EXTRAS" = probe ] && is_set_up "$VENV/.set-up-probe-test" && exit 0
[ -e "$VENV" ] && [ ! -x "$VENV/bin/python" ] && die "VENV=$VENV exists and is not a virtual environment; name another."
[ -x "$VENV/bin/python" ] || make_venv
PINS=$(mktemp)
trap 'rm -f "$PINS"' EXIT
install
fingerprint >"$STAMP"
# With more than [probe] installed, [probe] is there too.
case $EXTRAS in probe,*) fingerprint >"$VENV/.set-up-probe" ;; esac
say "Set up in $VENV"
