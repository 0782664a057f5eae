"""Dispatch: from an intercepted function on DTensors to a local call, planned once per kind of call and then cached.

The key of the cache is all that a rule can see: the function, each operand's spec (layout, shape, dtype), and every
other argument by name and type. A floating-point number is seen by its type only, unless the op's rule asks for more, so
that a step size that changes every step doesn't miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.dtensor.fallback import fall_back, near
from hp_core.dtensor.gradients import operand_local
from hp_core.dtensor.operands import collect_dtensors, refuse_plain_tensors, replace_dtensors
from hp_core.errors import HyperParallelError, ShardingRuleError
from hp_core.layout import Layout
from hp_core.miss_storm import MissStorm
from hp_core.platform import get_platform
from hp_core.process_group import on_destroy
from hp_core.rules.flat import decide, gathering
from hp_core.rules.registry import Rule, find_rule, on_change
from hp_core.rules.rule import Composite, OpCall, OutsideRule, Strategy
from hp_core.rules.spec import TensorSpec, spec_of
from hp_core.rules.view import VIEW_OPS

__all__ = ["DispatchCacheInfo", "SkipDTensorDispatch", "dispatch", "dispatch_cache_clear", "dispatch_cache_info"]

_MAX_PLANS = 1 << 16


class DispatchCacheInfo(NamedTuple):
    """Counters of the cache of op plans."""

    misses: int
    size: int


_plans: dict[Any, OpPlan | CompositePlan] = {}
_misses = 0
_storm = MissStorm(
    "op plans",
    "Plans depend on shapes, layouts and every argument but floating-point numbers: pad to a few shapes, and pass what "
    "changes in every step as a tensor or a float.",
)
_sees_floats: set[Any] = set()
_handlers: dict[Any, Callable[..., Any] | None] = {}
_skip_depth = 0  # how many contexts are open in any thread: the hot path asks the context variable only then
_skip: ContextVar[bool] = ContextVar("skip_dtensor_dispatch", default=False)
_DTensor: Any = DTensorMethods  # until the class exists


def dispatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an intercepted function whose arguments hold DTensors."""
    if _skip_depth and _skip.get():
        return _on_locals(function, args, kwargs or {})
    cls = _DTensor
    try:
        key: Any = (function, *[value._spec if type(value) is cls else _key(value) for value in args])
        if kwargs:
            key = (key, *[(name, _key(value)) for name, value in kwargs.items()])
        if function in _sees_floats:
            key = (key, _floats(args, kwargs))
        plan = _plans.get(key)
    except TypeError:  # an argument that can't be hashed: plan the call afresh
        key, plan = None, None
    if plan is not None:
        return plan.run(function, args, kwargs)
    return _first_time(function, args, kwargs or {}, key)


class Slot(NamedTuple):
    """Where an operand stands in a call.

    Attributes:
        place: position, or name of a keyword.
        item: index in the list that stands there, or None.
    """

    place: Any
    item: int | None


