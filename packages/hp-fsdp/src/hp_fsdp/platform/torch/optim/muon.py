"""Muon: momentum, made orthogonal by Newton-Schulz, of matrices that may be sharded in any way.

Momentum is kept on the shards. A matrix that is whole on a rank stays there; the others travel to an owner, which computes
them once for all ranks, and back: two all-to-alls for all of them. See K. Jordan, https://kellerjordan.github.io/posts/muon,
and J. Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch

from hp_core.dtensor.api import DTensorMethods
from hp_core.errors import PlanError
from hp_fsdp.optim.owners import Part, Slab
from hp_fsdp.platform.torch.optim import newton_schulz
from hp_fsdp.platform.torch.optim.exchange import Exchange
from hp_fsdp.platform.torch.optim.loading import fitted
from hp_fsdp.platform.torch.optim.muon_plan import MuonPlan, plan_muon
from hp_fsdp.platform.torch.optim.runs import FlatGroup, local_of

__all__ = ["Muon"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_MOMENTUM = "momentum_buffer"

_Options = tuple[tuple[float, float, float], int, float]
"""Coefficients, steps and eps of Newton-Schulz."""


class Muon(torch.optim.Optimizer):
    """Muon on matrices [rows, columns] and stacks of matrices [matrix, rows, columns]: plain tensors and DTensors.

    The arguments that `torch.optim.Muon` has mean the same, and state dicts go both ways. Of sharded matrices the whole one
    is orthogonalized. A matrix of which one rank holds all (granularity "whole", a stack cut between matrices, a replicated
    or plain parameter) is computed by every rank that holds it, without communication. All others are shared out among the
    ranks that hold pieces, replicas included, by cost; each is computed by one rank, whatever the numbers of replicas and
    axes. That takes two all-to-alls per step for each set of ranks that a mesh consists of (and `ns_dtype`), also where
    some or all gradients are missing; whole matrices are computed while the pieces travel.

    A matrix is left alone if no rank that holds a piece of it has a gradient. If only some have one, it is zero for the others.

    All ranks of a mesh must give the same parameters in the same order.

    Args:
        params: parameters or param groups; `requires_grad` may change between steps, alike on all ranks.
        lr: learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay.
        momentum: decay of the running average of the gradient.
        nesterov: look one step ahead.
        ns_coefficients: of x, x^3 and x^5 in Newton-Schulz.
        eps: norms are taken to be at least this.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: how the shape changes the learning rate: "original" (None) by sqrt(max(1, rows / columns)),
            "match_rms_adamw" by 0.2 * sqrt(max(rows, columns)), which makes updates as large as AdamW's usually are.
        ns_dtype: "bfloat16", "float32" or "float64": in which element type pieces travel and matrices are computed.

    Raises:
        PlanError: a parameter that is no matrix or stack of matrices, or an argument that makes no sense.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = newton_schulz.COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bfloat16",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }
        self._flats: list[FlatGroup] = []
        self._basis: Any = None
        self._planned: MuonPlan | None = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters, as torch does.

        Raises:
            PlanError: a parameter that is no matrix or stack of matrices, or an option that makes no sense.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except PlanError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._flats, self._basis, self._planned = [], None, None
        for group in self.param_groups:
            group.setdefault("ns_dtype", self.defaults.get("ns_dtype", "bfloat16"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state dict of this class or of `torch.optim.Muon`, of sharded or of whole tensors.

        Raises:
            LayoutError: a state has another shape than its parameter.
        """
        super().load_state_dict(fitted(state_dict, self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices that have gradients. All ranks that share matrices call it.

        Args:
            closure: computes the loss and gradients anew; its result is returned.

        Raises:
            PlanError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._plan()
        work = _Step(self.param_groups, self._flats, self.state)
        for exchange in plan.exchanges:
            work.send(exchange)
        slabs = work.whole(plan.slabs)
        for exchange in plan.exchanges:
            work.own(exchange)
        work.decay()
        work.add_whole(slabs)
        for exchange in plan.exchanges:
            work.add_pieces(exchange)
        for flat in self._flats:
            flat.finish()
        return loss

    def _plan(self) -> MuonPlan:
        """The plan for the parameters that want gradients now."""
        params = [param for group in self.param_groups for param in group["params"]]
        basis = (
            list(map(id, params)),
            [local_of(param).requires_grad for param in params],
            [(len(group["params"]), group["ns_dtype"]) for group in self.param_groups],
        )
        if self._planned is None or basis != self._basis:
            wanted = [[p for p in group["params"] if local_of(p).requires_grad] for group in self.param_groups]
            self._flats = [FlatGroup(group, [_MOMENTUM], counted=False) for group in wanted]
            dtypes = [
                _DTYPES[group["ns_dtype"]]
                for group, chosen in zip(self.param_groups, wanted, strict=True)
                for _ in chosen
            ]
            self._planned = plan_muon([param for group in wanted for param in group], dtypes)
            self._basis = basis
        return self._planned


class _Step:
    """One step: which direction each parameter's local tensor shall go, and how far."""

    def __init__(self, groups: Sequence[dict[str, Any]], flats: Sequence[FlatGroup], state: Any) -> None:
        self.groups = groups
        self.flats = flats
        self.state = state
        self.params = [param for flat in flats for param in flat.params]
        self.locals = [local for flat in flats for local in flat.locals]
        self.owner = [group for group, flat in zip(groups, flats, strict=True) for _ in flat.params]
        self.rates = {id(group): float(group["lr"]) for group in groups}
        self.directions: dict[int, torch.Tensor] = {}
        first = 0
        for group, flat in zip(groups, flats, strict=True):
            self._move_momentum(group, flat, first)
            first += len(flat.params)

    def _move_momentum(self, group: dict[str, Any], flat: FlatGroup, first: int) -> None:
        grads = flat.gradients(self.state)
        if not grads:
            return
        momenta = [run.states[_MOMENTUM] for run in flat.runs]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        for run, direction in zip(flat.runs, ahead, strict=True):
            parts = torch.split(direction, run.sizes) if len(run.members) > 1 else (direction,)
            for member, part in zip(run.members, parts, strict=True):
                self.directions[first + member] = part

    # -- what travels -----------------------------------------------------------------------------------------------

    def send(self, exchange: Exchange) -> None:
        """Start sending the pieces of cut matrices to their owners."""
        parts = exchange.parts_to_send
        absent = [part.parameter not in self.directions for part in parts]
        exchange.send(
            [
                self._coasting(part) if gone else self.directions[part.parameter].reshape(-1)[part.start : part.stop]
                for part, gone in zip(parts, absent, strict=True)
            ],
            absent,
        )

    def own(self, exchange: Exchange) -> None:
        """Compute the matrices that this rank owns, and start sending the results."""
        kinds: dict[tuple[int, int, _Options], list[int]] = defaultdict(list)
        for place, matrix in enumerate(exchange.route.owned):
            kinds[matrix.rows, matrix.columns, _options(self.owner[matrix.parameter])].append(place)
        places_in: dict[int, tuple[torch.Tensor, int]] = {}
        stacks = []
        for (rows, columns, options), places in kinds.items():
            stack = torch.empty(len(places), rows, columns, dtype=exchange.dtype, device=exchange.device)
            places_in.update((place, (stack, index)) for index, place in enumerate(places))
            stacks.append((stack, options, places))
        exchange.collect(places_in)
        results: dict[int, torch.Tensor] = {}
        for stack, options, places in stacks:
            results.update(zip(places, newton_schulz.orthogonalize(stack, *options), strict=True))
        exchange.give_back(results)

    def _coasting(self, part: Part) -> torch.Tensor:
        """The direction of a piece without a gradient here, in case that others have one: its momentum decays."""
        group, local = self.owner[part.parameter], self.locals[part.parameter]
        table = self.state.get(self.params[part.parameter], {})
        if _MOMENTUM not in table:
            return local.new_zeros(part.numel)
        momentum = float(group["momentum"])
        held = local_of(table[_MOMENTUM]).reshape(-1)[part.start : part.stop]
        return held * (momentum**2 if group["nesterov"] else momentum)

    # -- what stays -------------------------------------------------------------------------------------------------

    def whole(self, slabs: Sequence[Slab]) -> list[tuple[Slab, torch.Tensor]]:
        """Compute the matrices that are whole here and have gradients."""
        kinds: dict[tuple[int, int, torch.device, torch.dtype, _Options], list[Slab]] = defaultdict(list)
        for slab in slabs:
            if slab.parameter in self.directions:
                group, device = self.owner[slab.parameter], self.locals[slab.parameter].device
                kinds[slab.rows, slab.columns, device, _DTYPES[group["ns_dtype"]], _options(group)].append(slab)
        done: list[tuple[Slab, torch.Tensor]] = []
        for (_, _, _, dtype, options), alike in kinds.items():
            views = [_stack(self.directions[slab.parameter], slab) for slab in alike]
            stack = torch.cat([view.to(dtype) for view in views]) if len(views) > 1 else views[0].to(dtype)
            results = newton_schulz.orthogonalize(stack, *options)
            done.extend(zip(alike, results.split([slab.count for slab in alike]), strict=True))
        return done

    # -- the parameters ---------------------------------------------------------------------------------------------

    def decay(self) -> None:
        """Decay the weights that have gradients here."""
        for group, flat in zip(self.groups, self.flats, strict=True):
            if group["weight_decay"] and flat.runs:
                torch._foreach_mul_([run.flat for run in flat.runs], self._decay_of(group))

    def add_whole(self, slabs: Sequence[tuple[Slab, torch.Tensor]]) -> None:
        """Update the matrices that are whole here."""
        self._add(
            [(_stack(self.locals[slab.parameter].detach(), slab), result, self._rate(slab)) for slab, result in slabs]
        )

    def add_pieces(self, exchange: Exchange) -> None:
        """Wait for the results that others computed, and update the pieces that are here."""
        pieces, flags = exchange.take()
        parts = exchange.parts_to_take
        wanted: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        coasting = []
        for place, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            target = _piece(self.locals[part.parameter].detach(), part)
            if part.parameter not in self.directions:
                coasting.append((place, target))
            else:
                wanted.append((target, piece.view(target.shape), self._rate(part)))
        if coasting:
            present = flags.tolist()  # the only look at values, and only where gradients are missing
            for place, target in coasting:
                if present[place]:
                    self._coast(parts[place], target)
                    wanted.append((target, pieces[place].view(target.shape), self._rate(parts[place])))
        self._add(wanted)

    def _coast(self, part: Part, target: torch.Tensor) -> None:
        """What the step does to a piece without a gradient here besides the update: momentum and weights decay."""
        group, param = self.owner[part.parameter], self.params[part.parameter]
        table = self.state[param]
        if _MOMENTUM not in table:
            table[_MOMENTUM] = torch.zeros_like(param)
        _piece(local_of(table[_MOMENTUM]), part).mul_(group["momentum"])
        target.mul_(self._decay_of(group))

    def _decay_of(self, group: dict[str, Any]) -> float:
        return 1 - self.rates[id(group)] * float(group["weight_decay"])

    def _rate(self, matrix: Slab | Part) -> float:
        group = self.owner[matrix.parameter]
        return self.rates[id(group)] * _shape_factor(group["adjust_lr_fn"], matrix.rows, matrix.columns)

    def _add(self, updates: Sequence[tuple[torch.Tensor, torch.Tensor, float]]) -> None:
        """Subtract updates times rates; as few calls as there are rates."""
        by_rate: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, update, rate in updates:
            targets, sources = by_rate.setdefault(rate, ([], []))
            targets.append(target)
            sources.append(update)
        for rate, (targets, sources) in by_rate.items():
            torch._foreach_add_(targets, sources, alpha=-rate)


def _options(group: dict[str, Any]) -> _Options:
    first, third, fifth = group["ns_coefficients"]
    return (first, third, fifth), group["ns_steps"], group["eps"]


def _shape_factor(rule: str | None, rows: int, columns: int) -> float:
    if rule == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns))


