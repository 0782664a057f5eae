"""Ops on whole matrices (inverses, solutions, decompositions): batch dims may be cut, the matrices are whole.

One table says how many dims of each operand and output belong to a matrix; the dims before are the batch, and broadcast.
"""

from __future__ import annotations

from hp_core.errors import ShardingRuleError
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, OpCall, Operand, Output, Strategy, solve

__all__: list[str] = []

_DIMS = {"matrix": 2, "vector": 1, "number": 0}

_OPS = {
    "inv pinv cholesky cholesky_inverse matrix_exp": "matrix -> matrix",
    "inv_ex cholesky_ex": "matrix -> matrix number",
    "matrix_power": "matrix -> matrix",
    "qr": "matrix -> matrix matrix",
    "svd": "matrix -> matrix vector matrix",
    "svdvals eigvals eigvalsh": "matrix -> vector",
    "eig eigh": "matrix -> vector matrix",
    "det logdet matrix_rank cond": "matrix -> number",
    "slogdet": "matrix -> number number",
    "lu": "matrix -> matrix matrix matrix",
    "lu_factor ldl_factor geqrf": "matrix -> matrix vector",
    "lu_factor_ex ldl_factor_ex": "matrix -> matrix vector number",
    "lu_unpack": "matrix vector -> matrix matrix matrix",
    "householder_product": "matrix vector -> matrix",
    "ormqr": "matrix vector matrix -> matrix",
    "solve_triangular cholesky_solve": "matrix matrix -> matrix",
    "triangular_solve": "matrix matrix -> matrix matrix",
    "lu_solve ldl_solve": "matrix vector matrix -> matrix",
}
"""By op names: what its operands end in, and what its outputs do."""


def _table(call: OpCall, operands: list[str], outputs: list[str]) -> Strategy:
    if len(call.specs) != len(operands):
        raise ShardingRuleError(f"{call.name} on DTensors takes {len(operands)} of them, got {len(call.specs)}.")
    batches = []
    for spec, kind in zip(call.specs, operands, strict=True):
        if spec.ndim < _DIMS[kind]:
            raise ShardingRuleError(f"{call.name}: a {kind} has {_DIMS[kind]} dims, got shape {tuple(spec.shape)}.")
        batches.append(tuple(spec.shape[: spec.ndim - _DIMS[kind]]))
    ndim = max(map(len, batches))
    sizes = [1] * ndim
    for batch in batches:
        for dim, size in enumerate(batch, ndim - len(batch)):
            if size != 1:
                if sizes[dim] not in (1, size):
                    raise ShardingRuleError(f"{call.name}: batches {batches} don't broadcast.")
                sizes[dim] = size
    labelled = []
    for spec, batch in zip(call.specs, batches, strict=True):
        labels = tuple(dim if size == sizes[dim] else None for dim, size in enumerate(batch, ndim - len(batch)))
        labelled.append(Operand(spec, (*labels, *(None,) * (spec.ndim - len(batch))), PLAIN))
    return solve(labelled, [Output((*range(ndim), *(None,) * _DIMS[kind])) for kind in outputs])


def _matrix_op(call: OpCall) -> Strategy:
    operands, outputs = _signatures[call.name]
    if call.name == "qr" and call.get("mode") == "r":  # the first output is empty
        strategy = _table(call, operands, outputs)
        strategy.outputs = ((strategy.outputs[0][0].replicated, (None,)), strategy.outputs[1])
        return strategy
    if call.name == "lu" and "get_infos" in call.arguments:  # torch.lu, not torch.linalg.lu
        outputs = ["matrix", "vector", *(["number"] if call.get("get_infos") else [])]
    if call.name == "lu_solve" and call.specs[1].ndim == call.specs[0].ndim:  # torch.lu_solve(b, lu, pivots)
        operands = ["matrix", "matrix", "vector"]
    return _table(call, operands, outputs)


_signatures = {}
for _names, _text in _OPS.items():
    _before, _, _after = _text.partition("->")
    for _name in _names.split():
        _signatures[_name] = (_before.split(), _after.split())
        _parameters = {"qr": "A mode", "lu": "A pivot get_infos"}.get(_name, "A")
        rule(_name, _parameters)(_matrix_op)


@rule("solve solve_ex", "A B left check_errors")
def _solve(call: OpCall) -> Strategy:
    """A X = B; B is a vector where it has the shape of A without its last dim, as torch reads it."""
    matrix, right = call.spec("A"), call.spec("B")
    vector = right.ndim == 1 or tuple(right.shape) == tuple(matrix.shape[:-1])
    kind = "vector" if vector else "matrix"
    return _table(call, ["matrix", kind], [kind] if call.name == "solve" else [kind, "number"])


@rule("lstsq", "A B rcond driver")
@rule("tensorinv", "A ind")
@rule("tensorsolve", "A B dims")
@rule("vander", "x N")
def _whole(call: OpCall) -> Strategy:
    """Every operand and output whole: the shapes of the results follow no simple rule."""
    operands = [Operand(spec, (None,) * spec.ndim, PLAIN) for spec in call.specs]
    return solve(operands, [Output((None,) * ndim) for ndim in _ranks_of_whole(call)])


def _ranks_of_whole(call: OpCall) -> list[int]:
    """How many dims each output has."""
    matrix = call.specs[0]
    if call.name == "lstsq":
        batch = matrix.ndim - 2
        underdetermined = matrix.shape[-2] <= matrix.shape[-1]
        driver = call.get("driver") or "gelsy"
        no_residuals = underdetermined or driver == "gelsy"
        return [
            call.specs[1].ndim,
            1 if no_residuals else batch + 1,
            1 if driver == "gels" else batch,
            batch + 1 if driver in ("gelss", "gelsd") else 1,
        ]
    if call.name == "tensorinv":
        return [matrix.ndim]
    if call.name == "vander":
        return [matrix.ndim + 1]
    return [matrix.ndim - call.specs[1].ndim]
