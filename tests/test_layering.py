"""Imports point down the floors of the design, and nowhere else."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A package's files share its floor. A file or package that is not here fails
# the tests until somebody has decided where it belongs.
FLOORS = {
    # Values that a user gives, the cluster, the private names of others.
    "tfdp.options": 0,
    "tfdp.private_folder": 0,
    "tfdp.switched": 0,
    "tfdp.loops": 0,
    "tfdp.cluster": 0,
    "tfdp._compat": 0,
    "tfdp.links": 0,
    # Plans, devices, and how workers talk before there are collectives.
    "tfdp.buckets": 1,
    "tfdp.traffic": 1,
    "tfdp.cost_model": 1,
    "tfdp.devices": 1,
    "tfdp.agreement": 1,
    "tfdp.mailbox": 1,
    "tfdp.places": 0,
    "tfdp.ownership": 1,
    "tfdp.rows": 1,
    "tfdp.row_forms": 1,
    "tfdp.lengths": 1,
    "tfdp.weighted_rows": 1,
    "tfdp.balance": 1,
    "tfdp.schedules": 1,
    "tfdp.shards": 1,
    "tfdp.state_tensors": 1,
    "tfdp.memory": 1,
    "tfdp.traits": 1,
    "tfdp.checkpoint_index": 1,
    "tfdp.checksum": 1,
    "tfdp.preemption": 1,
    "tfdp.random_state": 1,
    "tfdp.callback_state": 1,
    "tfdp.repeatable": 1,
    "tfdp.seeded_order": 1,
    "tfdp.batch_change": 1,
    # Process groups and their primitives; what must be alike on all workers.
    "tfdp.collectives": 2,
    "tfdp.consistency": 2,
    "tfdp.drift": 2,
    "tfdp.watch": 2,
    "tfdp.link_fit": 2,
    "tfdp.links_file": 2,
    "tfdp.prediction": 2,
    "tfdp.checkpoint_files": 2,
    "tfdp.data_position": 2,
    "tfdp.data_checks": 2,
    "tfdp.replica_state": 2,
    "tfdp.checkpoint_index_file": 2,
    # Ways to use the primitives, each for one kind of value.
    "tfdp.fusion": 3,
    "tfdp.routes": 3,
    "tfdp.sparse": 3,
    "tfdp.gather": 3,
    "tfdp.startup": 3,
    "tfdp.shares": 3,
    "tfdp.observe": 3,
    "tfdp.drift_watch": 3,
    "tfdp.iterators": 3,
    "tfdp.end_of_data": 3,
    "tfdp.whole_state": 3,
    "tfdp.checkpoint_reading": 3,
    "tfdp.checkpoint_writing": 3,
    # What a step does with gradients, one stage of the path each.
    "tfdp.reduced": 3,
    "tfdp.accumulate": 3,
    "tfdp.loss_scale": 3,
    "tfdp.warmup": 3,
    "tfdp.gradient_noise": 3,
    "tfdp.views": 3,
    "tfdp.fused_update": 3,
    "tfdp.layout": 3,
    # What the strategies and the trainer are made of.
    "tfdp.step": 4,
    "tfdp.global_statistics": 4,
    "tfdp.loss_terms": 4,
    "tfdp.differentiable_gather": 4,
    "tfdp.replica_step": 4,
    "tfdp.features": 4,
    "tfdp.traces": 4,
    "tfdp.optimizer_arguments": 4,
    "tfdp.reducer": 4,
    "tfdp.replica_reducer": 4,
    "tfdp.sharding": 4,
    "tfdp.keras_view": 4,
    "tfdp.state_merge": 4,
    "tfdp.scope": 4,
    "tfdp.variables": 4,
    "tfdp.data": 4,
    "tfdp.guards": 4,
    "tfdp.plan": 4,
    "tfdp.link_measure": 4,
    "tfdp.saving": 4,
    # What TensorFlow and Keras call.
    "tfdp.strategy": 5,
    "tfdp.extended": 5,
    "tfdp.cross_device_ops": 5,
    "tfdp.logs": 5,
    "tfdp.numerics": 5,
    "tfdp.epochs": 5,
    "tfdp.updates": 5,
    "tfdp.added_callbacks": 5,
    "tfdp.worker_callbacks": 5,
    "tfdp.rebalancing": 5,
    "tfdp.trainer": 5,
    "tfdp.optimizers": 5,
    "tfdp.optimizer": 5,
    "tfdp.optimizer_settings": 5,
    "tfdp.optimizer_sharding": 5,
    "tfdp.interchange": 5,
    "tfdp.model_state": 5,
    "tfdp.monitor": 5,
    "tfdp.checkpoint_pending": 5,
    "tfdp.checkpoint": 5,
    "tfdp.run_state": 5,
    "tfdp.backups": 5,
    # What a person calls.
    "tfdp.bench": 6,
    "tfdp.cli": 6,
    "tfdp.callbacks": 6,
    "tfdp.testing": 6,
    # The public face and `python -m tfdp` see everything; nothing sees them.
    "tfdp": 7,
    "tfdp.__main__": 7,
}

# The imports between neighbours on one floor that are allowed, and why.
SIDEWAYS = {
    ("tfdp.options", "tfdp.links"): "latency and bandwidth are an option",
    ("tfdp.mailbox", "tfdp.agreement"): "its keys are beside those of agreements",
    ("tfdp.weighted_rows", "tfdp.rows"): "rows are taken in one way",
    ("tfdp.balance", "tfdp.weighted_rows"): "weights become rows in one way",
    ("tfdp.cost_model", "tfdp.traffic"): "the time of what is sent",
    ("tfdp.shards", "tfdp.buckets"): "slices are cut from buckets",
    ("tfdp.memory", "tfdp.buckets"): "the sizes of variables",
    ("tfdp.memory", "tfdp.shards"): "who owns how much",
    ("tfdp.iterators", "tfdp.shares"): "an iterator knows the rows of a batch",
    ("tfdp.iterators", "tfdp.end_of_data"): "an iterator asks where the data ends",
    ("tfdp.sparse", "tfdp.fusion"): "rows that would move more bytes go dense",
    ("tfdp.reduced", "tfdp.fusion"): "gradients in their buckets are unpacked",
    ("tfdp.views", "tfdp.fusion"): "a view is a pack of variables",
    ("tfdp.fused_update", "tfdp.views"): "an update of a view",
    ("tfdp.layout", "tfdp.fused_update"): "whole variables are updated together",
    ("tfdp.layout", "tfdp.gradient_noise"): "the norm of whole gradients",
    ("tfdp.layout", "tfdp.loss_scale"): "whose gradient is not finite",
    ("tfdp.layout", "tfdp.reduced"): "whole variables take whole sums",
    (
        "tfdp.sharding",
        "tfdp.replica_reducer",
    ): "what is no slice goes that way",
    ("tfdp.keras_view", "tfdp.sharding"): "a view has sharded state whole",
    ("tfdp.step", "tfdp.replica_reducer"): "the path calls the reducer",
    ("tfdp.replica_step", "tfdp.loss_terms"): "what a step returns is by rows",
    ("tfdp.loss_terms", "tfdp.global_statistics"): "some losses are functions of sums",
    ("tfdp.differentiable_gather", "tfdp.loss_terms"): "gathered rows are no rows here",
    ("tfdp.replica_reducer", "tfdp.reducer"): "one replica's view of the reducer",
    ("tfdp.optimizer", "tfdp.optimizer_sharding"): "one class in three files",
    ("tfdp.optimizer_sharding", "tfdp.optimizer_settings"): "one class in three files",
    ("tfdp.optimizer", "tfdp.trainer"): "an optimizer needs the trainer's hooks",
    ("tfdp.strategy", "tfdp.extended"): "a strategy is a shell around its extended",
    ("tfdp.extended", "tfdp.cross_device_ops"): "TensorFlow reduces by it",
    ("tfdp.strategy", "tfdp.trainer"): "a strategy installs the trainer's hooks",
    ("tfdp.trainer", "tfdp.epochs"): "the trainer puts Keras's functions in place",
    ("tfdp.trainer", "tfdp.interchange"): "the trainer puts Keras's functions in place",
    ("tfdp.trainer", "tfdp.updates"): "the trainer puts Keras's functions in place",
    ("tfdp.trainer", "tfdp.numerics"): "the hooks put Keras's counting right",
    ("tfdp.trainer", "tfdp.logs"): "the hooks hand the merged logs to Keras",
    ("tfdp.trainer", "tfdp.worker_callbacks"): "the hooks choose who writes files",
    ("tfdp.worker_callbacks", "tfdp.added_callbacks"): "which of them a loop is given",
    ("tfdp.worker_callbacks", "tfdp.rebalancing"): "every worker takes part in it",
    ("tfdp.rebalancing", "tfdp.monitor"): "the monitor's clock tells who is slow",
    ("tfdp.checkpoint", "tfdp.model_state"): "a checkpoint holds the training state",
    ("tfdp.checkpoint", "tfdp.checkpoint_pending"): "and what waits for an update",
    (
        "tfdp.checkpoint_pending",
        "tfdp.model_state",
    ): "what waits has names as the training state has",
    ("tfdp.run_state", "tfdp.model_state"): "a run has its model's state, and more",
    ("tfdp.run_state", "tfdp.checkpoint_pending"): "and what waits for an update",
    ("tfdp.backups", "tfdp.checkpoint"): "a backup is a checkpoint",
    ("tfdp.backups", "tfdp.run_state"): "a backup is read into the state of a run",
    ("tfdp.checkpoint", "tfdp.interchange"): "an index holds the user's own optimizer",
    ("tfdp.cli", "tfdp.bench"): "the command line starts benchmarks",
    ("tfdp.__main__", "tfdp"): "`python -m tfdp` runs its own package",
}

PRIVATE = ("tensorflow.python", "keras.src")
MAY_USE_PRIVATE = "tfdp._compat"


def unit_of(module: str) -> str | None:
    """The entry of FLOORS that a module belongs to: itself or its package."""
    if module == "tfdp":
        return "tfdp"
    while module not in FLOORS and "." in module:
        module = module.rpartition(".")[0]
    return module if module in FLOORS and module != "tfdp" else None


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root: Path = ROOT) -> dict[str, Path]:
    return {module_name(p, root): p for p in sorted((root / "tfdp").rglob("*.py"))}


def imported_names(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Every dotted name that the file imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def imports_by_module(root: Path = ROOT) -> dict[str, set[str]]:
    return {
        module: imported_names(
            ast.parse(path.read_text("utf-8")), module, path.name == "__init__.py"
        )
        for module, path in modules(root).items()
    }


def resolve(name: str, known: dict[str, Path]) -> str | None:
    """The module of ours that `name` is, or is a member of; None for others'."""
    if name.split(".")[0] != "tfdp":
        return None
    while name not in known and name not in FLOORS and "." in name:
        name = name.rpartition(".")[0]
    return name


