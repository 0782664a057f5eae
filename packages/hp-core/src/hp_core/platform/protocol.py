"""What a framework must provide. Tensors and dtypes are opaque above this line.

The protocol is cut into small parts (collectives, tensors, gradients, processes), each one class, so that an
implementation can be read and tested part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from hp_core.geometry import Box

__all__ = [
    "Autograd",
    "Collectives",
    "DType",
    "DeterministicSwitches",
    "Event",
    "Group",
    "ModuleTools",
    "OpSample",
    "OpSamples",
    "Ops",
    "Platform",
    "Processes",
    "Recut",
    "Run",
    "SampleOperand",
    "Stream",
    "Tensor",
    "TensorTools",
    "Work",
]

Tensor = Any
"""A framework's tensor; nothing above the seam looks inside."""
DType = Any
"""A framework's element type; hashable."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Ranks that communicate together, ordered by global rank.

    Attributes:
        ranks: global ranks, ascending.
        native: the framework's group; None for a group of one rank, whose collectives are no-ops.
        devices: device types whose tensors the group's backend carries.
    """

    ranks: tuple[int, ...]
    native: Any = field(repr=False, default=None)
    devices: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


Run = tuple[int, int, int]
"""Rows of a tensor: first row, step (which may be negative), number of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Recut:
    """What one rank sends, keeps and receives when rows along a dim change hands (see `hp_core.rules.exchange`).

    Attributes:
        group: the ranks that share the rows.
        own: this rank's position in the group.
        sends: for each member, the rows that it gets from here.
        receives: for each member, where the rows from it go: pairs (first row, number of rows).
        length: number of rows afterwards.
        moves: whether any member sends anything to another.
    """

    group: Group
    own: int
    sends: tuple[tuple[Run, ...], ...]
    receives: tuple[tuple[tuple[int, int], ...], ...]
    length: int
    moves: bool


class Work(Protocol):
    """Handle of an asynchronous communication."""

    def wait(self) -> Any:
        """Return when the result may be used."""

    def is_completed(self) -> bool:
        """Whether it has finished."""


class Event(Protocol):
    """A point in a stream's order."""

    def record(self, stream: Any = None) -> None:
        """Mark the point that `stream` (default: the current one) has been given work up to."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Block this thread until the stream has passed it."""

    def wait(self, stream: Any = None) -> None:
        """Make `stream` (default: the current one) wait for it."""


class Stream(Protocol):
    """Work that runs in order, beside other streams."""

    def submit(self, fn: Callable[[], object]) -> None:
        """Queue a piece of work."""

    def record_event(self, event: Any = None) -> Event:
        """An event that completes when the work queued so far has."""

    def wait_stream(self, stream: Any) -> None:
        """Work queued from now on waits for what is queued on `stream` now."""

    def query(self) -> bool:
        """Whether all queued work is done."""

    def wait_event(self, event: Any) -> None:
        """Work queued from now on waits for `event`."""

    def synchronize(self) -> None:
        """Block this thread until all queued work is done."""


class Processes(Protocol):
    """The world of processes and its groups."""

    device_type: str

    def init_world(
        self,
        backend: str | None,
        *,
        init_method: str | None,
        world_size: int | None,
        rank: int | None,
        timeout: timedelta | None,
    ) -> None:
        """Join the world (see `hp_core.process_group.init_process_group`)."""

    def destroy_world(self) -> None:
        """Leave the world and drop its groups."""

    def is_initialized(self) -> bool:
        """Whether the world exists."""

    def rank(self) -> int:
        """Global rank; 0 without a world."""

    def world_size(self) -> int:
        """Number of processes; 1 without a world."""

    def backend(self, group: Group | None) -> str:
        """Name of the communication backend of a group (default: of the world)."""

    def new_group(self, ranks: tuple[int, ...], own: bool = False) -> Group:
        """Make a group; called by its members only, and only by them.

        With `own` it shares no queue with other groups of the same ranks.
        """


