"""Rules: the form of an operation's outputs, by the forms of its inputs.

A rule returns a `Decision`: how replicas build an operation. It returns `None` if it
does not apply to the operation, which then may have to run on the whole batch. Own rows
are the block of rows of the global batch that a replica has; the `Fact` of a tensor is
what is known of it: its form, such as own rows, and its sizes.

The `build` function of a decision creates the operation on one replica. It receives the
`Builder` of the replica, the operation of the traced program, and the values that the
replica has of its inputs; it returns the values that the replica has of the outputs.

Reading order:
    elementwise: operations on elements, and linear ones
    reductions: sums, means, maxima
    contractions: products of matrices, `Einsum`
    rowwise: operations on each row by itself, convolutions and poolings
    layouts: operations that arrange elements, joins, and what adds or moves an axis
    reshapes, slices, indexing: those that need more to decide
    composites: rows made of ragged and sparse tensors
    values: integers that are computed from sizes
    state: variables, random numbers, Python functions
    lists: lists of tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfdp.training.program.facts import Fact, Form, whole
from tfdp.training.program.rules.composites import decide_composite
from tfdp.training.program.rules.contractions import decide_contraction
from tfdp.training.program.rules.elementwise import (
    ELEMENTWISE,
    decide_elementwise,
    decide_linear,
    decide_local,
    decide_zeros,
)
from tfdp.training.program.rules.layouts import decide_layout
from tfdp.training.program.rules.lists import decide_list
from tfdp.training.program.rules.reductions import decide_reduction
from tfdp.training.program.rules.rowwise import (
    decide_recurrent,
    decide_reverse_sequence,
    decide_row_by_row,
)
from tfdp.training.program.rules.state import (
    decide_python,
    decide_random,
    decide_stateful_random,
    decide_variable,
)
from tfdp.training.program.rules.values import decide_values
from tfdp.training.program.sizes import broadcast
from tfdp.training.program.view import WHOLE, Decision, OperationView, operations

# The first rule that returns a decision applies, so the order is one of priority. These
# rules take inputs in any form, and come before those that need rows.
_RULES_OF_ANY_FORM = (
    decide_variable,
    decide_list,
    decide_values,
    decide_composite,
    decide_random,
    decide_python,
    decide_stateful_random,
    decide_local,
    decide_zeros,
)
# The first rule that returns a decision applies, so the order is one of priority. These
# rules need an input that has different rows on each replica.
_RULES_OF_ROWS = (
    decide_layout,
    decide_contraction,
    decide_elementwise,
    decide_reduction,
    decide_row_by_row,
    decide_recurrent,
    decide_reverse_sequence,
)
# Layout operations that can create different rows on each replica, although no input
# has rows: an input holds sizes that depend on the number of rows.
_LAYOUTS_FROM_SIZES = operations(
    "BroadcastTo ConcatOffset Fill Range StridedSliceGrad Tile"
)
# These layout operations repeat a partial sum for all rows, so its sum over replicas is
# computed before it is repeated, while it is small.
_REPEATING_LAYOUTS = operations("BroadcastTo Fill Tile")


def decide(view: OperationView) -> Decision:
    """Decide how replicas build an operation, by the first rule that applies.

    If no rule applies, every replica runs the operation on the whole inputs, which are
    gathered or summed over replicas for it.
    """
    decision = _first_decision(_RULES_OF_ANY_FORM, view)
    if decision is not None:
        return decision
    forms = view.forms()
    if Form.ROWS in forms:
        return _first_decision(_RULES_OF_ROWS, view) or view.run_whole()
    of_sizes = _REPEATING_LAYOUTS if Form.PART in forms else _LAYOUTS_FROM_SIZES
    if Form.SIZES in forms and view.type in of_sizes:
        decision = decide_layout(view)
    if decision is None and Form.PART in forms:
        return decide_linear(view) or view.run_whole()
    return decision or Decision([WHOLE] * len(view), _whole_outputs(view))


def _first_decision(rules: Sequence[Callable], view: OperationView) -> Decision | None:
    """Return the decision of the first rule that applies, or `None` if none does."""
    return next((decision for rule in rules if (decision := rule(view))), None)


def _whole_outputs(view: OperationView) -> list[Fact]:
    """Return the `Fact` of each output of an operation if its inputs are whole."""
    shapes = [fact.sizes for fact in view.facts if fact.sizes is not None]
    if shapes and view.type in ELEMENTWISE and len(shapes) == len(view):
        return [whole(broadcast(shapes))]
    return view.whole_outputs()
