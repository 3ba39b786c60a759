# Makes .venv and keeps it right; sourced by tools/test, tools/demo, tools/lint.
#
# ensure_venv EXTRAS installs the checkout, editable, with those extras, into
# .venv. A stamp holds what it was built from (setup.cfg, pyproject.toml, the
# Python, where the checkout lies), so the next call takes no time.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"

# Prints the path of a Python that tfdp supports. `command -v` is not enough: a
# version manager's shim may be there for a Python that is not.
find_python() {
  local candidate check='
import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))'
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}
  do
    if "$candidate" -c "$check" >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  echo "tfdp needs Python 3.10 to 3.13 with the venv module (on Debian:" \
    "apt install python3-venv). Tried: ${PYTHON:-python3 and python3.10 to 3.13}" >&2
  return 1
}

# What the environment is built from, as one line.
venv_fingerprint() {
  local version
  version="$("$VENV/bin/python" -V 2>&1)" || version="none"
  echo "$version $VENV $(cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" | cksum)"
}

venv_is_ready() {
  local stamp="$VENV/.tfdp-$1"
  [ -f "$stamp" ] && [ ! -e "$VENV/.tfdp-building" ] &&
    [ "$(cat "$stamp")" = "$(venv_fingerprint)" ]
}

# Whether .venv can be installed into: its Python runs, is one of ours, has pip.
venv_is_usable() {
  "$VENV/bin/python" -c '
import sys, pip
sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# Makes .venv anew where there is none, or where one that we made was cut short,
# has lost its Python or was moved; one that somebody else made is only used.
create_venv() {
  local python
  if [ -e "$VENV" ] && [ ! -e "$VENV/.tfdp-home" ]; then
    venv_is_usable && return
    echo "$VENV is not a working environment with Python 3.10 to 3.13 and pip." \
      "Remove or rename it." >&2
    return 1
  fi
  [ ! -e "$VENV/.tfdp-building" ] && venv_is_usable &&
    [ "$(cat "$VENV/.tfdp-home")" = "$VENV" ] && return
  python="$(find_python)" || return 1
  echo "Making .venv with $("$python" -V)" >&2
  rm -rf "$VENV" && mkdir "$VENV" && touch "$VENV/.tfdp-building" &&
    echo "$VENV" >"$VENV/.tfdp-home" && "$python" -m venv "$VENV"
}

build_venv() {
  local extras="$1"
  create_venv || return 1
  [ ! -e "$VENV/.tfdp-home" ] || touch "$VENV/.tfdp-building"
  echo "Installing tfdp[$extras] into .venv (the first time takes minutes)" >&2
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-input --editable "$ROOT[$extras]" || return 1
  rm -f "$VENV/.tfdp-building"
  venv_fingerprint >"$VENV/.tfdp-$extras"
}

ensure_venv() {
  local extras="$1" status=0
  if ! venv_is_ready "$extras"; then
    # The lock belongs to the open file, so it outlives the process that took
    # it and ends with this shell, however that ends.
    exec 9>"$ROOT/.venv.lock"
    "$(find_python)" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || return 1
    venv_is_ready "$extras" || build_venv "$extras" || status=$?
    exec 9>&-
    if [ "$status" -ne 0 ]; then
      echo "Could not make .venv: see above. Run the command again to retry." >&2
      return "$status"
    fi
  fi
  # The programs of the environment first, and nothing of a caller's own. Without
  # bytecode each of the tests' many processes would compile tfdp.
  export PATH="$VENV/bin:$PATH"
  unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
  export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
}
