"""Rules: what an operation gives, by what is held of its inputs.

Reading order:
    elementwise: operations on elements, and linear ones
    reductions: sums, means, maxima
    contractions: products of matrices, `Einsum`, convolutions and poolings
    rowwise: operations on each row by itself
    layouts: reshapes, slices, joins, gathers
    composites: rows made of ragged and sparse tensors
    values: integers that are computed of sizes
    state: variables, random numbers, functions of Python
    lists: lists of tensors
"""

from __future__ import annotations

from tfdp.program.facts import Form, whole
from tfdp.program.rules.composites import decide_composite
from tfdp.program.rules.contractions import decide_contraction, decide_convolution
from tfdp.program.rules.elementwise import (
    decide_elementwise,
    decide_linear,
    decide_local,
    decide_zeros,
)
from tfdp.program.rules.layouts import LAYOUTS
from tfdp.program.rules.lists import decide_list
from tfdp.program.rules.reductions import decide_reduction
from tfdp.program.rules.rowwise import decide_row_by_row
from tfdp.program.rules.state import (
    decide_python,
    decide_random,
    decide_stateful_random,
    decide_variable,
)
from tfdp.program.rules.values import decide_values
from tfdp.program.view import AS_HELD, WHOLE, Decision, View

# Layouts that are made by sizes, whatever else they are made of.
_OF_SIZES = frozenset(
    ("BroadcastTo", "ConcatOffset", "Fill", "Range", "StridedSliceGrad", "Tile")
)
_TO_ROWS = frozenset(("BroadcastTo", "Fill", "Tile"))
_CONTRACTIONS = frozenset(
    ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
)


def decide(view: View) -> Decision:
    """Decide how a replica builds an operation of the program."""
    for rule in (
        decide_variable,
        decide_list,
        decide_values,
        decide_composite,
        decide_random,
        decide_python,
        decide_stateful_random,
        decide_local,
        decide_zeros,
    ):
        found = rule(view)
        if found is not None:
            return found
    if Form.ROWS in view.forms():
        found = _decide_rows(view)
    elif Form.PART in view.forms():
        found = _decide_parts(view)
    elif Form.SIZES in view.forms():
        found = _decide_sizes(view)
    else:
        return Decision([WHOLE] * len(view), _whole_outputs(view))
    return view.run_whole() if found is None else found


def _decide_rows(view: View) -> Decision | None:
    if view.type in LAYOUTS:
        return LAYOUTS[view.type](view)
    if view.type in _CONTRACTIONS:
        return decide_contraction(view)
    for rule in (
        decide_elementwise,
        decide_reduction,
        decide_convolution,
        decide_row_by_row,
    ):
        found = rule(view)
        if found is not None:
            return found
    return None


def _decide_parts(view: View) -> Decision | None:
    """Decide an operation of parts of sums."""
    if view.type in _TO_ROWS and Form.SIZES in view.forms():
        # One number for all rows is summed before it is as many.
        found = LAYOUTS[view.type](view)
        if found is not None:
            return found
    return decide_linear(view)


def _decide_sizes(view: View) -> Decision:
    """Decide an operation whose inputs are whole or integers computed of sizes."""
    if view.type in _OF_SIZES:
        found = LAYOUTS[view.type](view)
        if found is not None:
            return found
    return Decision([WHOLE] * len(view), _whole_outputs(view))


def _whole_outputs(view: View) -> list:
    """Return the facts of outputs that need nothing of another replica."""
    from tfdp.program.rules.elementwise import ELEMENTWISE
    from tfdp.program.sizes import broadcast

    if view.type in ELEMENTWISE and all(f.sizes is not None for f in view.facts):
        shapes = [fact.sizes for fact in view.facts]
        return (
            [whole(broadcast([s for s in shapes if s is not None]))] if shapes else []
        )
    return view.whole_outputs()


__all__ = ["AS_HELD", "decide"]
