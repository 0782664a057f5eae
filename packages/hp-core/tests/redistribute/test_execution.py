"""Redistribution on real ranks, forward and backward: all pairs of layouts of 1-D to 3-D tensors, even and uneven.

The plans are proven optimal in test_planner.py; here the programs that ranks run are compared with the global tensor.
"""

from __future__ import annotations

import pytest

from hp_core.testing import run_ranks

AXES = ("a", "b")
SHAPES = [(8,), (5,), (8, 8), (5, 3), (1, 3), (8, 4, 4), (5, 3, 2)]
# Eight ranks take long on few cores: of each number of dims one shape, uneven but for the first.
CASES = [(mesh, shape) for mesh in ((2,), (2, 2)) for shape in SHAPES]
CASES += [((4, 2), shape) for shape in ((8,), (5, 3), (5, 3, 2))]


def _all_pairs(mesh_shape, shapes, kinds):
    """Redistribute every pair on this rank; returns what came out wrong."""
    from itertools import permutations, product

    import torch

    from hp_core import DTensor, init_device_mesh
    from hp_core.layout import intern

    names = AXES[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)

    def layouts(ndim):
        found = {}
        for roles in product([None, *kinds, *range(ndim)], repeat=mesh.ndim):
            partials = tuple((axis, role) for axis, role in enumerate(roles) if isinstance(role, str))
            if len({op for _, op in partials}) > 1:
                continue
            for order in permutations(range(mesh.ndim)):
                dims = tuple(tuple(axis for axis in order if roles[axis] == dim) for dim in range(ndim))
                found[intern(mesh, dims, partials)] = None
        return list(found)

    def crop(value, box):
        return value[tuple(slice(*interval) for interval in box)]

    def parts(value, layout):
        """This rank's part; what is pending differs between ranks and reduces to the value."""
        own = crop(value, layout.bounds(value.shape)).clone()
        if layout.partials:
            kind = layout.partials[0][1]
            coordinate = mesh.get_coordinate()
            count = 1
            for axis, _ in layout.partials:
                count *= mesh.shape[axis]
            first = all(coordinate[axis] == 0 for axis, _ in layout.partials)
            if kind == "sum":
                own = own + 7 * (count - 1) if first else torch.full_like(own, -7)
            elif kind == "avg":
                own = own + (count - 1) if first else own - 1
            else:
                own = own if first else own + (-1 if kind == "max" else 1)
        return own

    wrong = []
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        value = torch.randint(-50, 50, shape, generator=generator).double()
        direction = torch.randint(-50, 50, shape, generator=generator).double()
        every = layouts(len(shape))
        for src in every:
            for dst in every:
                x = DTensor.from_local(parts(value, src).requires_grad_(), src, shape=shape)
                y = x.redistribute(dst)
                x.retain_grad()
                out = y.full_tensor()
                if not torch.equal(out.detach(), value):
                    wrong.append((shape, str(src), str(dst), "forward"))
                if tuple(y.to_local().shape) != dst.local_shape(shape) or not y.to_local().is_contiguous():
                    wrong.append(
                        (shape, str(src), str(dst), f"local {tuple(y.to_local().shape)} {y.to_local().stride()}")
                    )
                out.backward(direction)
                gradient = x.grad.to_local()
                expected = crop(direction, src.gradient.bounds(shape))
                if src.partials and src.partials[0][1] != "sum":
                    # the derivative of an average is a share; that of an extremum goes to the rank that holds it
                    total = DTensor.from_local(
                        gradient, src.with_partials(tuple((a, "sum") for a, _ in src.partials)), shape=shape
                    )
                    gradient, expected = total.full_tensor(), direction
                if not torch.allclose(gradient, expected, rtol=1e-14, atol=1e-12):
                    wrong.append((shape, str(src), str(dst), "backward"))
    return wrong


@pytest.mark.parametrize(("mesh_shape", "shape"), CASES, ids=str)
def test_all_pairs(mesh_shape, shape):
    world = 8 if mesh_shape == (4, 2) else 2 * len(mesh_shape)
    assert run_ranks(world, _all_pairs, mesh_shape, [shape], ("sum",), timeout=150) == [[]] * world


@pytest.mark.parametrize("kind", ["avg", "max", "min"])
def test_other_reductions(kind):
    assert run_ranks(4, _all_pairs, (2, 2), [(4, 4), (5, 3)], (kind,), timeout=120) == [[]] * 4
