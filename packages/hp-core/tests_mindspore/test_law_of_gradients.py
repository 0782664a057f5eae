"""The law of gradients on MindSpore: gradients equal dense inside `value_and_grad`, with the fewest collectives."""

from __future__ import annotations

from typing import Any

import pytest

from hp_core.testing import run_ranks


def _attention_like(sequence_cut: bool) -> tuple[Any, ...]:
    """q, k and v projections of one input, and an output projection; forward and backward collectives, and errors."""
    import mindspore as ms
    import numpy as np
    from mindspore import Parameter, Tensor, mint

    from hp_core import DTensor, Partial, Replicate, Shard, init_device_mesh
    from hp_core.platform.recorder import record_collectives

    linear, silu = mint.nn.functional.linear, mint.nn.functional.silu
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank("tp")
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    dense = {"x": draw(4, 6), "q": draw(8, 6), "k": draw(8, 6), "v": draw(8, 6), "o": draw(6, 8), "norm": draw(6)}
    layouts = {"x": Shard(0) if sequence_cut else Replicate(), "o": Shard(1), "norm": Replicate()}
    layouts |= dict.fromkeys("qkv", Shard(0))

    def part(name: str, value: Any) -> Any:
        placement = layouts[name]
        return np.split(value, 2, placement.dim)[rank] if isinstance(placement, Shard) else value

    held = {name: Parameter(Tensor(part(name, value).copy()), name=name) for name, value in dense.items()}
    whole = {name: Parameter(Tensor(value), name=name) for name, value in dense.items()}

    def network(t: dict[str, Any]) -> Any:
        x = t["x"] * t["norm"]
        if sequence_cut and hasattr(x, "_spec"):
            x = x.redistribute(mesh, [Replicate()])
        gate = silu(linear(x, t["q"])) * linear(x, t["k"]) + linear(x, t["v"])
        return linear(gate, t["o"])

    def sharded() -> Any:
        y = network({n: DTensor.from_local(held[n], mesh, [layouts[n]]) for n in held})
        assert isinstance(y.placements[0], Partial)
        y = y.redistribute(mesh, [Shard(0) if sequence_cut else Replicate()])
        return (y * y).sum()

    forward = {}

    def counted() -> Any:
        with record_collectives() as log:
            loss = sharded()
        forward.update(log.counts)
        return loss

    with record_collectives() as log:
        loss, gradients = ms.value_and_grad(counted, None, weights=list(held.values()))()
    total = dict(log.counts)
    dense_value, wanted = ms.value_and_grad(lambda: (network(whole) ** 2).sum(), None, weights=list(whole.values()))()
    errors = {}
    for name, gradient, dense_gradient in zip(held, gradients, wanted, strict=True):
        expected = part(name, dense_gradient.asnumpy())
        errors[name] = float(np.abs(gradient.asnumpy() - expected).max() / np.abs(expected).max())
    backward = {kind: count - forward.get(kind, 0) for kind, count in total.items() if count != forward.get(kind, 0)}
    return forward, backward, errors, float(loss), float(dense_value.asnumpy())


def test_a_replicated_input_costs_one_all_reduce_each_way() -> None:
    for forward, backward, errors, loss, wanted in run_ranks(2, _attention_like, False):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert forward == {"all_reduce": 1}
        assert backward == {"all_reduce": 1}
        assert max(errors.values()) < 1e-5, errors


def test_a_cut_sequence_costs_a_gather_and_a_scatter_each_way() -> None:
    for forward, backward, errors, loss, wanted in run_ranks(2, _attention_like, True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert forward == {"all_gather": 1, "reduce_scatter": 1}
        # and one all-reduce for the replicated norm weight
        assert backward == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
        assert max(errors.values()) < 1e-5, errors


def _gradient_of_dtensor() -> Any:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor

    from hp_core import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = DTensor.from_local(Tensor(np.full((2, 3), 2.0, np.float32)), mesh, [Shard(0)])
    gradient = ms.grad(lambda t: (t * t * t).sum())(x)
    return type(gradient).__name__, gradient.asnumpy().tolist()


def test_a_function_of_a_dtensor_is_differentiated_by_its_local_tensor() -> None:
    for _, values in run_ranks(2, _gradient_of_dtensor):
        assert values == [[12.0] * 3] * 2


def _every_way() -> list[str]:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor

    from hp_core import DTensor, init_device_mesh
    from hp_core.layout import Layout
    from hp_core.platform.protocol import SampleOperand
    from hp_core.testing.validator.combinations import operand_layouts

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = (np.arange(35, dtype=np.float32).reshape(5, 7) - 17) / 4
    weight = np.random.default_rng(1).integers(-4, 5, (5, 7)).astype(np.float32)
    layouts = operand_layouts(mesh, 2, True)
    assert isinstance(layouts[0], Layout)
    assert SampleOperand
    faults = []
    for number, src in enumerate(layouts):
        for dst in layouts[number % 3 :: 3]:

            def own(array: Any, layout: Any) -> Any:
                return np.array(array[tuple(slice(*bounds) for bounds in layout.bounds(array.shape))])

            coordinate = mesh.require_coordinate(None)
            part = value
            for axis, _ in src.partials:
                part = part * 3 - 1 if coordinate[axis] == 0 else part * -2 + 1
            local = Tensor.from_numpy(own(part, src))

            held: list[Any] = []

            def loss(local: Any, src: Any = src, dst: Any = dst, held: list[Any] = held) -> Any:
                x = DTensor.from_local(local, src, shape=(5, 7)).redistribute(dst)
                held.append(x)
                layout = dst.gradient
                return (
                    (x * DTensor.from_local(Tensor.from_numpy(own(weight, layout)), layout, shape=(5, 7)))
                    .sum()
                    .full_tensor()
                )

            gradient = ms.grad(loss)(local)
            if not np.array_equal(held[0].detach().full_tensor().asnumpy(), value):
                faults.append(f"{src.compact_str} -> {dst.compact_str}: values")
            if not np.array_equal(gradient.asnumpy(), own(weight, src)):
                faults.append(f"{src.compact_str} -> {dst.compact_str}: gradient")
    return faults


@pytest.mark.parametrize("ranks", [4])
def test_redistribution_and_its_gradient_between_layouts_of_uneven_pieces(ranks: int) -> None:
    for faults in run_ranks(ranks, _every_way, timeout=150.0):
        assert not faults