class Collectives(Protocol):
    """The one door: each call is recorded and works on preallocated, contiguous outputs.

    With `async_op` a call returns a handle, else None. In a group of one rank a call copies, or does nothing.
    """

    def all_gather(self, output: Tensor, source: Tensor, group: Group, async_op: bool = False) -> Work | None:
        """`output` is the concatenation of every member's `source`, flattened, in group order."""

    def reduce_scatter(
        self, output: Tensor, source: Tensor, reduce_op: str, group: Group, async_op: bool = False
    ) -> Work | None:
        """`output` is this member's equal share of the reduced `source`, flattened."""

    def all_reduce(self, tensor: Tensor, reduce_op: str, group: Group, async_op: bool = False) -> Work | None:
        """Reduce in place."""

    def all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange 1-D pieces; splits are in elements, per member. Empty on all members: equal ones, which is faster."""

    def broadcast(self, tensor: Tensor, source_rank: int, group: Group, async_op: bool = False) -> Work | None:
        """Copy in place from global rank `source_rank`."""

    def scatter(
        self, output: Tensor, pieces: Sequence[Tensor] | None, source_rank: int, group: Group, async_op: bool = False
    ) -> Work | None:
        """Give each member one of `pieces` (all of one shape), which only `source_rank` has."""

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Batched point-to-point with global ranks; returns, or the handle is done, when all of it has happened."""

    def send(self, tensor: Tensor, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Send to global rank `peer`."""

    def recv(self, tensor: Tensor, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Receive from global rank `peer`, in place."""

    def barrier(self, group: Group) -> None:
        """Wait until all members arrive."""


class TensorTools(Protocol):
    """The few things that layers above do to tensors themselves."""

    def is_tensor(self, value: object) -> bool:
        """Whether it is one of the framework's tensors (a DTensor is one)."""

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Its shape, of a kind that `new_wrapper` takes without conversion.

        Raises:
            PlatformError: it is no tensor of this framework.
        """

    def dtype(self, tensor: Tensor) -> DType:
        """Its element type."""

    def as_shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes in the form that `shape` gives."""

    def itemsize(self, dtype: DType) -> int:
        """Bytes per element."""

    def is_floating(self, dtype: DType) -> bool:
        """Whether the element type is floating point or complex."""

    def dtype_name(self, dtype: DType) -> str:
        """Its name: "float32", "int64", ..."""

    def dtype_of_name(self, name: str) -> DType:
        """The element type called so."""

    def arange(self, start: int, stop: int, like: Tensor) -> Tensor:
        """The int64 numbers start, ..., stop - 1, on the device of `like`."""

    def from_ints(self, values: Sequence[int], like: Tensor) -> Tensor:
        """A 1-D int64 tensor, on the device of `like`."""

    def to_ints(self, tensor: Tensor) -> list[int]:
        """The values of a 1-D integer tensor."""

    def to_float64(self, tensor: Tensor) -> Tensor:
        """Integers as float64."""

    def sqrt(self, tensor: Tensor) -> Tensor:
        """Square roots, to the last bit or nearly."""

    def full(self, shape: Sequence[int], value: Any, dtype: DType, device_type: str | None) -> Tensor:
        """Filled with one value (None: uninitialised), on a device of this type (None: the platform's own)."""

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Uninitialised, on the device and of the dtype of `like`."""

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Zeros, on the device and of the dtype of `like`."""

    def cast(self, tensor: Tensor, dtype: DType) -> Tensor:
        """The same values as another element type; itself if it is of that type."""

    def contiguous(self, tensor: Tensor) -> Tensor:
        """The same, dense and row-major; itself if it already is."""

    def clone(self, tensor: Tensor) -> Tensor:
        """A dense row-major copy."""

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A view if possible."""

    def movedim(self, tensor: Tensor, source: int, destination: int) -> Tensor:
        """A view with one dim moved."""

    def narrow(self, tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
        """The view of an interval of one dim."""

    def crop(self, tensor: Tensor, box: Box) -> Tensor:
        """The view of a box."""

    def beginning(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The first elements of a dense tensor as a dense one on the same storage that doesn't count as a view of it."""

    def paste(self, target: Tensor, box: Box, source: Tensor) -> None:
        """Copy `source` into a box of `target`."""

    def scale_(self, tensor: Tensor, factor: float) -> Tensor:
        """Multiply in place."""

    def device_type_of(self, tensor: Tensor) -> str:
        """The type of its device: "cpu", "cuda", "npu", ..."""

    def is_meta(self, tensor: Tensor) -> bool:
        """Whether it has no storage."""

    def bit_patterns(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Its bits as a 1-D tensor of signed integers, row-major, and how many of them make one element.

        It may share memory with the tensor, and is where int64 arithmetic wraps: on a CPU or CUDA device.

        Raises:
            PlatformError: it has no dense storage.
        """

    def memory(self, tensor: Tensor) -> tuple[int, int, str] | None:
        """Address, bytes held from there on and name of the element type, for native kernels that write to the tensor.

        None where they can't: it isn't in the host's memory, isn't dense and row-major, or stands for another tensor.
        """

    def tie_count(self, tensor: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`(tensor == value)` and the same as numbers, both in the dtype of `tensor`."""


class Autograd(Protocol):
    """The framework's own gradients, on local tensors."""

    keeps_gradients: bool
    """Whether the framework keeps a gradient with its parameter."""

    def kept_gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient that is kept with a parameter (a DTensor or a plain tensor), or None."""

    def needs_gradient(self, tensor: Tensor) -> bool:
        """Whether gradients are recorded now and this tensor takes part."""

    def with_gradient(
        self, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`forward(tensor)`, not recorded, whose gradient with respect to `tensor` is `backward(gradient)`."""

    def requires_grad(self, tensor: Tensor) -> bool:
        """Whether the tensor takes part in gradients, recorded now or not."""

    def is_leaf(self, tensor: Tensor) -> bool:
        """Whether no op of the graph made it."""

    def version(self, tensor: Tensor) -> int:
        """How often the storage was written to."""

    def pending_share(self, tensor: Tensor, keeps: bool) -> Tensor:
        """A copy, or as many zeros, whose gradient is the tensor's own: one addend of a sum that equals the tensor."""

    def alias(self, tensor: Tensor) -> Tensor:
        """The same storage as another node of the graph."""

    def detach(self, tensor: Tensor) -> Tensor:
        """The same storage outside the graph."""

    def unrecorded(self, function: Callable[[], None]) -> None:
        """Call it with gradients not recorded: it may write to tensors that have a place in the graph."""

    def recomputes(self) -> bool:
        """Whether a forward is being computed again inside a backward."""


class Ops(Protocol):
    """How the framework spells ops, and local implementations that only a rule asks for."""

    named_dtypes: dict[str, DType]
    """Element types that ops like `float()` and `long()` cast to, by canonical op name."""

    def canonical(self, function: Any) -> tuple[str, bool] | None:
        """Framework-neutral name of an intercepted function and whether it writes in place; None for what is no op."""

    def identity(self, op: Any) -> Any:
        """What stands for an op in the table of users' rules, however it is spelt when it is registered or called."""

    def handler(self, function: Any) -> Callable[..., Any] | None:
        """What answers a function that is no op on values (metadata, autograd), called with its arguments; or None."""

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any], parameters: Sequence[str]) -> dict[str, Any]:
        """The call's arguments by their canonical names; a parameter "*name" takes all remaining positional ones."""

    def dense_outputs(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[int, ...], DType]] | None:
        """Shape and dtype of each tensor that the call would give on global tensors, told without computing anything.

        Returns:
            None where that can't be told, because it depends on values or the framework can't say.

        Raises:
            Exception: the framework's own error, if the call doesn't fit the global shapes and dtypes.
        """

    def local(self, name: str) -> Callable[..., Any]:
        """The local implementation called `name`, which works on plain tensors."""


