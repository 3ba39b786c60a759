"""One TensorFlow process that trains: with tfdp, with the stock strategy, or alone."""

from __future__ import annotations

import json
import sys

from tfdp.bench.channel import Arm, OnDemand, serve, take_over_output


def main() -> None:
    """Takes steps as the driver asks."""
    take_over_output()
    setup = json.loads(sys.argv[1])
    from tfdp.bench.models import Model
    from tfdp.bench.training import make_strategy, timed, training_step

    strategy = make_strategy(setup)
    told = setup["arms"]

    def make(name: str) -> Arm:
        arm = told[name]
        step = training_step(
            strategy,
            Model(**arm["model"]),
            batch_size=arm["batch_size"],
            pack_bytes=arm.get("pack_bytes", 0),
        )
        return timed(step)

    serve(OnDemand(make, lambda name: str(told[name]["model"])))


if __name__ == "__main__":
    main()
