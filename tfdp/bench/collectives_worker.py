"""One worker that runs every collective on tensors of several sizes."""

from __future__ import annotations

import json
import sys

from tfdp.bench.channel import serve, take_over_output


def main() -> None:
    """Runs what the driver asks for."""
    take_over_output()
    setup = json.loads(sys.argv[1])
    from tfdp.bench.collective_arms import CollectiveArms
    from tfdp.bench.training import make_strategy

    serve(CollectiveArms(make_strategy(setup), setup["dtype"]))


if __name__ == "__main__":
    main()
