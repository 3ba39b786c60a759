"""Programs that random composition has found, as small as they fail without a mend."""

from __future__ import annotations

from tests.program.random_programs import Program, Step

FOUND = {
    "a sum of three with a repeated part, of one row": Program(
        (Step("inner_gradient", (2,), {"kind": "tanh"}),), ((10, "sum"),)
    ),
    "a loop over rows": Program(
        (Step("map_fn", (0,), {}),), ((10, "squares"),), by_inputs=True
    ),
    "products with the results of a loop": Program(
        (
            Step("bool_to_float", (4,), {}),
            Step("scan", (10,), {}),
            Step("one_hot", (3,), {"axis": 0}),
            Step("matmul", (11, 12), {"left": True, "right": True, "kind": "adjoint"}),
        ),
        ((13, "sum"),),
    ),
    "a branch whose gradient reads sizes": Program(
        (
            Step("einsum", (1, 7), {"equation": "ab,c->a"}),
            Step("cond", (10, 10), {}),
        ),
        ((11, "squares"),),
    ),
    "a loop over time, then rows that are padded": Program(
        (
            Step("einsum", (0, 8), {"equation": "abc,bc->ac"}),
            Step("scan_time", (10,), {}),
            Step("pad", (11,), {"axis": -2, "before": 1, "after": 2, "value": 0}),
        ),
        ((12, "squares"),),
    ),
    "half of the rows, computed by floats": Program(
        (Step("half_of", (1,), {"axis": 0}), Step("unary", (10,), {"kind": "tanh"})),
        ((11, "sum"),),
        (10,),
    ),
    "entries of two rows side by side": Program(
        (
            Step("reduce", (0,), {"kind": "mean", "axes": [2], "keepdims": False}),
            Step("reshape_last", (10,), {"last": 2}),
            Step("reduce", (11,), {"kind": "max", "axes": [1], "keepdims": False}),
        ),
        ((12, "squares"),),
    ),
    "a list of scalars and of vectors": Program(
        (
            Step("reduce", (0,), {"kind": "sum", "axes": [0], "keepdims": False}),
            Step("scan", (10,), {}),
            Step("scan", (1,), {}),
            Step("matmul", (12, 11), {"left": False, "right": True, "kind": "adjoint"}),
        ),
        ((13, "squares"),),
    ),
    "a list of parts of a sum, read only for a log": Program(
        (Step("scatter_nd", (2, 3), {}), Step("scan", (10,), {})), ((11, "mean"),)
    ),
    "pairs of rows, cut by the number of rows": Program(
        (
            Step("matmul", (1, 1), {"left": False, "right": True, "kind": "transpose"}),
            Step("slice_by_sizes", (10,), {"axis": -1, "kind": "all"}),
            Step("matmul", (11, 11), {"left": True, "right": False, "kind": "adjoint"}),
        ),
        ((12, "squares"),),
    ),
    "pairs of rows that are sorted": Program(
        (
            Step("matmul", (1, 1), {"left": False, "right": True, "kind": "transpose"}),
            Step("sort", (10,), {"axis": 1, "direction": "DESCENDING"}),
        ),
        ((11, "squares"),),
    ),
    "a table of as many rows as the batch, by unknown sizes": Program(
        (
            Step("softmax", (2,), {"axis": -1, "kind": "log_softmax"}),
            Step("zeros_of", (10,), {"axis": -1, "last": 1}),
            Step("gather_batched", (11, 3), {}),
            Step("positions", (12,), {"axis": -1}),
        ),
        ((13, "squares"),),
    ),
    "features that are mirrored, without rows": Program(
        (Step("pad_mirrored", (1,), {"axis": 1, "mode": "REFLECT"}),),
        ((10, "squares"),),
    ),
    "labels of no rows": Program(
        (
            Step("softmax", (1,), {"axis": 0, "kind": "softmax"}),
            Step("sparse_cross_entropy", (10, 3), {}),
        ),
        ((11, "squares"),),
    ),
    "a check of a sum, after which another replica checks what the sum needs": Program(
        (
            Step("split_axis", (7,), {"axis": 0, "by": 2}),
            Step("unary", (10,), {"kind": "check"}),
            Step("gather_by", (11, 3), {"axis": -2}),
        ),
        ((12, "squares"),),
    ),
    "a list of whole items in which a loop puts rows": Program(
        (
            Step("matmul", (0, 1), {"left": False, "right": True, "kind": "transpose"}),
            Step("tensordot", (10, 9), {"axes": [[1], [1]]}),
            Step("scan", (11,), {}),
        ),
        ((12, "sum"),),
    ),
    "an einsum of a batch of one row that is its own half": Program(
        (
            Step("recurrent", (1,), {"axis": 1, "count": 4}),
            Step("slice_by_sizes", (10,), {"axis": 0, "kind": "half"}),
            Step("einsum", (11, 1), {"equation": "a,bc->bac"}),
            Step("einsum", (11, 12), {"equation": "a,abc->bac"}),
        ),
        ((13, "mean"),),
    ),
}
