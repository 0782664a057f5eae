"""`PipelineSchedule`: from stages and micro-batches to losses and gradients.

Made of stages and a schedule; all ranks compare notes when it is made, and from then on each `run` is one walk (`runtime`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from hp_core.errors import HyperParallelError, PlanError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Group, Tensor
from hp_core.process_group import get_rank, get_world_size, group_of_ranks
from hp_pipeline.agreement import Note, StageNote, check_notes, exchange_notes
from hp_pipeline.batches import Dim, cut_all, cut_batch, rows_of
from hp_pipeline.feed import Feed
from hp_pipeline.itinerary import itinerary_of, unaware
from hp_pipeline.mailbox import Mailbox
from hp_pipeline.orders.registry import build_order
from hp_pipeline.passes import overlap_communication
from hp_pipeline.platform import get_tools
from hp_pipeline.runtime import CustomFunction, StepRecorder, Walk
from hp_pipeline.schedule import Schedule
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import COMMUNICATION, MetaStepType
from hp_pipeline.ties import tie_parameters
from hp_pipeline.transport import Channel, PeerFailed, Post
from hp_pipeline.validator import validate

__all__ = ["PipelineSchedule"]

Skips = Sequence[tuple[int, int, str]]
"""Skip connections: from stage, to stage, and the argument of the latter's forward that gets the former's output."""


Channels = dict[tuple[int, int], Channel]


class PipelineSchedule:
    """Runs a schedule over the stages of all ranks.

    Every rank of the pipeline makes one, with its own stages and otherwise the same arguments.

    Args:
        stages: this rank's stages, or its only one.
        schedule: a `Schedule` (communication is inserted if it has none), or the name of an order ("1f1b", "zbv", ...).
        micro_batches: into how many a batch is cut; None takes the schedule's.
        loss_fn: called as `loss_fn(output, target)`, or `loss_fn(output)` where `run` gets no target, for each micro-batch. None:
            the last stage gives the loss itself.
        args_batch_dim: which dim of each positional input is the batch: for all of them, or one by one.
        kwargs_batch_dim: the same for keyword inputs by name; 0 for those not named.
        target_batch_dim: the same for the target.
        reduction: "mean": gradients are those of the mean loss over all rows; "sum": of the sum of the micro-batches' losses.
        skips: skip connections.
        share_losses: whether `run` gives the losses on all ranks, not only on that of the last stage.
        timeout: seconds to wait for a peer; default what the process group says.
        recorder: told when each step begins and ends.
        overlap: whether the steps `OVERLAP_B_F` run as pairs (see `CommComputeOverlap`) where stages hold wrapped exchanges as
            attributes of their modules; else, and where there are none, they run the backward and then the forward.

    Raises:
        PlanError: stages, schedules, numbers of micro-batches or options of the ranks don't fit together; on every rank, naming who
            said what.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule | str,
        micro_batches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        args_batch_dim: Sequence[Dim] | Dim = 0,
        kwargs_batch_dim: Mapping[str, Dim] | None = None,
        target_batch_dim: Dim = 0,
        reduction: str = "mean",
        skips: Skips = (),
        share_losses: bool = False,
        timeout: float | timedelta | None = None,
        recorder: StepRecorder | None = None,
        overlap: bool = True,
    ) -> None:
        listed = [stages] if isinstance(stages, PipelineStage) else list(stages)
        self.loss_fn = loss_fn
        self.reduction = reduction
        self.share_losses = share_losses
        self.recorder = recorder
        self._overlaps = {exchange.overlap for stage in listed for exchange in stage.exchanges} if overlap else set()
        self.skips = {(source, target): name for source, target, name in skips}
        self._dims = args_batch_dim, dict(kwargs_batch_dim or {}), target_batch_dim
        self._timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._custom: dict[MetaStepType, CustomFunction] = {}
        self._group: Group = listed[0].group if listed else group_of_ranks(tuple(range(get_world_size())))
        self._untold = ""  # a failure of the last run that not all ranks have heard of
        self.rank = get_rank()
        self.position = self._group.ranks.index(self.rank) if self.rank in self._group.ranks else 0

        wanted = schedule.micro_batches if isinstance(schedule, Schedule) and micro_batches is None else micro_batches
        built, problem = self._build(listed, schedule, micro_batches)
        notes = exchange_notes(self._note(listed, built, wanted, problem), self._group)
        check_notes(notes)
        assert built is not None
        self.schedule = built
        self.micro_batches = built.micro_batches
        self.stages = {stage.stage_index: stage for stage in sorted(listed, key=lambda stage: stage.stage_index)}
        places = {stage.index: place for place, note in enumerate(notes) for stage in note.stages}
        self._check_places(places)
        self._owners = [self._group.ranks[place] for place in built.placement]
        noted = {stage.index: stage for note in notes for stage in note.stages}
        self._check_skips(noted)
        self._names = frozenset(name for stage in noted.values() for name in stage.names)
        shared = {name: where for stage in self.stages.values() for name, where in stage.shared_parameters.items()}
        self._ties = tie_parameters(self.stages, shared, self._owners, self.rank)
        self._ties_ranks = any(len({self._owners[stage] for stage, _ in where}) > 1 for where in shared.values())
        self._channels = {train: self._make_channels(noted) for train in (True, False)}
        self._itineraries = {train: itinerary_of(built, self.position, train) for train in (True, False)}

    def register_custom_function(self, step_type: MetaStepType, function: CustomFunction | None) -> None:
        """Let a function stand in for the runtime at one type of step.

        Args:
            step_type: which.
            function: called as `function(step, context)`; `context` is the walk, whose `default(step)` does what the runtime does.
                None takes an earlier one back.
        """
        if function is None:
            self._custom.pop(step_type, None)
        else:
            self._custom[step_type] = function

    def run(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        share: float = 1.0,
        **kwargs: Any,
    ) -> list[Tensor]:
        """Forward and backward of one batch; gradients are added to the parameters'.

        All ranks call this. The first stage's rank needs `args`, the last one's `target`; what others are given is not looked at.
        Keyword inputs go to each stage of this rank whose forward takes them.

        Args:
            args: inputs of the first stage, whole.
            target: what the loss is made with, whole.
            loss_fn: instead of the one given before.
            share: what part of a larger batch this is: gradients are multiplied by it. Two runs with 0.5 each give the mean over
                both.
            kwargs: keyword inputs, whole.

        Returns:
            The loss of each micro-batch, on the rank of the last stage (on all, with `share_losses`); else an empty list.

        Raises:
            PlanError: the batch can't be cut, or shapes changed between stages.
            PeerFailed: another rank failed; the message says where and how. Where a rank failed so late that not all could hear of
                it, in its last backward say, the others end that run, and the next one raises this on all ranks.
            CommTimeoutError: a peer didn't answer in time; who waited in which step for whom.
            ProcessGroupError: a peer has ended.
        """
        walk = self._walk(args, kwargs, target, loss_fn or self.loss_fn, share, train=True)
        for tie in self._ties:
            tie.begin()
        done = False
        try:
            walk.go()
            self._close(walk)
            done = True
        finally:
            for tie in self._ties:
                if done:
                    tie.finish()
                else:
                    tie.restore()
        return self._losses(walk)

    def evaluate(
        self, *args: Any, target: Any = None, loss_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Forward only, without gradients.

        Args:
            args: as for `run`.
            target: as for `run`.
            loss_fn: as for `run`.
            kwargs: as for `run`.

        Returns:
            On the rank of the last stage the loss of each micro-batch if there is a loss function and a target, else its output; on
            others an empty list.

        Raises:
            HyperParallelError: as `run` does.
        """
        chosen = None if target is None else loss_fn or self.loss_fn
        walk = self._walk(args, kwargs, target, chosen, 1.0, train=False)
        walk.go()
        self._close(walk)
        found = walk.losses or walk.outputs
        return [found[batch] for batch in sorted(found)]

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(
        self, stages: list[PipelineStage], schedule: Schedule | str, micro_batches: int | None
    ) -> tuple[Schedule | None, str]:
        """The schedule with communication, or what is wrong. Errors wait until notes have been compared, for all to raise."""
        problems = [stage.problem for stage in stages if stage.problem]
        if not stages:
            problems.append("it was given no stage.")
        problems += self._wrong_shares(stages)
        if len(self._overlaps) > 1:
            problems.append(
                "its stages hold exchanges wrapped by several CommComputeOverlap; wrap all of a rank by one."
            )
        if self.reduction not in ("mean", "sum"):
            problems.append(f"reduction={self.reduction!r} is neither 'mean' nor 'sum'.")
        if problems:
            return None, " ".join(problems)
        pairs = list(self.skips)
        wrong = [pair for pair in pairs if not 0 <= pair[0] < pair[1] - 1 or pair[1] >= stages[0].stage_num]
        if wrong:
            return None, f"skips {wrong}: a skip connection goes from a stage to a later one that isn't the next."
        try:
            if isinstance(schedule, str):
                if micro_batches is None:
                    return None, f"schedule {schedule!r} needs micro_batches."
                ranks = self._group.size
                chunks = max(1, -(-stages[0].stage_num // ranks))
                built = build_order(schedule, ranks, micro_batches, chunks)
            else:
                built = schedule
                if micro_batches not in (None, built.micro_batches):
                    return None, f"micro_batches={micro_batches}, but schedule {built.name} has {built.micro_batches}."
            if not any(step.type in COMMUNICATION for steps in built.steps for step in steps):
                built = overlap_communication(built, pairs)
            validate(built, skips=pairs)
        except HyperParallelError as error:
            return None, str(error)
        return built, ""

    def _wrong_shares(self, stages: list[PipelineStage]) -> list[str]:
        tools, wrong = get_tools(), []
        for stage in stages:
            if stage.shared_parameters != stages[0].shared_parameters:
                wrong.append(
                    f"stage {stage.stage_index} has other shared_parameters than stage {stages[0].stage_index}."
                )
            for name, places in stage.shared_parameters.items():
                for index, path in places:
                    if not 0 <= index < stage.stage_num:
                        wrong.append(f"shared parameter {name!r} has a copy in stage {index}, which there isn't.")
                    elif index == stage.stage_index and tools.parameter(stage.submodule, path) is None:
                        wrong.append(f"stage {index} has no parameter {path!r}, as shared_parameters[{name!r}] says.")
        return wrong

    def _note(
        self, stages: list[PipelineStage], built: Schedule | None, micro_batches: int | None, problem: str
    ) -> Note:
        platform, tools = get_platform(), get_tools()
        said = []
        for stage in stages:
            copies = []
            for name, places in stage.shared_parameters.items():
                for index, path in places:
                    parameter = tools.parameter(stage.submodule, path) if index == stage.stage_index else None
                    if parameter is not None:
                        local = tools.local(parameter)
                        copies.append(
                            (name, tools.shape(local), platform.tensors.dtype_name(platform.tensors.dtype(local)))
                        )
            said.append(
                StageNote(stage.stage_index, stage.stage_num, stage.forward_names, stage.dynamic_shape, tuple(copies))
            )
        options: dict[str, Any] = {
            "values of reduction": self.reduction,
            "values of share_losses": self.share_losses,
            "skip connections": tuple(sorted(self.skips.items())),
            "shared parameters": tuple(sorted(stages[0].shared_parameters.items())) if stages else (),
        }
        schedule = ""
        if built is not None:
            schedule = f"{built.name} ({hashlib.sha256(built.to_text().encode()).hexdigest()[:8]})"
        return Note(
            self.rank,
            tuple(said),
            schedule,
            micro_batches if built is None else built.micro_batches,
            tuple(options.items()),
            problem,
        )

    def _check_places(self, places: Mapping[int, int]) -> None:
        built, ranks = self.schedule, self._group.ranks
        if built.stages != len(places) or built.ranks != len(ranks):
            raise PlanError(
                f"schedule {built.name} is for {built.stages} stages on {built.ranks} ranks; the pipeline has {len(places)} "
                f"stages on ranks {list(ranks)}."
            )
        wrong = [stage for stage, place in enumerate(built.placement) if places[stage] != place]
        if wrong:
            expected = {stage: ranks[built.placement[stage]] for stage in wrong}
            told = {stage: ranks[places[stage]] for stage in wrong}
            raise PlanError(
                f"schedule {built.name} has stages on other ranks: by stage, the schedule says ranks {expected}, the pipeline "
                f"{told}. Give each rank the stages of `Schedule.stages_of`."
            )

    def _check_skips(self, noted: Mapping[int, StageNote]) -> None:
        for (source, target), name in self.skips.items():
            if name not in noted[target].names and "**" not in noted[target].names:
                raise PlanError(
                    f"skip connection {source} -> {target}: the forward of stage {target} has no argument {name!r}; it has "
                    f"{list(noted[target].names)}."
                )

    def _make_channels(self, noted: Mapping[int, StageNote]) -> tuple[Channels, Channels]:
        """Ways out and ways in."""
        outward: Channels = {}
        inward: Channels = {}
        pairs = [(stage, stage + 1) for stage in range(self.schedule.stages - 1)] + list(self.skips)
        for source, target in pairs:
            dynamic = noted[source].dynamic or noted[target].dynamic
            here = source in self.stages, target in self.stages
            if here == (True, False):
                outward[source, target] = Channel(source, target, self._owners[target], dynamic)
            elif here == (False, True):
                inward[source, target] = Channel(source, target, self._owners[source], dynamic)
        return outward, inward

    # -- running ------------------------------------------------------------------------------------------------------

    def _walk(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss_fn: Any, share: float, train: bool
    ) -> Walk:
        itinerary = self._itineraries[train]
        some = next(iter(self.stages.values()))
        post = Post(self._group, some.device, self._timeout, self.micro_batches)
        walk = Walk(
            self.schedule,
            self.position,
            itinerary.steps,
            self.stages,
            self.rank,
            self.skips,
            Mailbox(self.rank, self._owners, itinerary, *self._channels[train], post),
            Feed(train=train),
            self._custom,
            self.recorder,
            next(iter(self._overlaps), None),
        )
        if train and self._untold:
            walk.fail(PeerFailed(self._untold), "run()")
            self._untold = ""
        try:
            walk.feed = self._feed(args, kwargs, target, loss_fn, share, train)
        except Exception as error:  # the walk tells the other ranks
            walk.fail(error, "run()")
        return walk

    def _feed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss_fn: Any, share: float, train: bool
    ) -> Feed:
        dims, kwarg_dims, target_dim = self._dims
        unknown = [name for name in kwargs if name not in self._names]
        if unknown and "**" not in self._names:
            raise PlanError(f"no stage of the pipeline takes {unknown}; the forwards take {sorted(self._names)}.")
        first = 0 in self.stages
        last = self.schedule.stages - 1 in self.stages
        used = {
            name: value for name, value in kwargs.items() if any(stage.accepts(name) for stage in self.stages.values())
        }
        parts = self.micro_batches
        positional, keyword, rows = cut_all(args if first else (), used, dims if first else 0, kwarg_dims, parts)
        targets = None
        if last and target is not None:
            cut = cut_batch(target, target_dim, parts, "the target")
            rows = rows_of([("an input", rows), ("the target", cut.rows)])
            targets = cut.parts
        return Feed(positional, keyword, targets, loss_fn, rows, self._weight(share), train)

    def _weight(self, share: float) -> Callable[[int, int | None], float]:
        parts, mean = self.micro_batches, self.reduction == "mean"

        def weight(micro_batch: int, rows: int | None) -> float:
            if not mean:
                return share
            if not rows or rows % parts == 0:
                return share / parts
            return share * (rows // parts + (micro_batch < rows % parts)) / rows

        return weight

    def _close(self, walk: Walk) -> None:
        """After the walk: where ranks have something more to do together, they first hear whether all are well."""
        if walk.feed.train and not walk.lost_peer and (self._ties_ranks or self.share_losses) and self._group.size > 1:
            some = next(iter(self.stages.values()))
            flags = get_tools().numbers([0 if walk.error is None else 1], "int64", some.device)
            get_platform().collectives.all_reduce(flags, "max", self._group)
            if walk.error is None and get_tools().values(flags)[0]:
                raise PeerFailed("another rank of the pipeline failed at the end of the run; its own error says how.")
        elif walk.feed.train and walk.error is not None and not walk.lost_peer:
            self._note_untold(walk)
        if walk.error is not None:
            raise walk.error

    def _note_untold(self, walk: Walk) -> None:
        """A failure after the last message that could have told of it is told by the messages of the next run.

        Waiting for one another at the end of every run would cost a round, and the time in which ranks that are done already
        update their weights. So the others finish the run; the next one fails on all ranks alike, and costs nothing before.
        """
        if isinstance(walk.error, PeerFailed):
            return
        missed = unaware(self.schedule, self.position, walk.failed_at)
        if missed:
            ranks = [self._group.ranks[place] for place in missed]
            self._untold = (
                f"the run before this one wasn't whole, and ranks {ranks} couldn't know: {walk.failure} Gradients of that run are "
                f"missing on some ranks and may be used already on others. Go back to a checkpoint, or repeat both batches."
            )

    def _losses(self, walk: Walk) -> list[Tensor]:
        found = [walk.losses[batch] for batch in sorted(walk.losses)]
        if not self.share_losses or self._group.size == 1:
            return found
        tools, platform = get_tools(), get_platform()
        some = next(iter(self.stages.values()))
        values = [float(loss) for loss in found] or [0.0] * self.micro_batches
        numbers = tools.numbers(values, "float64", some.device)
        platform.collectives.broadcast(numbers, self._owners[-1], self._group)
        return found or [numbers[batch] for batch in range(self.micro_batches)]
