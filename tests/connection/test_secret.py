"""The secret of a job: from a file of its owner alone, or as a line to paste."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tfdp.communication.connection.secret import (
    VARIABLE,
    SecretError,
    line_to_paste,
    new_secret,
    read_secret,
)

SECRET = "0123456789abcdef"


def write(path, text: str = SECRET, mode: int = 0o600) -> dict[str, str]:
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return {VARIABLE: str(path)}


def test_the_file_is_read_without_the_end_of_its_line(tmp_path):
    assert read_secret(write(tmp_path / "secret", f"{SECRET}\n")) == SECRET
    # A group may share it, as mounted secrets do.
    assert read_secret(write(tmp_path / "group", mode=0o640)) == SECRET


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (SECRET, 0o644, "`chmod 600` its file. Received: .*, of mode 644"),
        ("short", 0o600, "16 to 4096 characters; .* Received: 5 in"),
        ("", 0o600, "Received: 0 in"),
        ("x" * 5000, 0o600, "16 to 4096 characters"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path, text, mode, words):
    with pytest.raises(SecretError, match=words):
        read_secret(write(tmp_path / "secret", text, mode))


def test_a_file_that_cannot_be_read_is_named_and_a_fifo_not_waited_for(tmp_path):
    with pytest.raises(SecretError, match=r"No such file.*Received: .*missing"):
        read_secret({VARIABLE: str(tmp_path / "missing")})
    with pytest.raises(SecretError, match="Is a directory"):
        read_secret({VARIABLE: str(tmp_path)})
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SecretError, match="characters"):
        read_secret({VARIABLE: str(tmp_path / "fifo")})


def test_the_line_to_paste_gives_a_shell_the_secret(tmp_path):
    secret = new_secret()
    assert re.fullmatch("[0-9a-f]{32}", secret)
    assert secret != new_secret()
    script = f'{line_to_paste(secret)}\nprintf %s "${VARIABLE}"'
    done = subprocess.run(
        ["sh", "-c", script],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert read_secret({VARIABLE: done.stdout}) == secret
    assert line_to_paste(secret).startswith(" ")
