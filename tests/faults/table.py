"""What a campaign came to, as a page of the docs."""

from __future__ import annotations

import collections
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

_MARKER = "<!-- tools/faults"
_DEATHS = ("kill", "raise", "exit", "crash", "damage")


def table(rows: Sequence[dict]) -> str:
    """The outcomes by kind and phase, as Markdown.

    Args:
        rows: Sequence of dicts, of `tools/faults`.
    """
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["kind"], row["phase"]].append(row)
    lines = [
        "| fault | phase | number | as promised | started again | "
        "error after s: median, largest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, phase), group in groups.items():
        good = sum(not row["problem"] for row in group)
        again = sum(row["second_codes"] is not None for row in group)
        shown = [kind, phase, len(group), good, again or "", _times(group)]
        lines.append("| " + " | ".join(map(str, shown)) + " |")
    deaths = sorted(
        seconds
        for row in rows
        if row["kind"] in _DEATHS and row["phase"] != "start"
        for seconds in row["error_seconds"]
    )
    if deaths:
        p95 = deaths[int(0.95 * (len(deaths) - 1))]
        lines += ["", f"Death to error, p95 over {len(deaths)}: {p95:.1f} s."]
    return "\n".join(lines)


def write(page: Path, rows: Sequence[dict], only: str, command: str) -> None:
    """Writes the table into the docs, with what it was measured on.

    Args:
        page: Path.
        rows: Sequence of dicts.
        only: String, the kinds that were run, or `""`: what was kept of others stays.
        command: String, what was run.
    """
    marker = f"{_MARKER}{only} writes what follows. -->"
    head, _, tail = page.read_text("utf-8").partition(marker)
    _, others, rest = tail.partition(f"\n{_MARKER}")
    bad = [row for row in rows if row["problem"]]
    twice = [row for row in rows if row["earlier"]]
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("tensorflow", "keras"))
    text = [
        f"{len(rows)} faults (`{command}`), {len(bad)} of them not as promised. "
        f"{len(twice)} were run more than once, see above. {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {versions}.",
        "",
        table(rows),
        "",
        *[f"- {r['kind']} in {r['phase']}: {r['problem']}" for r in bad],
    ]
    own = "\n".join(text).rstrip()
    before = head.rstrip()
    page.write_text(f"{before}\n\n{marker}\n\n{own}\n{others}{rest}", "utf-8")


def _times(group: Sequence[dict]) -> str:
    times = sorted(seconds for row in group for seconds in row["error_seconds"])
    if group[0]["kind"] == "sleep":
        return "none: it finished"
    return f"{times[len(times) // 2]:.1f}, {times[-1]:.1f}" if times else ""
