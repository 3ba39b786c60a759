"""Rules of gathers and scatters, and of sums by segment.

They return `None` if the operation mixes rows, or if sizes that they need are unknown.
"""

from __future__ import annotations

from tfdp.training.program import sizes
from tfdp.training.program.facts import Form, own_rows, part, with_rows
from tfdp.training.program.view import (
    AS_IS,
    WHOLE,
    Decision,
    OperationView,
    rows_along,
)


def decide_gather(view: OperationView) -> Decision | None:
    """Decide how replicas build a `tf.gather` whose data or indices have rows.

    The result has rows. The decision is `None` if a shape or the axis is not known, if
    entries would be picked along the data's axis of rows, or if both have rows, but not
    as a common batch dimension.
    """
    data, indices = view.facts[0], view.facts[1]
    axis = view.numbers(2)
    if axis is None or data.sizes is None or indices.sizes is None:
        return None
    rank = len(data.sizes)
    place, batched = int(axis) % rank, int(view.attribute("batch_dims") or 0)
    if batched < 0:
        batched += len(indices.sizes)
    outer, inner = data.sizes[:place], data.sizes[place + 1 :]
    shape = (*outer, *indices.sizes[batched:], *inner)
    if data.is_rows and not indices.is_rows:
        if data.axis == place:
            return None
        if data.axis < batched:
            needs = [AS_IS, rows_along(data.axis), WHOLE]
            return Decision(needs, [own_rows(shape, data.axis)])
        shift = len(indices.sizes) - batched - 1
        own = data.axis if data.axis < place else data.axis + shift
        return Decision([AS_IS, WHOLE, WHOLE], [own_rows(shape, own)])
    if indices.is_rows and not data.is_rows:
        if indices.axis < batched:
            needs = [rows_along(indices.axis), AS_IS, WHOLE]
            row_sizes = with_rows(shape, indices.axis, indices.multiple)
            return Decision(needs, [own_rows(row_sizes, indices.axis)])
        own = place + indices.axis - batched
        return Decision([WHOLE, AS_IS, WHOLE], [own_rows(shape, own)])
    if data.axis == indices.axis and data.axis < batched and data.axis != place:
        return Decision([AS_IS, AS_IS, WHOLE], [own_rows(shape, data.axis)])
    return None


def decide_segment_sum(view: OperationView) -> Decision | None:
    """Decide how replicas build sums by segment, as in the gradient of a gather.

    Each replica adds its own rows to the segments, which are then partial sums. The
    decision is `None` if a shape is not known, or if data and ids differ in their rows.
    """
    data, ids = view.facts[0], view.facts[1]
    if data.sizes is None or ids.sizes is None:
        return None
    axis = data.axis if data.is_rows else ids.axis
    if axis >= len(ids.sizes) or (
        ids.is_rows and data.is_rows and ids.axis != data.axis
    ):
        return None
    segments = view.facts[2].value
    count = segments[()] if segments is not None else sizes.FREE
    shape = (count, *data.sizes[len(ids.sizes) :])
    return Decision([rows_along(axis), rows_along(axis), WHOLE], [part(shape)])


def decide_scatter(view: OperationView) -> Decision | None:
    """Decide how replicas build a `ScatterNd`, which adds rows by their index.

    Each replica scatters its own rows; the results are partial sums. The decision is
    `None` if the shape of the result is not known, or depends on the number of rows.
    """
    indices, updates = view.facts[0], view.facts[1]
    own = indices if indices.is_rows else updates
    if own.axis != 0 or indices.sizes is None or len(indices.sizes) < 2:
        return None
    if indices.is_rows and updates.is_rows and updates.axis:
        return None
    target = view.facts[2].value
    if target is None or view.facts[2].form is Form.SIZES:
        return None
    return Decision([rows_along(), rows_along(), WHOLE], [part(tuple(target))])
