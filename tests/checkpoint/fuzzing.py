"""Mutations of the files that tfdp reads, and what has to come of each."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KINDS = ("index", "run", "links", "TF_CONFIG")
WAYS = ("structure", "bytes")
# Of a mutation: far more than each needs on a busy machine.
SECONDS, MEMORY_BYTES = 30, 4 * 2**30
EQUAL, REFUSED = "equal", "one sentence"
_DEEP: Any = []
for _ in range(300):
    _DEEP = [_DEEP]
JUNK: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, 1e308),
    *(float("nan"), float("inf"), "", ".", "..", "../x", "/dev/zero", "model"),
    *("\ud800", "a\nb", "x" * 10**4, [], {}, [[]], {"a": None}, _DEEP),
)
BYTES = (b"", b"\0", b"\xff", b'"', b"[" * 3000, b"9" * 5000, b"{}", b"null", b",")
CLUSTER = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:2222"], "evaluator": ["d:1"]},
    "task": {"type": "worker", "index": 1},
    "tfdp": {"devices_per_worker": 2, "rebalance": True},
}


@dataclass(frozen=True)
class Mutation:
    """One of a campaign.

    Args:
        number: Int, its place in the campaign.
        kind: String, the file.
        way: String, `"structure"` (with a checksum that fits) or `"bytes"`.
        seed: Int.
    """

    number: int
    kind: str
    way: str
    seed: int


class TimeIsUp(BaseException):
    """A mutation took too long."""


def campaign(count: int, seed: int) -> list[Mutation]:
    """Mutations, equally many of each kind and way."""
    pairs = [(kind, way) for kind in KINDS for way in WAYS]
    return [
        Mutation(number, *pairs[number % len(pairs)], seed * 10**6 + number)
        for number in range(count)
    ]


def everywhere(value: Any) -> Iterator[tuple[str, Any]]:
    """A JSON value with each piece of `JUNK` in each of its places, one at a time.

    Each piece is also put in the place of the whole. The same value comes each time.
    """
    root = [copy.deepcopy(value)]
    for holder, key in list(_places(root)):
        original = holder[key]
        for junk in JUNK:
            holder[key] = junk
            yield f"{key}: {junk!r:.40}", root[0]
        if isinstance(holder, dict):
            del holder[key]
            yield f"{key}: missing", root[0]
        holder[key] = original


def mutated(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value in which one to three things are different."""
    root = [copy.deepcopy(value)]
    for _ in range(draw.choice((1, 1, 2, 3))):
        _mutate(root, draw)
    return root[0] if root else None


def _mutate(root: list, draw: random.Random) -> None:
    places = list(_places(root))
    if not places:
        return  # nothing is left
    holder, key = draw.choice(places)
    action = draw.randrange(6)
    if action == 0:
        del holder[key]
    elif action == 1:  # another part of the file
        other, place = draw.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif action == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif action == 3 and isinstance(holder, dict):
        holder[draw.choice(("model", "format", "../x", ""))] = holder[key]
    elif action == 4 and type(holder[key]) in (int, float):
        holder[key] += draw.choice((-1, 1, 2**40))
    else:
        holder[key] = copy.deepcopy(draw.choice(JUNK))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a value, but of long lists only the ends."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys if len(keys) < 20 else [*keys[:3], *keys[-2:]]:
        yield value, key
        if isinstance(value[key], (list, dict)):
            yield from _places(value[key])


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """A copy of bytes in which one to three things are different."""
    raw = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        start = draw.randrange(len(raw) + 1)
        stop = min(start + draw.choice((0, 1, 1, 8, 100)), len(raw))
        action = draw.randrange(5)
        if action == 0:
            raw[start:stop] = draw.choice(BYTES)
        elif action == 1:
            raw[start:stop] = draw.randbytes(stop - start)
        elif action == 2:
            raw[start:start] = raw[start:stop]
        elif action == 3 and start < len(raw):
            raw[start] ^= 1 << draw.randrange(8)
        else:
            del raw[start:]
    return bytes(raw)


def run(mutations: list[Mutation], note: Callable[[str], Any]) -> None:
    """Make mutations, one after the other, in this process.

    Args:
        mutations: List of `Mutation`.
        note: Callable that takes a line of JSON: once before each, and once after it.
    """
    _limit()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        judges = _Judges(Path(folder))
        for mutation in mutations:
            note(json.dumps({**asdict(mutation), "result": None}))
            result = _outcome(lambda mutation=mutation: judges.judge(mutation))
            note(json.dumps({**asdict(mutation), "result": result}))


def resume_everywhere(of_each: int) -> dict[str, str]:
    """What comes of junk in a backup's run that its schema lets through.

    Args:
        of_each: Int, of so many pieces one is tried.
    """
    from tests.checkpoint.fuzzed_fit import FuzzedFit
    from tfdp.checkpoint.run_schema import check_run

    _limit()
    found = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        fit = FuzzedFit(Path(folder) / "interrupted")
        index = fit.folder / "step-5" / "index.json"
        body = json.loads(index.read_text())
        for place, (what, run) in enumerate(everywhere(body["content"]["run"])):
            if place % of_each:
                continue
            try:
                check_run(run)
            except ValueError:
                continue
            own = Path(folder) / str(place)
            shutil.copytree(fit.folder, own)
            _write_index(own / "step-5" / "index.json", body, run=run)
            found[f"{place}: {what}"] = _outcome(lambda own=own: fit.resume(own))
            shutil.rmtree(own, ignore_errors=True)
    return found


