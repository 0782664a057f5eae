"""What an asynchronous redistribution still owes: a local tensor with its place in the graph, but not yet its values.

The DTensor that `redistribute(async_op=True)` returns keeps this in place of its local tensor until it is first used.
"""

from __future__ import annotations

from hp_core.errors import RedistributeError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.redistribute.execution import Arrivals
from hp_core.rules.spec import TensorSpec

__all__ = ["Arriving"]


class Arriving:
    """A local tensor on its way. Whatever the communication reads and writes stays alive as long as this does.

    Args:
        local: the tensor that will have the values; its node in the graph is there.
        arrivals: what is to be done before it may be used.
        source: the tensor that is being sent.
        spec: what will have arrived.
    """

    __slots__ = ("_arrivals", "_local", "_source", "_spec", "_version")

    def __init__(self, local: Tensor, arrivals: Arrivals, source: Tensor, spec: TensorSpec) -> None:
        self._local, self._arrivals, self._source, self._spec = local, arrivals, source, spec
        self._version = get_platform().autograd.version(source)

    def wait(self) -> Tensor:
        """The tensor, when it has its values.

        Raises:
            RedistributeError: the source was written to in the meantime, so what arrived may be old, new or a mix.
            CommTimeoutError: a peer didn't answer in time.
        """
        autograd = get_platform().autograd
        autograd.unrecorded(self._finish)
        if autograd.version(self._source) != self._version:
            raise RedistributeError(
                f"a DTensor was written to while its asynchronous redistribution to {self._spec} was on its way, so what "
                f"arrived can't be trusted. Use the result before writing to its source, or redistribute a clone()."
            )
        return self._local

    def _finish(self) -> None:
        while self._arrivals:
            self._arrivals[0]()
            del self._arrivals[0]