class OpPlan:
    """How calls of one kind run: where the operands stand, which move or vary, which local function, what comes out."""

    __slots__ = (
        "_bound",
        "_check",
        "_copies_back",
        "_expected",
        "_flat",
        "_inplace",
        "_is_copy",
        "_is_view",
        "_lists",
        "_local",
        "_moves",
        "_name",
        "_names",
        "_outputs",
        "_slots",
        "_spec",
        "_specs",
    )

    def __init__(
        self,
        strategy: Strategy,
        call: OpCall,
        vary: tuple[tuple[int, ...], ...],
        slots: tuple[Slot, ...],
        expected: list[tuple[tuple[int, ...], Any]] | None = None,
    ) -> None:
        moves = []
        for slot, spec, layout, axes in zip(slots, call.specs, strategy.layouts, vary, strict=True):
            target = None if layout is spec.layout else layout
            if target is not None or axes:
                moves.append((slot, target, axes))
        self._moves = tuple(moves)
        self._slots = slots
        self._lists = tuple(dict.fromkeys(slot.place for slot in slots if slot.item is not None))
        self._names = tuple(slot.place for slot in slots if slot.item is None and type(slot.place) is str)
        self._local = None if strategy.local is None else get_platform().ops.local(strategy.local)
        self._bound = strategy.bound
        self._check = strategy.check
        self._inplace = call.inplace
        self._copies_back = call.inplace and _writes_elsewhere(strategy, call, slots)
        self._is_view = call.name in VIEW_OPS and strategy.detached is not False
        self._is_copy = self._is_view and (bool(strategy.detached) or strategy.layouts[0] is not call.specs[0].layout)
        # the usual case: all tensors are positional, the op itself runs, and makes new tensors
        self._flat = not (self._lists or self._names or self._local or self._check or self._inplace or self._is_view)
        self._name = call.name
        self._expected = expected  # of the dense op: compared once, with what the first call gives
        self._outputs = strategy.outputs
        self._spec: TensorSpec | None = None  # of the output, if it is one tensor
        self._specs: tuple[TensorSpec, ...] | None = None  # of the outputs, if they are several

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run one call of this kind."""
        cls = _DTensor
        arguments = [value._local if type(value) is cls else value for value in args]
        if self._flat:
            for (place, _), layout, vary in self._moves:
                if layout is not None or _needs_gradient(arguments[place]):
                    arguments[place] = operand_local(args[place], layout, vary)
            result = function(*arguments, **kwargs) if kwargs else function(*arguments)
            spec = self._spec
            if spec is not None and result.dtype is spec.dtype:
                return _new_dtensor(cls, result, spec)
            return self._wrap(result)
        if self._check is not None:
            self._check()
        if self._inplace:
            _refuse_lost_write(_first(args, kwargs))
        named = kwargs
        if self._lists or self._names:
            named = dict(kwargs) if kwargs else {}
            self._replace_nested(arguments, named)
        for (place, item), layout, vary in self._moves:
            source, target = (args, arguments) if type(place) is int else (kwargs, named)
            operand = source[place] if item is None else source[place][item]  # type: ignore[index]
            if layout is not None or _needs_gradient(operand._local):
                moved = operand_local(operand, layout, vary)
                if item is None:
                    target[place] = moved  # type: ignore[index]
                else:
                    target[place][item] = moved  # type: ignore[index]
        if self._local is not None:
            result = self._local(*self._operands(arguments, named), **self._bound)
        elif named:
            result = function(*arguments, **named)
        else:
            result = function(*arguments)
        if self._copies_back:
            return _first(args, kwargs).copy_(self._wrap(result))
        if self._inplace:
            target = _first(args, kwargs)
            if self._local is not None and result is not None and result is not getattr(target, "_local", result):
                return target.copy_(self._wrap(result))  # the local implementation made a new tensor
            return _written(target)
        spec = self._spec
        wrapped = (
            _new_dtensor(cls, result, spec) if spec is not None and result.dtype is spec.dtype else self._wrap(result)
        )
        if self._is_view and (self._is_copy or _first(args, kwargs)._is_detached_view):
            for view in wrapped if isinstance(wrapped, (tuple, list)) else (wrapped,):
                view._is_detached_view = True
        return wrapped

    def _replace_nested(self, arguments: list[Any], named: dict[str, Any]) -> None:
        """Put local tensors into lists and keywords."""
        cls = _DTensor
        for place in self._lists:
            target: Any = arguments if type(place) is int else named
            target[place] = [value._local if type(value) is cls else value for value in target[place]]
        for name in self._names:
            named[name] = named[name]._local

    def _operands(self, arguments: list[Any], named: Any) -> list[Any]:
        """The local tensors, in order of appearance."""
        found = []
        for place, item in self._slots:
            value = arguments[place] if type(place) is int else named[place]
            found.append(value if item is None else value[item])
        return found

    def _wrap(self, result: Any) -> Any:
        """The DTensors of the local results."""
        outputs = self._outputs
        if not outputs:
            return result
        single = get_platform().tensors.is_tensor(result)
        results = (result,) if single else tuple(result)
        if len(results) != len(outputs):
            raise ShardingRuleError(f"a rule told of {len(outputs)} outputs, but the op gave {len(results)}.")
        specs = self._specs
        if specs is None or any(local.dtype is not spec.dtype for local, spec in zip(results, specs, strict=True)):
            tensors = get_platform().tensors
            specs = tuple(
                spec_of(
                    layout,
                    _global_shape(layout, sizes, tensors.shape(local)),
                    tensors.dtype(local),
                )
                for local, (layout, sizes) in zip(results, outputs, strict=True)
            )
            if self._expected is not None:
                self._compare(specs)
            if single:
                self._spec = specs[0]
            else:
                self._specs = specs
        wrapped = [_new_dtensor(_DTensor, local, spec) for local, spec in zip(results, specs, strict=True)]
        if single:
            return wrapped[0]
        return type(result)(wrapped)  # a tuple, a list, or a named tuple of the framework

    def _compare(self, specs: Sequence[TensorSpec]) -> None:
        """A rule that gives another shape or dtype than the dense op is a fault of the rule, and must not go on."""
        expected, self._expected = self._expected, None
        given = [(tuple(spec.shape), spec.dtype) for spec in specs]
        if self._local is None:  # the op itself ran: its element types are right, whatever is told without values
            given, expected = [(shape, None) for shape, _ in given], [(shape, None) for shape, _ in expected or ()]
        if given != expected:
            raise ShardingRuleError(
                f"the sharding rule of {self._name} gives {given}, but the op gives {expected} of global tensors; the rule is "
                f"wrong. Report it, or register another with register_sharding_rule({self._name!r}, ...)."
            )


class CompositePlan:
    """A call that runs as other ops on DTensors: only its arguments have to be told apart."""

    __slots__ = ("_compute", "_copies_back", "_name", "_names", "_parameters")

    def __init__(
        self, name: str, compute: Callable[..., Any], parameters: tuple[str, ...], copies_back: bool = False
    ) -> None:
        self._copies_back = copies_back
        self._name = name
        self._compute = compute
        self._parameters = parameters
        self._names = frozenset(parameter.lstrip("*") for parameter in parameters)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run one call of this kind."""
        arguments = get_platform().ops.bind(args, kwargs or {}, self._parameters)
        if not arguments.keys() <= self._names:
            # None and False are what such keywords are when they aren't meant
            ignored = {n: v for n, v in arguments.items() if n not in self._names and v is not None and v is not False}
            if ignored:
                given = ", ".join(f"{n}={v!r}" for n, v in ignored.items())
                raise ShardingRuleError(f"{self._name} on DTensors doesn't take {given}; leave it out.")
            arguments = {n: v for n, v in arguments.items() if n in self._names}
        first = arguments.pop(self._parameters[0].lstrip("*"))
        if not self._copies_back:
            return self._compute(first, **arguments)
        _refuse_lost_write(first)
        # what the ops save of the target for their gradients must outlive the write
        result = self._compute(first.clone() if _needs_gradient(first._local) else first, **arguments)
        return first if result is first else first.copy_(result)


