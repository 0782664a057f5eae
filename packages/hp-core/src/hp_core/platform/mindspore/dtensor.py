"""The MindSpore subclass behind `DTensor`: the local tensor's storage with the global tensor's metadata.

It is made by `define_dtensor`, which is *given* the dispatcher, so that nothing here imports upward. MindSpore hands
every op on it to `__fallback__`; ops then run on local tensors, and MindSpore's own gradients record those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor
from mindspore.ops import primitive

from hp_core.platform.mindspore.calls import interpret
from hp_core.platform.mindspore.face import MindSporeFace
from hp_core.platform.mindspore.op import PairOp

__all__ = ["define_dtensor"]


def define_dtensor(dispatch: Callable[..., Any], methods: type) -> type:
    """The class `DTensor`: `methods` (framework-neutral) over MindSpore's metadata, over `mindspore.Tensor`.

    Args:
        dispatch: called as `dispatch(function, args, kwargs)` for every intercepted function.
        methods: mixin with layout, redistribution and conversion.
    """

    class DTensor(methods, MindSporeFace, Tensor):  # type: ignore[misc]
        __doc__ = methods.__doc__
        _dispatch = staticmethod(dispatch)

        def __fallback__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            op, arguments, named = interpret(function, args, kwargs)
            result = dispatch(op, arguments, named)
            return (result, *[None] * op.extra) if isinstance(op, PairOp) else result

    _intercept_lists(DTensor)
    DTensor.__module__ = "hp_core.dtensor.api"
    DTensor.__qualname__ = "DTensor"
    return DTensor


def _intercept_lists(cls: type) -> None:
    """MindSpore's older primitives look for `__fallback__` among their arguments, but not within lists of tensors.

    They would run on the local tensors without telling. So lists are looked through here, where these primitives start.
    """
    run = primitive._run_op

    def run_op(function: Any, name: str, args: tuple[Any, ...]) -> Any:
        for value in args:
            if type(value) is tuple or type(value) is list:
                for item in value:
                    if isinstance(item, cls):
                        return item.__fallback__(run, (function, name, args))  # type: ignore[attr-defined]
        return run(function, name, args)

    primitive._run_op = run_op