def edges(root: Path = ROOT) -> set[tuple[str, str]]:
    """Pairs of (importing module, imported module), both ours."""
    known = modules(root)
    found = set()
    for module, names in imports_by_module(root).items():
        for name in names:
            target = resolve(name, known)
            if target and target != module:
                found.add((module, target))
    return found


def violations(root: Path = ROOT) -> list[str]:
    wrong = []
    for module, target in sorted(edges(root)):
        source_unit, target_unit = unit_of(module), unit_of(target)
        if source_unit is None or target_unit is None or source_unit == target_unit:
            continue  # an unmapped file has a test of its own
        source_floor, target_floor = FLOORS[source_unit], FLOORS[target_unit]
        if source_floor > target_floor or (source_unit, target_unit) in SIDEWAYS:
            continue
        way = "upward" if source_floor < target_floor else "sideways"
        wrong.append(
            f"{module} (floor {source_floor}) imports {way}: "
            f"{target} (floor {target_floor})"
        )
    return wrong


def test_every_module_has_a_floor():
    unmapped = [module for module in modules() if unit_of(module) is None]
    assert not unmapped, f"give these a floor in {Path(__file__).name}: {unmapped}"


def test_imports_point_down():
    assert violations() == []


def test_imports_inside_a_package_and_a_floor_go_one_way():
    graph: dict[str, set[str]] = {}
    for module, target in edges():
        graph.setdefault(module, set()).add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


