"""Keras `fit` of the bucket study's model: fixed bucket sizes, and `"auto"`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tfdp.launch.bench.channel import Variant, Variants, work

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# As in docs/reports/bucket_study.md.
WIDTH, BATCH_SIZE, NUM_IMAGES = 8, 32, 2000
OUTCOME = "outcome"


def new_model(strategy: Any) -> Any:
    """Make the study's ResNet-18, an eighth of its width, without synchronization."""
    import keras

    sys.path.insert(0, str(EXAMPLES))
    from cifar_data import make_images  # type: ignore[import-not-found]
    from cifar_resnet import build_model  # type: ignore[import-not-found]

    keras.utils.set_random_seed(0)
    images, _ = make_images(NUM_IMAGES, 10)
    with strategy.scope():
        model = build_model(WIDTH, images, sync=False)
        model.compile(
            keras.optimizers.AdamW(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model, images


def fit_variant(strategy: Any, bucket_mb: float | str | None) -> Variant:
    """Seconds per step of `fit`, from the end of the first step on.

    Args:
        strategy: Strategy.
        bucket_mb: Float, `"auto"`, which has its trial in the first block, or `None`,
            the default.
    """
    import tfdp
    from tfdp.features.tuning.tuner import max_trial_steps
    from tfdp.launch.bench.fit import timed_fit

    options = tfdp.CommunicationOptions()
    if bucket_mb is not None:
        options = tfdp.CommunicationOptions(bucket_mb=bucket_mb)
    model, images = new_model(strategy)
    size = BATCH_SIZE * strategy.num_replicas_in_sync
    fit = timed_fit(model, (images.images[:size], images.labels[:size]))
    extended = strategy.extended
    needs_trial = bucket_mb == "auto"

    def run(steps: int) -> float:
        nonlocal needs_trial
        # All variants share the process's one strategy.
        extended.options = extended.reducer.options = options
        if needs_trial:
            steps, needs_trial = max_trial_steps(1), False
        return fit(steps)

    return run


def outcome_of(key_file: Path) -> str:
    """What the trial has found, as it was kept; only the first worker has it."""
    return key_file.read_text("utf-8") if key_file.exists() else ""


def make_variants(setup: dict[str, Any]) -> Variants:
    from tfdp.features.tuning import callback
    from tfdp.features.tuning.plan_cache import plans_path
    from tfdp.launch.bench.training import make_strategy

    # Steps after the trial are measured by themselves.
    callback.MIN_TRIALS_PER_FIT = 1
    strategy = make_strategy(setup)
    variants: dict[str, Variant] = {
        name: fit_variant(strategy, bucket_mb)
        for name, bucket_mb in setup["variants"].items()
    }
    variants[OUTCOME] = lambda steps: outcome_of(plans_path())
    return variants


if __name__ == "__main__":
    work(make_variants)
