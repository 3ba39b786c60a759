"""Secret of a job: read from a file of its owner alone, or made for one job."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping

from tfdp.launch.rendezvous.failure import RendezvousError

VARIABLE = "TFDP_JOB_SECRET_FILE"
_FILE_ON_OTHERS = "~/.tfdp-job-secret"
_BYTES = 16
# Who listens to a connection can try as many short ones as he likes.
_LEAST_CHARACTERS = 16
_MOST_BYTES = 4096


def new_secret() -> str:
    """Return a secret for one job.

    Returns:
        String of 32 hexadecimal digits.
    """
    return secrets.token_hex(_BYTES)


def read_secret(environ: Mapping[str, str] = os.environ) -> str | None:
    """Read the secret from the file that `TFDP_JOB_SECRET_FILE` names.

    Args:
        environ: Mapping of environment variables. Defaults to `os.environ`.

    Returns:
        String, or `None` where the variable is not set.

    Raises:
        RendezvousError: If the file cannot be read, others can read it, or what is in
            it is too short.

    Example:

    >>> read_secret({}) is None
    True
    """
    name = environ.get(VARIABLE)
    if not name:
        return None
    path = os.path.expanduser(name)
    try:
        # A FIFO that nobody writes to must not be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MOST_BYTES + 1) or b""
    except OSError as error:
        raise RendezvousError(
            f"The file of the job's secret cannot be read: {error.strerror}. Received: "
            f"{VARIABLE}={name}"
        ) from error
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise RendezvousError(
            "Everybody on this machine can read the job's secret: `chmod 600` its "
            f"file. Received: {VARIABLE}={name}, of mode {stat.S_IMODE(mode):o}"
        )
    secret = data.decode("utf-8", errors="replace").strip()
    if len(secret) < _LEAST_CHARACTERS or len(data) > _MOST_BYTES:
        raise RendezvousError(
            f"The job's secret must have {_LEAST_CHARACTERS} to {_MOST_BYTES} "
            "characters; `openssl rand -hex 16` makes one. "
            f"Received: {len(secret)} in {VARIABLE}={name}"
        )
    return secret


def line_to_paste(secret: str) -> str:
    """Return the line of a shell that gives another node the secret.

    `echo` is a part of the shell: the secret is on no process's command line, where
    every user of the machine could read it.

    Args:
        secret: String, from `new_secret`.

    Returns:
        String, which begins with a space: many shells keep such a line out of their
        history.
    """
    file = _FILE_ON_OTHERS
    return f" (umask 077; echo {secret} > {file}); export {VARIABLE}={file}"