def _stack(local: torch.Tensor, slab: Slab) -> torch.Tensor:
    """The view of whole matrices in a local tensor as a stack [matrix, row, column]."""
    if local.dim() == 1:
        numel = slab.count * slab.rows * slab.columns
        return local[slab.start : slab.start + numel].view(slab.count, slab.rows, slab.columns)
    if local.dim() == 2:
        return local.unsqueeze(0)
    first = slab.start // (slab.rows * slab.columns)
    return local[first : first + slab.count]


def _piece(local: torch.Tensor, part: Part) -> torch.Tensor:
    """The view of a piece in a local tensor: of a flat one a run of elements, else all of a matrix that is here."""
    if local.dim() == 1:
        return local[part.start : part.stop]
    return local if local.dim() == 2 else local[part.start // part.numel]


def _check_group(group: dict[str, Any]) -> None:
    for number, param in enumerate(group["params"]):
        shape = tuple(param.shape)
        if len(shape) > 3:
            raise PlanError(
                f"parameter {number} of a param group has shape {shape}; Muon takes matrices and stacks of matrices. A convolution "
                f"can be kept as a matrix [out, in * height * width] and viewed in the forward; else give it to AdamW."
            )
        if len(shape) < 2:
            raise PlanError(
                f"parameter {number} of a param group has shape {shape}, which is no matrix; give it to AdamW "
                f"(get_hyper_optimizer shares parameters out by shape)."
            )
        if param.is_complex():
            raise PlanError(f"parameter {number} of a param group, of shape {shape}, is complex; give it to AdamW.")
        if not isinstance(param, DTensorMethods) and type(param) not in (torch.Tensor, torch.nn.Parameter):
            raise PlanError(
                f"parameter {number} of a param group is a {type(param).__module__}.{type(param).__qualname__}, of which Muon "
                f"can't tell who holds what; make it one of ours with DTensor.from_torch()."
            )
    if group["ns_dtype"] not in _DTYPES:
        raise PlanError(f"ns_dtype={group['ns_dtype']!r}; use one of {', '.join(map(repr, _DTYPES))}.")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise PlanError(f"adjust_lr_fn={group['adjust_lr_fn']!r}; use None, 'original' or 'match_rms_adamw'.")
    for name in ("lr", "weight_decay", "momentum", "eps", "ns_steps"):
        if float(group[name]) < 0:
            raise PlanError(f"{name}={group[name]} is negative; give a number >= 0.")
    if len(group["ns_coefficients"]) != 3:
        raise PlanError(f"ns_coefficients={group['ns_coefficients']!r}; give three, of x, x^3 and x^5.")
