"""`strategy.cluster_resolver` says of a task what the stock strategy's does."""

from __future__ import annotations

import json

import pytest

from tests.harness import forks
from tests.harness.forks import Start
from tests.harness.tf_config import cluster_configs

pytestmark = pytest.mark.processes

NO_TASK = [None, None, {}]


def resolver_of(module: str, kind: str, gives_resolver: bool = False) -> list | None:
    """What a script reads of the resolver: task type, task id and cluster."""
    if module == "tfdp":
        import tfdp as namespace
    else:
        import tensorflow.distribute as namespace
    import tensorflow as tf

    options = {}
    if gives_resolver:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        options["cluster_resolver"] = resolver
    strategy = getattr(namespace, kind)(**options)
    found = strategy.cluster_resolver
    if found is None:
        return None
    assert not gives_resolver or found is resolver
    assert strategy.num_replicas_in_sync == 1 or kind == "auto_strategy"
    return [found.task_type, found.task_id, found.cluster_spec().as_dict()]


def answers(*starts: Start) -> list:
    found = forks.run(starts, deadline_seconds=120.0)
    assert [answer.error for answer in found] == [""] * len(starts), found
    return [answer.value for answer in found]


def of(module: str, tf_config: str | None, kind: str, **options) -> Start:
    return Start(resolver_of, tf_config, {"module": module, "kind": kind, **options})


def test_a_single_worker_knows_its_task():
    (text,) = cluster_configs(1)
    cluster = json.loads(text)["cluster"]
    own = ["worker", 0, cluster]
    kind = "MultiWorkerMirroredStrategy"
    task_alone = json.dumps({"task": {"type": "worker", "index": 0}})
    found = answers(
        of("tfdp", text, kind),
        of("tfdp", text, kind, gives_resolver=True),
        of("tfdp", text, "MirroredStrategy"),
        of("tfdp", text, "auto_strategy"),
        of("tfdp", task_alone, "auto_strategy"),
        of("tfdp", None, "auto_strategy"),
        of("tfdp", task_alone, kind),
        of("tfdp", None, kind),
        of("tfdp", "", kind),
        of("tfdp", '{"cluster": null, "task": null}', kind),
    )
    alone = ["worker", 0, {}]
    assert found[:3] == [own, own, None]
    assert found[3:6] == [own, alone, NO_TASK]
    assert found[6:] == [alone, *[NO_TASK] * 3]


@pytest.mark.full
def test_the_stock_strategies_say_the_same():
    (text,) = cluster_configs(1)
    kind = "MultiWorkerMirroredStrategy"
    task_alone = json.dumps({"task": {"type": "worker", "index": 0}})
    found = answers(
        of("stock", text, kind),
        of("stock", text, "MirroredStrategy"),
        of("stock", task_alone, kind),
        of("stock", None, kind),
    )
    own = ["worker", 0, json.loads(text)["cluster"]]
    assert found == [own, None, ["worker", 0, {}], NO_TASK]
