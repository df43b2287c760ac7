#!/usr/bin/env bash
# The set-up that every script shares; source it, then call `setup_environment [EXTRA...]`.
#
# It leaves $root (the repository), $python (the interpreter of $root/.venv) and an environment as requirements.lock says,
# with the gpu extra where an NVIDIA GPU is. Run again, it does nothing until pyproject.toml or the lock changes.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# Whether the command $1 is a Python that jaxlm runs on and that can make environments (Debian's may lack ensurepip).
suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' >/dev/null 2>&1; }

# Prints the path of such a Python. A version whose wheels the lock was made with comes first.
find_python() {
  local candidate folder version
  for candidate in python3.12 python3.13 python3.14 python3 python; do
    if suits "$candidate"; then command -v "$candidate"; return; fi
  done
  for folder in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    for version in 3.12 3.13 3.14; do
      for candidate in "$folder/versions/$version".*/bin/python; do
        if suits "$candidate"; then echo "$candidate"; return; fi
      done
    done
  done
  if command -v uv >/dev/null; then
    say "no Python >= 3.12 found; asking uv for one" >&2
    uv python install --quiet 3.12 >&2 || true
    candidate=$(uv python find --python-preference only-managed 3.12 2>/dev/null || true)
    if suits "$candidate"; then echo "$candidate"; return; fi
  fi
  return 1
}

# Whether a GPU is there that CUDA 13's libraries can drive; says so when only its driver is in the way.
gpu_usable() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 1
  [[ $driver =~ ^([0-9]+)\. ]] || return 1
  if (( BASH_REMATCH[1] < 580 )); then
    say "the NVIDIA driver is ${driver%%$'\n'*}, but CUDA 13 needs 580 or newer; going on without the GPU"
    return 1
  fi
}

setup_environment() {
  local started=$SECONDS stamp=$root/.venv/jaxlm-installed wanted=("$@") have=() found fingerprint extras installed
  if gpu_usable; then wanted+=(gpu); fi

  if ! suits "$python" || ! "$python" -m pip --version >/dev/null 2>&1; then
    found=$(find_python) || fail "no Python 3.12, 3.13 or 3.14 with its venv module on the PATH, in pyenv or through uv;" \
      "install one (apt install python3.12-venv, brew install python@3.12, pyenv install 3.12, or uv) and run this again"
    say "making .venv with $("$found" -V) ($found)"
    "$found" -m venv --clear "$root/.venv" || fail "could not make $root/.venv"
  fi

  fingerprint=$(cat "$root/pyproject.toml" "$root/requirements.lock" | cksum)
  if [[ -f $stamp ]]; then
    { read -r installed; read -r -a have; } <"$stamp" || true
  fi
  if [[ ${installed:-} == "$fingerprint $root" ]] && contains_all; then
    return
  fi
  extras=$(printf '%s\n' ${have[@]+"${have[@]}"} ${wanted[@]+"${wanted[@]}"} | sort -u | paste -sd , -)
  rm -f "$stamp"
  say "installing jaxlm${extras:+[$extras]} and its locked dependencies (the first time it downloads them)"
  "$python" -m pip install --quiet --disable-pip-version-check -c "$root/requirements.lock" -e "$root${extras:+[$extras]}" ||
    { say "the installation failed; pip's reason is above" >&2; exit 1; }
  printf '%s\n%s\n' "$fingerprint $root" "${extras//,/ }" >"$stamp"
  say "done in $((SECONDS - started)) s"
}

# Whether every extra in `wanted` is among those in `have` (both are the caller's).
contains_all() {
  local extra
  for extra in ${wanted[@]+"${wanted[@]}"}; do
    [[ " ${have[*]-} " == *" $extra "* ]] || return 1
  done
}
