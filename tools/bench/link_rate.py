"""Rate of a link between nodes, as `tc` writes it."""

from __future__ import annotations

import math
import re

from tfdp.launch.cli.parameter_types import Checked

UNLIMITED = "unlimited"
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """Read a rate as `tc` writes it.

    Args:
        rate: String, such as `"200mbit"` or `"1gbit"`, or `"unlimited"`.

    Returns:
        Float, bits per second; infinity if it is unlimited.

    Raises:
        ValueError: If it is not a positive number of kbit, mbit or gbit.

    Example:

    >>> bits_per_second("200mbit")
    200000000.0
    """
    if rate == UNLIMITED:
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(match[1]) * _BITS[match[2]] if match else 0.0
    if not 0 < bits < math.inf:
        raise ValueError(
            "A rate must be a positive number of kbit, mbit or gbit, such as 200mbit, "
            f"or {UNLIMITED!r}. Received: rate={rate!r}"
        )
    return bits


def _link_rate(text: str) -> str:
    try:
        bits_per_second(text)
    except ValueError:
        what = "it must be a positive number of kbit, mbit or gbit, such as 200mbit"
        raise ValueError(what) from None
    return text


# On the command line: as text.
LINK_RATE = Checked("rate", _link_rate)
