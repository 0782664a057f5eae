"""Newton-Schulz: the nearest (semi-)orthogonal matrix, or nearly, by matrix products alone; stacks of matrices at once.

Five steps of the quintic iteration with Jordan's coefficients (https://kellerjordan.github.io/posts/muon), which grow small
singular values fastest and leave all of them between about 0.7 and 1.2.
"""

from __future__ import annotations

import torch

__all__ = ["COEFFICIENTS", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)

_AT_ONCE = 1 << 26
"""Elements of the stacks that are worked on together: the iteration needs a few times their memory."""


def orthogonalize(
    matrices: torch.Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Orthogonalize each matrix of a stack, in the element type of the stack.

    Args:
        matrices: [matrix, row, column]; not changed.
        coefficients: of x, x^3 and x^5.
        steps: number of iterations.
        eps: norms are taken to be at least this.

    Returns:
        A stack of the same shape.
    """
    count, rows, columns = matrices.shape
    portion = max(1, _AT_ONCE // max(1, rows * columns))
    if count > portion:
        return torch.cat([orthogonalize(part, coefficients, steps, eps) for part in matrices.split(portion)])
    first, third, fifth = coefficients
    x = matrices.mT if rows > columns else matrices  # the Gram matrix shall be the small one
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=_accumulating(x.dtype))
    x = x / norms.clamp_(min=eps).to(x.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    return x.mT if rows > columns else x


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