class ModuleTools(Protocol):
    """Walking and hooking the framework's modules."""

    def named_modules(self, module: Any) -> list[tuple[str, Any]]:
        """The module and all below it, with dotted names; the root is "".

        Raises:
            PlatformError: it is no module of this framework.
        """

    def kind(self, module: Any) -> str:
        """Either "linear", "embedding", or "other"."""

    def own_parameters(self, module: Any) -> list[tuple[str, Tensor]]:
        """Parameters that the module itself holds."""

    def own_buffers(self, module: Any) -> list[tuple[str, Tensor]]:
        """Buffers that the module itself holds."""

    def as_parameter(self, value: Tensor, requires_grad: bool) -> Tensor:
        """The tensor as a parameter."""

    def set_parameter(self, module: Any, name: str, value: Tensor) -> None:
        """Replace a parameter, keeping whether it requires a gradient."""

    def tie_parameter(self, module: Any, name: str, value: Tensor) -> None:
        """Make a parameter the very one given."""

    def set_buffer(self, module: Any, name: str, value: Tensor) -> None:
        """Replace a buffer."""

    def hook_inputs(self, module: Any, hook: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Before each forward, replace `(args, kwargs)` by what `hook` returns."""

    def hook_output(self, module: Any, hook: Callable[[Any], Any]) -> None:
        """After each forward, replace the output by what `hook` returns."""

    def forward_names(self, module: Any) -> list[str]:
        """Names of the parameters of the module's forward, in order; "**" among them if it takes any name."""

    def convert_on_load(self, module: Any, convert: Callable[[Tensor, Any], Any]) -> None:
        """When a state dict is loaded, replace its value for each own tensor by `convert(tensor, value)`; said once counts."""

    def state(self, module: Any) -> list[tuple[str, Any]]:
        """What the module saves, by name, parameters as the very objects that it holds."""

    def building_on(self, device: str, include_buffers: bool) -> AbstractContextManager[None]:
        """Inside, parameters (and buffers) of modules that this thread builds are on `device`; "meta" has no memory."""

    def initialisers(self, module: Any, above: Sequence[Any]) -> list[Callable[[], object]]:
        """The ways in which the module's own parameters get their values, best first.

        `above` is the module and those that hold it, nearest first: one of them may know how to fill it.
        """

    def copy_attributes(self, source: Tensor, target: Tensor) -> None:
        """Copy the public attributes that user code hung on a parameter."""


@dataclass(frozen=True)
class OpSample:
    """One call of an op, in the framework's own spelling, for checking its sharding rule.

    Attributes:
        op: canonical name of the op whose rule the call must reach.
        call: the call as text; with `operands` it identifies the sample.
        function: the call, a function of as many tensors as there are operands.
        operands: what the tensors are, blank-separated: a shape ("4x6"; "-" has no dims), with a letter in front for other
            values than normal float64 ones (see `OpSamples.values`).
        inplace: whether it is the in-place variant that is called.
        draws: whether it draws random numbers; a single rank's numbers are then the reference.
    """

    op: str
    call: str
    function: Callable[..., Any]
    operands: str
    inplace: bool = False
    draws: bool = False


@dataclass(frozen=True)
class SampleOperand:
    """The dense value of one operand of a sample.

    Attributes:
        tensor: the value.
        may_pend: whether a layout in which its sum is pending makes sense.
        differentiable: whether its gradient is checked.
    """

    tensor: Tensor
    may_pend: bool
    differentiable: bool


class OpSamples(Protocol):
    """Calls of all ops that the framework has, and what comparing them with dense needs of it."""

    record: str
    """Where the golden record of these calls is kept, from the folder of hp-core in a source tree."""

    most: dict[str, int]
    """By name of a mesh, of how many combinations of layouts of one call at most the record is kept; where it is silent, the
    validator decides.
    """

    def table(self) -> tuple[OpSample, ...]:
        """All samples; operands and text of each are unlike any other's."""

    def has_inplace(self, op: str) -> bool:
        """Whether the framework has an in-place variant of the op of this canonical name."""

    def values(self, operands: str, seed: int) -> list[SampleOperand]:
        """Dense values, equal for equal seeds. Letters in front of a shape: p positive, u between 0 and 1, b bool,
        i<n> integers below n ("i7:4x6"), n without gradient, f never pending, s float32, h bfloat16, c complex128.
        """

    def noise(self, like: Tensor, seed: int) -> Tensor:
        """Random values of the same shape and element type, equal for equal seeds."""

    def gradients(
        self,
        inputs: Sequence[Tensor],
        differentiable: Sequence[bool],
        run: Callable[[list[Tensor]], Sequence[tuple[Tensor, Tensor]]],
    ) -> list[Tensor | None]:
        """Differentiate a computation.

        Args:
            inputs: tensors without a place in the graph, DTensors or plain.
            differentiable: for each, whether its gradient is wanted.
            run: the computation, called once with the inputs; gives its outputs, each with the gradient to start from.

        Returns:
            The gradient of each input, of its own kind; None where no output depends on it or none is wanted.
        """

    def extremum(self, left: Tensor, right: Tensor, largest: bool) -> Tensor:
        """The larger, or the smaller, of each two elements of plain tensors."""

    def differing(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Numbers of the pairs of plain tensors that differ by more than rounding; those of integers, by anything."""

    def native_calls(self) -> dict[str, tuple[Callable[..., Any], ...]]:
        """Ops of the framework's own distributed op library, by canonical name, with calls of up to three 2-D float
        tensors to try; none where no such call is known.
        """


class DeterministicSwitches(Protocol):
    """What the framework itself has for deterministic results (see `hp_core.platform.determinism`)."""

    variables: frozenset[str]
    """Environment variables that matter with it."""
    can_restore: bool
    """Whether the switches can be turned back."""

    def started(self) -> dict[str, str]:
        """What has started and won't read variables again, in words: "world" (communicators), "device"."""

    def require_settable(self, level: int) -> None:
        """Refuse a level that can't be set any more; nothing is changed.

        Raises:
            PlatformError: with the reason.
        """

    def state(self) -> dict[str, str]:
        """The switches as they are, by the names that users know them by."""

    def set(self, level: int) -> None:
        """Turn the switches as a level needs them."""

    def restore(self, state: Any) -> None:
        """Turn them back to what `state` gave."""


class Platform(Protocol):
    """One framework on one kind of device."""

    name: str
    processes: Processes
    collectives: Collectives
    tensors: TensorTools
    autograd: Autograd
    ops: Ops
    modules: ModuleTools
    deterministic_switches: DeterministicSwitches

    def new_stream(self) -> Stream:
        """A stream that runs beside the current one: a device stream, or a worker thread on the CPU."""

    def define_dtensor(self, dispatch: Callable[..., Any], methods: type) -> type:
        """The framework's tensor subclass, given the dispatcher (the ground knows nothing of the roof)."""

    def allow_in_files(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Let the framework's safe loading of files call what DTensors are made of."""

    def new_dtensor(self, cls: type, local: Tensor, spec: Any) -> Any:
        """Wrap a local tensor; `spec` has `shape`, `dtype` and `layout`."""

    def mesh_to_native(self, mesh: Any) -> Any:
        """The framework's own mesh for one of ours."""

    def dtensor_to_native(self, tensor: Any) -> Any:
        """The framework's own distributed tensor for one of ours, on the same local tensor and in the same graph."""

    def native_parts(self, tensor: Any) -> tuple[Tensor, Any, Sequence[Any], dict[int, tuple[int, ...]]]:
        """What the framework's own distributed tensor is made of.

        Local tensor, the framework's mesh and placements, and the axes (outermost first) of those dims that several axes
        cut in another order than the mesh's.
        """

    def fallback(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[..., Any]) -> Any:
        """Run an op that has no rule through the framework's own distributed op library.

        Returns `NotImplemented` if the framework has none.
        """

    def op_samples(self) -> OpSamples:
        """Calls of all ops, for the validator of sharding rules."""
