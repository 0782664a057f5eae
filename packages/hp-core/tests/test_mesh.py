"""Meshes: interned values, rank arithmetic without any process, and errors with the numbers in them."""

from __future__ import annotations

import copy
import pickle

import pytest

from hp_core.errors import HyperParallelError, MeshError
from hp_core.mesh import DeviceMesh, as_mesh, get_current_mesh


def test_equal_meshes_are_one_object() -> None:
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    assert DeviceMesh([2, 3], ["dp", "tp"], range(6)) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy(mesh) is mesh
    assert DeviceMesh((2, 3), ("dp", "cp")) is not mesh
    assert DeviceMesh((2, 3), ("dp", "tp"), [5, 4, 3, 2, 1, 0]) is not mesh
    assert as_mesh(mesh) is mesh


def test_a_mesh_knows_its_shape_and_axes() -> None:
    mesh = DeviceMesh((2, 3), ("dp", "tp"), [10, 11, 12, 13, 14, 15])
    assert (mesh.ndim, mesh.shape, mesh.mesh_dim_names) == (2, (2, 3), ("dp", "tp"))
    assert (mesh.size(), mesh.size("dp"), mesh.size("tp"), mesh.size(1)) == (6, 2, 3, 3)
    assert mesh.rank_list == (10, 11, 12, 13, 14, 15)
    assert (mesh.axis_index("tp"), mesh.axis_index(0), mesh.axis_index(-1)) == (1, 0, 1)
    assert repr(mesh) == "DeviceMesh(dp=2, tp=3, ranks=[10, 11, 12, 13, 14, 15])"
    assert repr(DeviceMesh((2, 3), ("dp", "tp"))) == "DeviceMesh(dp=2, tp=3)"


def test_coordinates_and_ranks_are_inverse() -> None:
    mesh = DeviceMesh((2, 3, 2), ("dp", "cp", "tp"), [rank * 2 for rank in range(12)])
    for rank in mesh.rank_list:
        coordinate = mesh.get_coordinate(rank)
        assert coordinate is not None
        assert mesh.rank_at(coordinate) == rank
    assert mesh.get_coordinate(4) == (0, 1, 0)
    assert mesh.get_coordinate(1) is None
    with pytest.raises(MeshError, match=r"rank 1 is not part of DeviceMesh"):
        mesh.require_coordinate(1)


def test_members_differ_only_along_the_axes_in_the_order_asked() -> None:
    mesh = DeviceMesh((2, 2, 2), ("dp", "cp", "tp"))
    assert mesh.members((2,), 5) == (4, 5)
    assert mesh.members((0,), 5) == (1, 5)
    assert mesh.members((0, 2), 5) == (0, 1, 4, 5)
    assert mesh.members((2, 0), 5) == (0, 4, 1, 5)
    assert mesh.members((), 5) == (5,)


def test_axes_of_one_rank_are_fine() -> None:
    mesh = DeviceMesh((1, 2, 1), ("dp", "tp", "cp"))
    assert mesh.members((0, 2), 1) == (1,)
    assert mesh.get_coordinate(1) == (0, 1, 0)


def test_flattening_keeps_the_order_of_ranks() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"), [3, 1, 2, 0])
    assert mesh.flatten("all") is DeviceMesh((4,), ("all",), [3, 1, 2, 0])
    assert mesh.flatten().mesh_dim_names == ("dp_tp",)


def test_the_current_mesh_is_the_innermost_entered() -> None:
    outer, inner = DeviceMesh((2,), ("dp",)), DeviceMesh((4,), ("tp",))
    assert get_current_mesh() is None
    with outer:
        with inner:
            assert get_current_mesh() is inner
        assert get_current_mesh() is outer
        with pytest.raises(ZeroDivisionError), inner:
            raise ZeroDivisionError
        assert get_current_mesh() is outer
    assert get_current_mesh() is None


@pytest.mark.parametrize(
    ("shape", "names", "ranks", "text"),
    [
        ((), (), None, r"mesh shape \(\): it needs at least one axis"),
        ((2, 0), ("dp", "tp"), None, r"mesh shape \(2, 0\).*at least one rank"),
        ((2, 2), ("dp",), None, r"\(2, 2\) has 2 axes, but 1 names were given"),
        ((2, 2), ("dp", "dp"), None, r"\('dp', 'dp'\) must be distinct"),
        ((2,), ("None",), None, r"other than 'None'"),
        ((2,), ("",), None, r"non-empty"),
        ((2, 2), ("dp", "tp"), [0, 1, 2], r"\(2, 2\) needs 4 ranks, but 3 were given: \[0, 1, 2\]"),
        ((2, 2), ("dp", "tp"), [0, 1, 2, 1], r"twice in the mesh: \[0, 1, 2, 1\]"),
    ],
)
def test_contradictions_are_errors_with_the_numbers(
    shape: tuple[int, ...], names: tuple[str, ...], ranks: list[int] | None, text: str
) -> None:
    with pytest.raises(MeshError, match=text) as caught:
        DeviceMesh(shape, names, ranks)
    assert isinstance(caught.value, HyperParallelError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("axis", ["ep", 2, -3])
def test_an_unknown_axis_is_an_error_that_lists_the_axes(axis: str | int) -> None:
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    with pytest.raises(MeshError, match=r"no mesh axis .*\{'dp': 2, 'tp': 3\}.*'dp', 'tp'"):
        mesh.size(axis)
    with pytest.raises(MeshError, match="expected a DeviceMesh, got int"):
        as_mesh(3)


def test_one_mesh_is_on_one_device_type() -> None:
    shape, names = (2, 2), ("device_a", "device_b")
    mesh = DeviceMesh(shape, names)
    assert DeviceMesh(shape, names, device_type="cpu") is mesh
    assert mesh.device_type == "cpu"
    assert DeviceMesh(shape, names) is mesh
    with pytest.raises(MeshError, match=r"on device type 'cpu'.*can't also be on 'npu'"):
        DeviceMesh(shape, names, device_type="npu")