class SkipDTensorDispatch:
    """Inside this context ops on DTensors run on the local tensors and give plain local tensors, with no rule at all.

    For code that knows what it does with the parts, such as an optimizer step that is purely local.
    """

    def __enter__(self) -> SkipDTensorDispatch:
        global _skip_depth
        self._token = _skip.set(True)
        _skip_depth += 1
        return self

    def __exit__(self, *_: Any) -> None:
        global _skip_depth
        _skip_depth -= 1
        _skip.reset(self._token)


def dispatch_cache_info() -> DispatchCacheInfo:
    """Misses and size of the cache of op plans; hits are not counted, they are the hot path."""
    return DispatchCacheInfo(_misses, len(_plans))


def dispatch_cache_clear() -> None:
    """Forget all op plans (they hold process groups)."""
    global _misses
    _plans.clear()
    _storm.clear()
    _misses = 0


on_destroy(dispatch_cache_clear)
on_change.append(dispatch_cache_clear)


# -- the first call of a kind ---------------------------------------------------------------------------------------


def _first_time(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    global _DTensor, _new_dtensor, _needs_gradient, _misses
    if _DTensor is DTensorMethods:  # the first call of all: its key didn't know the class yet
        platform = get_platform()
        _DTensor, _new_dtensor, _needs_gradient = dtensor_type(), platform.new_dtensor, platform.autograd.needs_gradient
        return dispatch(function, args, kwargs)
    ops = get_platform().ops
    if function not in _handlers:
        _handlers[function] = ops.handler(function)
    handler = _handlers[function]
    if handler is not None:
        return handler(*args, **kwargs)
    if kwargs.get("out") is not None:
        return _into(kwargs["out"], dispatch(function, args, {n: v for n, v in kwargs.items() if n != "out"}))
    named = ops.canonical(function)
    name, inplace = named if named is not None else (getattr(function, "__name__", str(function)), False)
    if inplace and name in VIEW_OPS:
        raise ShardingRuleError(f"{name}_ would change the shape of a DTensor in place; write x = x.{name}(...).")
    rule = find_rule(function, name)
    if rule is None and inplace:
        # the framework's own op would write to storage that this DTensor's layout says nothing of
        raise ShardingRuleError(
            f"{name}_ in place has no sharding rule; compute what it gives and x.copy_() it, work on x.to_local(), or register a "
            f"rule with register_sharding_rule({name!r}, ...){near(name)}."
        )
    if inplace:
        _refuse_lost_write(_first(args, kwargs))  # told before whatever else is wrong with the target
    if rule is None:
        return fall_back(function, name, args, kwargs, None)
    if rule.decomposed and rule.inplace is not None and inplace is not rule.inplace:
        spelling, other = (f"{name}_", f"x.copy_(x.{name}(...))") if inplace else (name, f"x.{name}_(...)")
        raise ShardingRuleError(f"{spelling} has no rule on DTensors; write {other}.")
    if rule.sees_floats and function not in _sees_floats and not rule.decomposed:
        _sees_floats.add(function)
        return dispatch(function, args, kwargs)
    _misses += 1
    _storm.missed(function, name, key)
    refuse_plain_tensors(name, args, kwargs)
    try:
        plan = _plan(rule, name, inplace, function, args, kwargs)
    except OutsideRule as error:
        if inplace:
            raise
        return fall_back(function, name, args, kwargs, error)
    if key is not None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan.run(function, args, kwargs)


def _plan(
    rule: Rule, name: str, inplace: bool, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OpPlan | CompositePlan:
    """How calls of this kind run. What doesn't fit is told here, on all ranks alike, before anything is communicated."""
    if rule.decomposed:
        _dense_outputs(name, function, args, kwargs)
        compute = rule.function if rule.flat == "as is" or not _any_flat(args, kwargs) else gathering(rule.function)
        return CompositePlan(name, compute, rule.parameters)
    call, slots = _read(rule, name, inplace, args, kwargs)
    try:
        strategy = decide(rule, call, [slot.item for slot in slots])
    except Exception as error:
        if inplace or not isinstance(error, HyperParallelError):
            _dense_outputs(name, function, args, kwargs)  # tells what is wrong with the call, if anything is
        raise
    expected = _dense_outputs(name, function, args, kwargs)
    if isinstance(strategy, Composite):
        return CompositePlan(name, strategy.function, rule.parameters, copies_back=inplace)
    active = strategy.active
    if active is None:
        union = frozenset(axis for layout in strategy.layouts for axis in layout.active_axes)
        active = (union,) * len(strategy.layouts)
    vary = tuple(
        () if index in strategy.complete else tuple(sorted(active[index] - layout.active_axes))
        for index, layout in enumerate(strategy.layouts)
    )
    return OpPlan(strategy, call, vary, slots, expected)


def _any_flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    operands: list[Any] = []
    collect_dtensors((args, kwargs), operands)
    return any(operand.layout.flat is not None for operand in operands)


def _dense_outputs(
    name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[int, ...], Any]] | None:
    """Shapes and dtypes of the dense results, if they can be told; a call that is wrong for the dense op is refused.

    Raises:
        Exception: the framework's own error for the global shapes and dtypes, with the operands' layouts added.
    """
    try:
        return get_platform().ops.dense_outputs(function, args, kwargs)
    except Exception as error:
        operands: list[Any] = []
        collect_dtensors((args, kwargs), operands)
        told = ", ".join(repr(operand._spec) for operand in operands)
        message = f"{name}: {str(error) or type(error).__name__} Operands: {told}."
        try:
            raised = type(error)(message)
        except Exception:
            raised = ShardingRuleError(message)
        raise raised from error


def _on_locals(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function on the local tensors, its result left plain."""
    operands: list[Any] = []
    collect_dtensors(args, operands)
    collect_dtensors(kwargs, operands)
    locals_ = iter([operand._local for operand in operands])
    local_args = replace_dtensors(args, locals_)
    return function(*local_args, **replace_dtensors(kwargs, locals_))


def _read(
    rule: Rule, name: str, inplace: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpCall, tuple[Slot, ...]]:
    """The call as its rule sees it, and where its tensors stand."""
    slots = []
    specs = []
    for place, value in (*enumerate(args), *kwargs.items()):
        if type(value) is _DTensor:
            slots.append(Slot(place, None))
            specs.append(value._spec)
        elif type(value) is list or type(value) is tuple:
            for item, inner in enumerate(value):
                if type(inner) is _DTensor:
                    slots.append(Slot(place, item))
                    specs.append(inner._spec)
                elif type(inner) in (list, tuple):
                    found: list[Any] = []
                    collect_dtensors(inner, found)
                    if found:
                        raise ShardingRuleError(f"{name}: DTensors in lists within lists have no rule.")
    bound = get_platform().ops.bind(args, kwargs, rule.parameters)
    arguments = {parameter: _visible(value, rule.sees_floats) for parameter, value in bound.items()}
    return OpCall(name, arguments, tuple(specs), inplace), tuple(slots)


# -- arguments ------------------------------------------------------------------------------------------------------


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is _DTensor:
        return value._spec
    if kind is float:
        return float
    if kind is list or kind is tuple:
        return (kind, *[item._spec if type(item) is _DTensor else _key(item) for item in value])
    if kind is slice:
        return (slice, value.start, value.stop, value.step)
    if isinstance(value, DTensorMethods):
        raise TypeError  # a subclass, or the first call before the class is known: no cached plan
    return (
        (kind, value) if not hasattr(value, "shape") else (kind, tuple(value.shape), value.dtype, _requires_grad(value))
    )


def _floats(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[float, ...]:
    found: list[float] = []

    def visit(value: Any) -> None:
        if type(value) is float:
            found.append(value)
        elif type(value) in (list, tuple):
            for item in value:
                visit(item)

    for value in (*args, *(kwargs or {}).values()):
        visit(value)
    return tuple(found)


def _visible(value: Any, sees_floats: bool) -> Any:
    kind = type(value)
    if kind is _DTensor:
        return value._spec
    if kind is float and not sees_floats:
        return float
    if kind is list or kind is tuple:
        return kind(_visible(item, sees_floats) for item in value)
    return value


def _first(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The first argument, which may be given by name."""
    return args[0] if args else next(iter((kwargs or {}).values()))


def _refuse_lost_write(target: Any) -> None:
    for tensor in target if type(target) in (list, tuple) else (target,):
        if getattr(tensor, "_is_detached_view", False):
            raise ShardingRuleError(
                f"writing in place to a view of a DTensor that had to be moved (now {tensor.layout}) would be lost to the tensor "
                f"it is a view of. Write to the tensor itself, or to view.clone()."
            )


def _into(target: Any, result: Any) -> Any:
    """What `out=` asks for: the result, copied to where it is wanted, in the target's own layout."""
    if type(target) is not _DTensor or type(result) is not _DTensor or tuple(target.shape) != tuple(result.shape):
        raise ShardingRuleError(
            "out= on DTensors takes one DTensor of the result's shape; leave it out and copy what is returned."
        )
    return target.copy_(result)


def _global_shape(layout: Layout, sizes: Sequence[int | None], local: Sequence[int]) -> tuple[int, ...]:
    """The sizes that a rule told; those of whole dims, which it may leave out, are the local tensor's."""
    own = local if layout.flat is None else [0] * len(sizes)  # of flat shares all sizes are told
    return tuple(given if size is None else size for given, size in zip(own, sizes, strict=True))


def _writes_elsewhere(strategy: Strategy, call: OpCall, slots: tuple[Slot, ...]) -> bool:
    """Whether an in-place op would write to a moved copy of its target, which must then be copied back."""
    if not strategy.outputs or not slots or slots[0].item is not None:
        return False
    own = call.specs[0].layout
    return strategy.layouts[0] is not own or strategy.outputs[0][0] is not own


def _written(target: Any) -> Any:
    """What an in-place op returns, after forgetting what was remembered of the tensors it wrote to."""
    if type(target) in (list, tuple):
        for tensor in target:
            if type(tensor) is _DTensor and (tensor._memo is not None or tensor._origin is not None):
                tensor._forget()
        return None
    target._forget()
    return target


def _requires_grad(value: Any) -> bool:
    return get_platform().autograd.requires_grad(value)


_new_dtensor: Callable[[type, Any, Any], Any]
_needs_gradient: Callable[[Any], bool]