def _limit() -> None:
    _, limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory() + MEMORY_BYTES, limit))
    signal.signal(signal.SIGALRM, _ring)


def _outcome(act: Callable[[], str]) -> str:
    """`EQUAL`, `REFUSED`, or what else has happened."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = act()
        messages = [str(item.message) for item in said]
    except (ValueError, OSError) as error:
        result, messages = REFUSED, [str(error)]
    except TimeIsUp:
        return f"it took more than {SECONDS} s"
    except BaseException as error:  # noqa: BLE001 this is what is looked for
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return problem_of(messages) or result


def problem_of(messages: list[str]) -> str:
    """What is wrong with what was said."""
    for message in messages:
        if "\n" in message or len(message) > 2000:
            return f"no sentence: {message[:200]!r}"
        try:
            message.encode()
        except UnicodeEncodeError:
            return f"it cannot be printed: {message[:200]!r}"
    return ""


def _ring(*_: Any) -> None:
    raise TimeIsUp


def _memory() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


class _Judges:
    """Files to mutate, made once, and what is done with each that was mutated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}

    def judge(self, mutation: Mutation) -> str:
        draw = random.Random(mutation.seed)
        names = {"index": "_index", "run": "_run", "links": "_links"}
        act = getattr(self, names.get(mutation.kind, "_tf_config"))
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder))
            return act(mutation.way, draw, Path(own) / "own")

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    def _index(self, way: str, draw: random.Random, own: Path) -> str:
        from tests.checkpoint import forged

        saved = self._folder / "saved"
        self._once("saved", lambda: forged.save(saved))
        shutil.copytree(saved, own)
        _mutate_index(own / "index.json", way, draw, ())
        found = forged.restore(own)
        return EQUAL if forged.is_whole(found) else "a wrong load"

    def _run(self, way: str, draw: random.Random, own: Path) -> str:
        from tests.checkpoint.fuzzed_fit import FuzzedFit

        fit = self._once("fit", lambda: FuzzedFit(self._folder / "interrupted"))
        shutil.copytree(fit.folder, own)
        _mutate_index(own / "step-5" / "index.json", way, draw, ("run",))
        return fit.resume(own)

    def _links(self, way: str, draw: random.Random, own: Path) -> str:
        from tfdp.ground.links import DEFAULT_LINKS, Links
        from tfdp.training.reduction.cache_file import load_links, store_links

        links = DEFAULT_LINKS["ring"]
        store_links("a", links, own)
        store_links("b", DEFAULT_LINKS["nccl"], own)
        own.write_bytes(_mutated_text(own.read_bytes(), way, draw))
        found = load_links("a", own)
        if not store_links("c", links, own) or load_links("c", own) != links:
            return "it cannot be mended"
        if found is None:
            return REFUSED
        seconds = found.inside.seconds(1.0) + found.across.seconds(1.0)
        is_right = isinstance(found, Links) and seconds >= 0
        return EQUAL if is_right else "wrong links"

    def _tf_config(self, way: str, draw: random.Random, own: Path) -> str:
        from tfdp.communication.cluster.spec import Cluster

        text = _mutated_text(json.dumps(CLUSTER).encode(), way, draw)
        found = Cluster.from_tf_config(text.decode("utf-8", "surrogateescape"))
        if found is None:
            return EQUAL  # a single machine
        again = Cluster.from_tf_config(found.to_tf_config())
        return EQUAL if again == found else "another cluster"


def _mutated_text(content: bytes, way: str, draw: random.Random) -> bytes:
    if way == "bytes":
        return mutated_bytes(content, draw)
    return json.dumps(mutated(json.loads(content), draw)).encode()


def _mutate_index(
    path: Path, way: str, draw: random.Random, part: tuple[str, ...]
) -> None:
    """Mutates an index, or a part of it, with a checksum that fits, or its bytes."""
    content = path.read_bytes()
    if way == "bytes":
        path.write_bytes(mutated_bytes(content, draw))
        return
    body = json.loads(content)
    if part:
        body["content"][part[0]] = mutated(body["content"][part[0]], draw)
    else:
        body["content"] = mutated(body["content"], draw)
    _write_index(path, body)


def _write_index(path: Path, body: dict[str, Any], **changes: Any) -> None:
    """Writes an index with a checksum that fits."""
    from tfdp.checkpoint import index_file

    content = {**body["content"], **changes} if changes else body["content"]
    checksum = index_file._checksum(content)
    path.write_text(json.dumps({**body, "checksum": checksum, "content": content}))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: how many mutations of each kind and way came to what."""
    lines = [
        "| file | mutated by | mutations | equal | one sentence | other |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in KINDS:
        for way in WAYS:
            own = [r["result"] for r in rows if (r["kind"], r["way"]) == (kind, way)]
            counts = [own.count(EQUAL), own.count(REFUSED)]
            numbers = [len(own), *counts, len(own) - sum(counts)]
            lines.append(f"| {kind} | {way} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)
