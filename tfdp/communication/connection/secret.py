"""Secret of a job: read from a private file, or generated for one job."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping

# Environment variable that names the file of the secret, and does not contain the
# secret itself, since programs may print their environment.
VARIABLE = "TFDP_JOB_SECRET_FILE"
# Users paste a shell line on the other nodes, which stores the secret in this file. A
# home folder exists on every node.
_FILE_ON_OTHERS = "~/.tfdp-job-secret"
# Random bytes of a generated secret: 128 bits cannot be guessed, even offline.
_BYTES = 16
# Shortest accepted secret in characters: an eavesdropper can guess a shorter one
# offline.
_MIN_CHARACTERS = 16
# Largest accepted file of a secret in bytes. A wrong file, which may be large, is not
# read to its end.
_MAX_BYTES = 4096


class SecretError(ValueError):
    """Error: the file of the job's secret cannot be used; the text has the reason."""


def new_secret() -> str:
    """Generate a secret for one job.

    Returns:
        String of 32 hexadecimal digits.
    """
    return secrets.token_hex(_BYTES)


def derive_secret(secret: str, purpose: str) -> str:
    """Derive the secret for one purpose, which does not reveal the job's secret.

    Args:
        secret: String, the secret of the job.
        purpose: String, such as `"workers"`.

    Returns:
        String of 64 hexadecimal digits.
    """
    return hmac.digest(secret.encode(), purpose.encode(), "sha256").hex()


def read_secret(environ: Mapping[str, str] = os.environ) -> str | None:
    """Read the secret from the file that `TFDP_JOB_SECRET_FILE` names.

    Args:
        environ: Mapping of environment variables. Defaults to `os.environ`.

    Returns:
        String, or `None` where the variable is not set.

    Raises:
        SecretError: If the file cannot be read, other users can read it, or its
            content is too short or too long.

    Example:

    >>> read_secret({}) is None
    True
    """
    name = environ.get(VARIABLE)
    if not name:
        return None
    path = os.path.expanduser(name)
    try:
        # `O_NONBLOCK`, since opening a FIFO without a writer would block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_BYTES + 1) or b""
    except OSError as error:
        raise SecretError(
            f"The file of the job's secret cannot be read: {error.strerror}. Received: "
            f"{VARIABLE}={name}"
        ) from error
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise SecretError(
            "All users of this machine can read the job's secret: `chmod 600` its "
            f"file. Received: {VARIABLE}={name}, of mode {stat.S_IMODE(mode):o}"
        )
    secret = data.decode("utf-8", errors="replace").strip()
    if len(secret) < _MIN_CHARACTERS or len(data) > _MAX_BYTES:
        raise SecretError(
            f"The job's secret must have {_MIN_CHARACTERS} to {_MAX_BYTES} "
            "characters; `openssl rand -hex 16` creates one. "
            f"Received: {len(secret)} in {VARIABLE}={name}"
        )
    return secret


def line_to_paste(secret: str) -> str:
    """Return the shell line that stores the secret on another node.

    `echo` is a builtin of the shell: the secret is never on the command line of a
    process, where every user of the machine could read it.

    Args:
        secret: String, from `new_secret`.

    Returns:
        String that begins with a space: many shells keep such a line out of their
        history.
    """
    file = _FILE_ON_OTHERS
    return f" (umask 077; echo {secret} > {file}); export {VARIABLE}={file}"
