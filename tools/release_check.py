"""Check that version, changelog and citation agree: for a tag, or as they stand.

    python tools/release_check.py [vX.Y.Z]

CITATION.cff has the version of tfdp/__init__.py, the date of its section in
CHANGELOG.md (none while there is no such section), and the URL of setup.py. A tag is
that version, and needs the section.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = r'^__version__ = "(.+)"$'
REPOSITORY = r'^REPOSITORY = "(.+)"$'


def problems(root: Path = ROOT, tag: str | None = None) -> Iterator[str]:
    """Find what disagrees.

    Args:
        root: Path of the checkout.
        tag: String such as `"v0.1.0"`, or `None` for no release.

    Yields:
        Strings, a sentence each.
    """
    version = _found(root / "tfdp" / "__init__.py", VERSION)
    heading = rf"^## {re.escape(version or '')} - (\d{{4}}-\d\d-\d\d)$"
    expected = {
        "version": version,
        "date-released": _found(root / "CHANGELOG.md", heading),
        "repository-code": _found(root / "setup.py", REPOSITORY),
    }
    for key, value in expected.items():
        cited = _found(root / "CITATION.cff", rf"^{key}: (.+)$")
        if cited != value:
            yield f"CITATION.cff: {key} should be {value}. Received: {cited}"
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"tfdp.__version__ is {version}, the tag {tag}"
    if expected["date-released"] is None:
        yield f"CHANGELOG.md has no section `## {version} - YYYY-MM-DD`"


def _found(file: Path, pattern: str) -> str | None:
    match = re.search(pattern, file.read_text("utf-8"), re.M)
    return match[1] if match else None


def main(arguments: Sequence[str]) -> int:
    """Print what disagrees; return the exit code."""
    found = list(problems(tag=arguments[0] if arguments else None))
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
