"""Muon for the matrices of a model and AdamW for the rest, as one optimizer.

Which parameter goes where is decided from names, shapes and the kinds of modules; nothing here depends on a framework.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor

__all__ = ["Choice", "get_hyper_optimizer"]

Choice = Callable[[str, Any], bool] | Iterable[Any] | str
"""A predicate on (name, parameter); or names, patterns and parameters."""

_HEADS = frozenset(
    {"lm_head", "head", "heads", "output", "output_layer", "classifier", "embed_out", "unembed", "score"}
)
_EMBEDDINGS = ("embed", "wte", "wpe")


def get_hyper_optimizer(
    model: Any,
    *,
    muon_params: Choice | None = None,
    adamw_params: Choice | None = None,
    muon_kwargs: Mapping[str, Any] | None = None,
    adamw_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Make a `ChainedOptimizer` of `Muon` and `AdamW` for a model's parameters.

    Without a choice, Muon gets matrices and stacks of matrices (2 or 3 dims, the last two longer than 1), but for embeddings
    and heads: parameters of embedding modules, those tied to them, and those whose module or own name says "embed", "wte" or
    "wpe", or whose module is called "lm_head", "head", "output", "classifier" or the like. With one choice, the other optimizer
    gets all the rest. With both, each parameter that requires a gradient must be in exactly one.

    Args:
        model: the module, sharded already if it is to be.
        muon_params: for Muon: a predicate on (name, parameter), or names, patterns ("layers.*.weight") and parameters.
        adamw_params: the same for AdamW.
        muon_kwargs: arguments of `Muon`.
        adamw_kwargs: arguments of `AdamW`.

    Raises:
        PlanError: an unknown argument; a name, pattern or parameter that isn't in the model; a parameter in both choices or
            in none; the model has no parameters.
    """
    from hp_fsdp.optim.classes import AdamW, ChainedOptimizer, Muon

    _check_arguments("muon_kwargs", muon_kwargs, Muon)
    _check_arguments("adamw_kwargs", adamw_kwargs, AdamW)
    names = _named(model)
    if not names:
        raise PlanError(f"get_hyper_optimizer: {type(model).__name__} has no parameters.")
    muon, adamw = _shared_out(model, names, muon_params, adamw_params)
    optimizers: list[Any] = []
    if muon:
        optimizers.append(Muon(muon, **(muon_kwargs or {})))
    if adamw:
        optimizers.append(AdamW(adamw, **(adamw_kwargs or {})))
    return ChainedOptimizer(*optimizers)


def _shared_out(
    model: Any, names: list[tuple[Tensor, list[str]]], muon_choice: Choice | None, adamw_choice: Choice | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of Muon and those of AdamW, both in the model's order."""
    muon = None if muon_choice is None else _chosen("muon_params", muon_choice, names)
    adamw = None if adamw_choice is None else _chosen("adamw_params", adamw_choice, names)
    everyone = {id(param) for param, _ in names}
    if muon is None:
        muon = _matrices(model, names) if adamw is None else everyone - adamw
    if adamw is None:
        adamw = everyone - muon
    for param, known in names:
        if id(param) in muon and id(param) in adamw:
            raise PlanError(f"parameter {known[0]!r} is in muon_params and in adamw_params; choose it in one of them.")
        if id(param) not in muon and id(param) not in adamw and param.requires_grad:
            raise PlanError(
                f"parameter {known[0]!r} of shape {tuple(param.shape)} is in neither muon_params nor adamw_params; choose it in "
                f"one, leave one of the two out, or freeze it."
            )
    return ([param for param, _ in names if id(param) in muon], [param for param, _ in names if id(param) in adamw])


def _named(model: Any) -> list[tuple[Tensor, list[str]]]:
    """Each parameter once, with all its names, in the model's order."""
    modules = get_platform().modules
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for prefix, module in modules.named_modules(model):
        for name, param in modules.own_parameters(module):
            found.setdefault(id(param), (param, []))[1].append(f"{prefix}.{name}" if prefix else name)
    return list(found.values())


def _chosen(argument: str, choice: Choice, names: list[tuple[Tensor, list[str]]]) -> set[int]:
    if callable(choice):
        return {id(param) for param, known in names if choice(known[0], param)}
    chosen: set[int] = set()
    for entry in [choice] if isinstance(choice, str) else choice:
        if isinstance(entry, str):
            matching = {id(param) for param, known in names if any(fnmatchcase(name, entry) for name in known)}
            if not matching:
                near = get_close_matches(entry, [name for _, known in names for name in known], 3, 0.4)
                hint = f" Near it: {', '.join(map(repr, near))}." if near else ""
                raise PlanError(f"{argument}: no parameter of the model is called {entry!r}.{hint}")
        else:
            matching = {id(param) for param, _ in names if param is entry}
            if not matching:
                raise PlanError(
                    f"{argument}: an entry of type {type(entry).__name__} is none of the model's parameters. Give names, patterns "
                    f"or parameters that the model has now (fully_shard replaces them), or a predicate on (name, parameter)."
                )
        chosen |= matching
    return chosen


def _matrices(model: Any, names: list[tuple[Tensor, list[str]]]) -> set[int]:
    """What Muon gets when nobody chooses."""
    modules = get_platform().modules
    embedded = {
        id(param)
        for _, module in modules.named_modules(model)
        if modules.kind(module) == "embedding"
        for _, param in modules.own_parameters(module)
    }
    return {
        id(param)
        for param, known in names
        if len(param.shape) in (2, 3)
        and min(param.shape[-2:]) > 1
        and id(param) not in embedded
        and not any(_names_no_matrix(name) for name in known)
    }


def _names_no_matrix(name: str) -> bool:
    """Whether a dotted name says that this is an embedding or a head."""
    module, own = ("", *name.split("."))[-2:]
    return module in _HEADS or any(word in part for word in _EMBEDDINGS for part in (module, own))


def _check_arguments(argument: str, given: Mapping[str, Any] | None, optimizer: Any) -> None:
    known = [name for name in inspect.signature(optimizer).parameters if name != "params"]
    unknown = [name for name in given or {} if name not in known]
    if unknown:
        raise PlanError(
            f"{argument}: {optimizer.__name__} has no argument {unknown[0]!r}; it has {', '.join(sorted(known))}."
        )
