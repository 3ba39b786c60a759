"""Messages count in the singular and the plural: `1 replica`, `2 replicas`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfdp

PACKAGE = Path(tfdp.__file__).parent
# A number in braces before one of these is `pluralize(number, "replica")`.
NOUNS = (
    "all-reduces|attempts|batches|blocks|bytes|cores|devices|elements|entries|epochs"
    "|errors|files|gradients|hosts|lines|nodes|pairs|parameters|processes|replicas"
    "|rows|samples|steps|updates|values|variables|workers|GPUs"
)
WORDS = "(?:alternating|local|logical|million|more|other)"
# What cannot be one: a constant, a list, or what is checked before.
MANY = {
    ("launch/bench/collectives.py", "{count} replicas"),
    ("launch/bench/collectives.py", "{num_replicas} replicas"),
    ("launch/bench/compare.py", "{m} parameters"),
    ("launch/bench/models.py", "{self.num_parameters / 1000000.0} million parameters"),
    ("launch/bench/models.py", "{least} million parameters"),
    ("callbacks/spike_guard.py", "{MAX_EXCLUDED} batches"),
    ("checkpoint/index_file.py", "{INDEX_BYTES} bytes"),
    ("checkpoint/index_file.py", "{_VALUES} values"),
    ("launch/cli/topology_tree.py", "{sizes} replicas"),
    ("launch/cli/forecast.py", "{each} replicas"),
    ("launch/cli/forecast.py", "{forecast.num_bytes} bytes"),
    ("launch/cli/plan.py", "{_MAX_REPLICAS} replicas"),
    ("launch/cli/launch.py", "{num_workers} workers"),
    ("communication/cluster/launchers.py", "{rank.size} processes"),
    ("training/data/distribute.py", "{num_workers} workers"),
    ("training/data/same_datasets.py", "{listed} batches"),
    ("features/tuning/rebalancing.py", "{num_rows} rows"),
    ("training/keras_hooks/scope_checks.py", "{num_workers} workers"),
    ("training/optimizer/distributed.py", "{skips} steps"),
    ("ground/plans/traffic.py", "{sizes} replicas"),
    (
        "training/reduction/link_fit.py",
        "{sorted({sample.num_bytes for sample in samples})} bytes",
    ),
    ("communication/transport/shared_memory.py", "{found} bytes"),
    ("communication/transport/shared_memory.py", "{num_bytes} bytes"),
}
ROOMS = sorted({path.parent.name for path in PACKAGE.glob("*/*.py")})


def plurals(source: str) -> Iterator[str]:
    """What is counted in the f-strings of a file, in a plural that never changes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for part, after in zip(node.values, node.values[1:], strict=False):
            if isinstance(part, ast.FormattedValue) and isinstance(after, ast.Constant):
                noun = re.match(rf" (?:{WORDS} )?(?:{NOUNS})\b", after.value)
                if noun:
                    yield f"{{{ast.unparse(part.value)}}}{noun[0]}"


@pytest.mark.parametrize("room", ROOMS)
def test_messages_count_in_singular_and_plural(room: str):
    found = {
        (f"{path.relative_to(PACKAGE)}", plural)
        for path in (PACKAGE / room).rglob("*.py")
        for plural in plurals(path.read_text("utf-8"))
    }
    assert found <= MANY


def test_a_plural_that_never_changes_is_found():
    assert list(plurals('f"over {num} replicas"')) == ["{num} replicas"]
    assert list(plurals('f"over {num:,} local " f"workers"')) == ["{num} local workers"]
    assert list(plurals("f\"over {pluralize(num, 'replica')} (ring)\"")) == []
