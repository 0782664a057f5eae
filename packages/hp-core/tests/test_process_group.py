"""The process world: what is refused before anything is communicated, groups made by their members only, timeouts with names."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hp_core.errors import CommTimeoutError, LayoutError, MeshError, ProcessGroupError
from hp_core.testing import assert_same_error, run_ranks


def _in_launcher(monkeypatch, **variables):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


class TestRefusedBeforeJoining:
    def test_hccl_without_torch_npu_names_the_package_and_the_cann_script(self):
        from hp_core.platform.torch.processes import check_backend

        with pytest.raises(ProcessGroupError, match=r"torch_npu.*set_env\.sh"):
            check_backend("hccl", cuda=False, torch_npu=False)
        with pytest.raises(ProcessGroupError, match="torch_npu"):
            check_backend("cpu:gloo,npu:hccl", cuda=False, torch_npu=False)

    def test_nccl_without_cuda_names_gloo(self):
        from hp_core.platform.torch.processes import check_backend

        with pytest.raises(ProcessGroupError, match=r"needs CUDA.*gloo"):
            check_backend("nccl", cuda=False, torch_npu=False)

    def test_unknown_backend_lists_the_known_ones(self):
        from hp_core import init_process_group

        with pytest.raises(ProcessGroupError, match=r"'mpi'.*gloo \(cpu\), nccl \(cuda\), hccl \(npu\)"):
            init_process_group("mpi")

    def test_no_launcher(self, monkeypatch):
        from hp_core import init_process_group

        _in_launcher(monkeypatch)
        with pytest.raises(ProcessGroupError, match="torchrun"):
            init_process_group("gloo")

    def test_contradiction_with_the_launcher(self, monkeypatch):
        from hp_core import init_process_group

        _in_launcher(monkeypatch, RANK="0", WORLD_SIZE="4")
        with pytest.raises(ProcessGroupError, match="world_size=2 contradicts the launcher's WORLD_SIZE=4"):
            init_process_group("gloo", world_size=2)

    def test_rank_outside_the_world(self, monkeypatch):
        from hp_core import init_process_group

        _in_launcher(monkeypatch)
        with pytest.raises(ProcessGroupError, match="rank 3 is outside the world of 2"):
            init_process_group("gloo", world_size=2, rank=3, init_method="file:///nowhere")

    def test_nowhere_to_meet(self, monkeypatch):
        from hp_core import init_process_group

        _in_launcher(monkeypatch, RANK="0", WORLD_SIZE="2")
        with pytest.raises(ProcessGroupError, match="MASTER_ADDR and MASTER_PORT not set"):
            init_process_group("gloo")

    def test_joining_twice(self):
        def twice():
            from hp_core import init_process_group

            init_process_group("gloo", init_method="file:///nowhere")

        assert_same_error(2, twice, ProcessGroupError, r"exists already \(rank \d of 2\); call destroy_process_group")


class TestDevices:
    def test_gloo_refuses_npu_tensors_naming_hccl(self):
        import torch

        from hp_core.platform import Group
        from hp_core.platform.torch.collectives import _refuse_device

        class OnNpu:
            shape = torch.Size((2, 3))
            device = type("device", (), {"type": "npu"})

        def refused():
            _refuse_device(OnNpu(), Group((0, 1), None, frozenset({"cpu"})))  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.get_backend", lambda _: "gloo")
            with pytest.raises(
                ProcessGroupError, match=r"shape \(2, 3\).*'npu'.*ranks \[0, 1\].*'gloo'.*backend='hccl'"
            ):
                refused()

    def test_every_collective_refuses_a_tensor_its_group_cannot_carry(self):
        def refused(name):
            import torch

            from hp_core.platform import get_platform
            from hp_core.process_group import group_of_ranks

            group = group_of_ranks((0, 1))
            tensor = torch.empty(4, device="meta")
            calls = get_platform().collectives
            {
                "all_gather": lambda: calls.all_gather(tensor, tensor, group),
                "reduce_scatter": lambda: calls.reduce_scatter(tensor, tensor, "sum", group),
                "all_reduce": lambda: calls.all_reduce(tensor, "sum", group),
                "all_to_all": lambda: calls.all_to_all(tensor, tensor, [2, 2], [2, 2], group),
                "broadcast": lambda: calls.broadcast(tensor, 0, group),
                "scatter": lambda: calls.scatter(tensor, None, 0, group),
                "send": lambda: calls.send(tensor, 1, group),
                "recv": lambda: calls.recv(tensor, 1, group),
            }[name]()

        for name in "all_gather reduce_scatter all_reduce all_to_all broadcast scatter send recv".split():
            assert_same_error(2, refused, ProcessGroupError, "'meta' can't travel", name)


class TestWorldAndGroups:
    def test_queries(self):
        def query():
            import hp_core

            group = hp_core.split_group([[0, 2], [1, 3]])
            return (
                hp_core.get_rank(),
                hp_core.get_world_size(),
                hp_core.get_backend(),
                hp_core.get_process_group_ranks(group),
                hp_core.get_group_local_rank(group),
            )

        assert run_ranks(4, query) == [(rank, 4, "gloo", [rank % 2, rank % 2 + 2], rank // 2) for rank in range(4)]

    def test_only_members_make_a_group(self):
        """Ranks 2 and 3 never call; a group made by the whole world would hang."""

        def some():
            import torch

            from hp_core import get_rank
            from hp_core.platform import get_platform
            from hp_core.process_group import group_of_ranks

            if get_rank() > 1:
                return None
            tensor = torch.tensor([1.0])
            get_platform().collectives.all_reduce(tensor, "sum", group_of_ranks((0, 1)))
            return tensor.item()

        assert run_ranks(4, some) == [2.0, 2.0, None, None]

    def test_one_rank_alone_needs_no_world(self):
        def alone():
            import torch

            from hp_core import DTensor, Partial, Shard, init_device_mesh

            mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"), rank_list=[0])
            x = DTensor.from_local(torch.arange(6.0).view(2, 3), mesh, [Shard(0), Partial()])
            return x.full_tensor().sum().item(), mesh["tp"].get_group().size

        assert run_ranks(1, alone, init=False) == [(15.0, 1)]

    def test_bad_splits(self):
        def bad(split):
            from hp_core import split_group

            split_group(split)

        assert_same_error(2, bad, ProcessGroupError, r"ranks \[5\] are outside the world of 2", [[0, 1], [5]])
        assert_same_error(2, bad, ProcessGroupError, "stands in two groups", [[0, 1], [1]])

    def test_groups_die_with_the_world(self):
        def again():
            import tempfile

            import torch

            from hp_core import DTensor, Partial, destroy_process_group, get_rank, init_device_mesh, init_process_group
            from hp_core.platform import get_platform
            from hp_core.process_group import group_of_ranks
            from hp_core.redistribute import redistribute_cache_info

            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            total = DTensor.from_local(torch.ones(2), mesh, [Partial()]).full_tensor().sum().item()
            name = [tempfile.mkdtemp() if get_rank() == 0 else None]
            torch.distributed.broadcast_object_list(name, 0)
            get_platform().collectives.barrier(group_of_ranks((0, 1)))
            rank = get_rank()
            destroy_process_group()
            empty = redistribute_cache_info().size
            init_process_group("gloo", init_method=f"file://{name[0]}/meet", rank=rank, world_size=2)
            return total, empty, DTensor.from_local(torch.ones(2), mesh, [Partial()]).full_tensor().sum().item()

        assert run_ranks(2, again) == [(4.0, 0, 4.0)] * 2


class TestMesh:
    def test_size_must_fit_the_world(self):
        def bad():
            from hp_core import init_device_mesh

            init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))

        assert_same_error(2, bad, MeshError, r"shape \(3, 2\) needs 6 ranks, but the world has 2")

    def test_sub_meshes_and_groups_of_axes(self):
        def parts():
            from hp_core import init_device_mesh

            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            return (
                mesh["tp"].rank_list,
                mesh.get_group("dp").ranks,
                mesh.get_group(("dp", "tp")).ranks,
                mesh.get_local_rank("tp"),
                mesh.flatten("all").shape,
            )

        everyone = (0, 1, 2, 3)
        assert run_ranks(4, parts) == [
            ((0, 1), (0, 2), everyone, 0, (4,)),
            ((0, 1), (1, 3), everyone, 1, (4,)),
            ((2, 3), (0, 2), everyone, 0, (4,)),
            ((2, 3), (1, 3), everyone, 1, (4,)),
        ]

    def test_inside_a_meta_context(self):
        """FAQ 6: building a mesh under `torch.device("meta")`, with an axis of size 1."""

        def meta():
            import torch

            from hp_core import Shard, init_device_mesh, zeros

            with torch.device("meta"):
                mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
                x = zeros(4, 6, device_mesh=mesh, placements=[Shard(0), Shard(1)])
            return mesh.get_local_rank("tp"), tuple(x.to_local().shape), str(x.device)

        assert run_ranks(2, meta) == [(0, (4, 3), "meta"), (1, (4, 3), "meta")]

    def test_torch_meshes_are_taken_and_given(self):
        def convert():
            import torch
            from torch.distributed.device_mesh import init_device_mesh as torch_mesh

            from hp_core import DeviceMesh, Shard, distribute_tensor, init_device_mesh

            theirs = torch_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            back = ours.to_torch()
            x = distribute_tensor(torch.arange(8.0), theirs, [Shard(0), Shard(0)])
            same = DeviceMesh.from_torch(theirs) is ours and DeviceMesh.from_torch(back) is ours
            return same, x.device_mesh is ours, back.mesh.tolist(), back.mesh_dim_names

        assert run_ranks(4, convert) == [(True, True, [[0, 1], [2, 3]], ("a", "b"))] * 4


def test_a_missing_peer_ends_in_a_timeout_that_names_the_ranks():
    def lonely(folder):
        import torch

        from hp_core import DTensor, Partial, get_rank, init_device_mesh, init_process_group

        init_process_group("gloo", init_method=f"file://{folder}/meet", timeout=timedelta(seconds=2))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        if get_rank() == 0:
            try:
                DTensor.from_local(torch.ones(2), mesh, [Partial()]).full_tensor()
            except CommTimeoutError as error:
                return str(error)
        else:
            import time

            time.sleep(4)  # alive, but not coming
        return None

    import tempfile

    message = run_ranks(2, lonely, tempfile.mkdtemp(), init=False)[0]
    assert message is not None
    assert "rank 0 waited in all_reduce for ranks [0, 1]" in message


def test_bad_layouts_are_refused_alike():
    def bad(case):
        import torch

        from hp_core import DTensor, Layout, Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        {
            "unknown axis": lambda: Layout((2,), ("tp",))("dp"),
            "axis twice": lambda: Layout((2,), ("tp",))("tp", "tp"),
            "dim": lambda: distribute_tensor(torch.ones(4), mesh, [Shard(1)]),
            "local shape": lambda: DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], shape=(4, 2)),
        }[case]()

    assert_same_error(2, bad, LayoutError, r"no mesh axis 'dp'; the axes are \{'tp': 2\}", "unknown axis")
    assert_same_error(2, bad, LayoutError, "axis 'tp' is used twice", "axis twice")
    assert_same_error(2, bad, LayoutError, "Shard|S\\(1\\)|dims", "dim")
    assert_same_error(
        2, bad, LayoutError, r"local tensor of shape \(3, 2\).*\(4, 2\).*its part is \(2, 2\)", "local shape"
    )