def test_allowed_sideways_imports_stay_on_one_floor_and_make_no_circle():
    graph: dict[str, set[str]] = {}
    for source, target in SIDEWAYS:
        assert FLOORS[source] == FLOORS[target]
        graph.setdefault(source, set()).add(target)
    graphlib.TopologicalSorter(graph).prepare()


def private_uses(root: Path = ROOT) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, names in imports_by_module(root).items()
        for name in sorted(names)
        if module != MAY_USE_PRIVATE
        and any(name == p or name.startswith(p + ".") for p in PRIVATE)
    ]


def test_only_compat_imports_private_tensorflow_or_keras():
    assert private_uses() == []


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("buckets.py", "from tfdp.strategy import X", ["upward"]),
        ("buckets.py", "import tfdp.collectives.ring", ["upward"]),
        ("buckets.py", "from tfdp import collectives", ["upward"]),
        ("buckets.py", "def f():\n    from . import testing", ["upward"]),
        ("buckets.py", "from tfdp import __version__", ["upward"]),
        ("collectives/ring.py", "from .. import strategy", ["upward"]),
        ("options.py", "from tfdp import cluster", ["sideways"]),
        ("extended.py", "from tfdp import strategy", ["sideways"]),
        ("variables.py", "from tfdp import extended", ["upward"]),
        ("buckets.py", "from tfdp.options import CommunicationOptions", []),
        ("collectives/ring.py", "from .groups import Group", []),
        ("strategy.py", "from tfdp import extended, _compat", []),
    ],
)
def test_the_check_tells_upward_and_sideways_from_downward(
    tmp_path, path, line, expected
):
    file = tmp_path / "tfdp" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "tfdp" / "__init__.py").touch()
    (file.parent / "__init__.py").touch()
    file.write_text(line + "\n")
    found = violations(tmp_path)
    assert len(found) == len(expected)
    assert all(way in text for way, text in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "line",
    ["from tensorflow.python.eager import context", "import keras.src.trainers"],
)
def test_the_check_finds_private_imports(tmp_path, line):
    (tmp_path / "tfdp").mkdir()
    (tmp_path / "tfdp" / "data.py").write_text(line + "\n")
    assert len(private_uses(tmp_path)) == 1
