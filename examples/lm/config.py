"""What one run of the example is: every number that decides its result, as one frozen value.

The command line makes a `RunConfig`, the report writes it to `config.json`, and everything else only reads it.
All bad combinations are found here, from the numbers alone, so that every rank refuses them before it talks to another.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass

from hp_pipeline import ORDERS

MESH_AXES = ("pp", "dp", "dpr", "dps", "tp")
DATA_AXES = ("dp", "dpr", "dps")
DTYPES = ("float32", "float64", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5


class ConfigError(ValueError):
    """A run that can't work: the message says which flags contradict each other and what would fit."""


@dataclass(frozen=True)
class ModelSizes:
    """The shape of the transformer. Vocabulary: the 256 values of a byte.

    Attributes:
        d_model: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of each block; divides `d_model` into an even head width.
        d_hidden: Inner width of the feed-forward part.
        sequence: Longest sequence, in bytes.
        vocabulary: Number of token values.
    """

    d_model: int = 128
    layers: int = 4
    heads: int = 4
    d_hidden: int = 384
    sequence: int = 128
    vocabulary: int = 256

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        sizes: The model.
        mesh: Axis name to size, outermost first; empty means one process without a mesh.
        sequence_parallel: Keep norms and the residual stream sharded along the sequence over `tp`.
        fsdp: Shard parameters, gradients and optimizer states over `dp`, or over `dps` with replicas over `dpr`.
        schedule: With a `pp` axis, the order in which its ranks compute: a name in `hp_pipeline.ORDERS`.
        micro_batches: With `pp`, into how many a rank's rows are cut; 0: two for each of its ranks, or as many as there are rows.
        optimizer: "adamw", or "muon" for the matrices inside the blocks and AdamW for the rest.
        dtype: Type of parameters and activations.
        precision: "" or "bf16": with `fsdp`, gather and compute in bfloat16, and reduce gradients in float32.
        device: `cpu`, `cuda` or `npu`.
        steps: Last step of the run (steps count from 1).
        batch: Sequences in the global batch, whatever the mesh.
        seed: Decides the initial weights and the batches.
        lr: Highest learning rate.
        warmup: Steps over which the learning rate rises to `lr`.
        weight_decay: AdamW's, for the matrices (not for the norms).
        clip: Largest norm of the whole gradient; 0 leaves it alone.
        max_bytes: How much text is read.
        eval_every: Steps between validations; 0 means only after the last step.
        eval_batches: Global batches of one validation.
    """

    sizes: ModelSizes = ModelSizes()
    mesh: tuple[tuple[str, int], ...] = ()
    sequence_parallel: bool = False
    fsdp: bool = False
    schedule: str = "1f1b"
    micro_batches: int = 0
    optimizer: str = "adamw"
    dtype: str = "float32"
    precision: str = ""
    device: str = "cpu"
    steps: int = 250
    batch: int = 16
    seed: int = 0
    lr: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    max_bytes: int = 4_000_000
    eval_every: int = 50
    eval_batches: int = 4

    @property
    def mesh_text(self) -> str:
        """The mesh as the command line spells it, or `one process`."""
        return ",".join(f"{axis}={size}" for axis, size in self.mesh) or "one process"

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> RunConfig:
        """The run that `to_json` wrote."""
        values = json.loads(text)
        values["sizes"] = ModelSizes(**values["sizes"])
        values["mesh"] = tuple((axis, size) for axis, size in values["mesh"])
        return RunConfig(**values)

    def axis_size(self, axis: str) -> int:
        """Size of a mesh axis; 1 where the mesh lacks it."""
        return dict(self.mesh).get(axis, 1)

    @property
    def pipelined(self) -> bool:
        """Whether layers are dealt out to ranks."""
        return any(axis == "pp" for axis, _ in self.mesh)

    @property
    def rows(self) -> int:
        """Sequences of the batch that one rank reads."""
        return self.batch // math.prod(self.axis_size(axis) for axis in DATA_AXES)

    @property
    def parts(self) -> int:
        """Into how many micro-batches a pipeline's rank cuts its rows."""
        return self.micro_batches or min(2 * self.axis_size("pp"), self.rows)

    def validate(self, world_size: int) -> None:
        """Refuses what can't run on this many processes.

        Raises:
            ConfigError: A size is not positive, the mesh does not fit the world, or a dimension cannot be divided over
                its axis.
        """
        self._validate_sizes()
        product = math.prod(size for _, size in self.mesh)
        if product != world_size:
            raise ConfigError(
                f"--mesh {self.mesh_text} needs {product} processes but the job has {world_size}: "
                f"launch it with `torchrun --nproc-per-node {product} ...`, "
                f"or give a mesh whose sizes multiply to {world_size}"
            )
        dp, tp = math.prod(self.axis_size(axis) for axis in DATA_AXES), self.axis_size("tp")
        if self.batch % dp:
            raise ConfigError(
                f"--batch {self.batch} can't be cut into {dp} equal parts (--mesh {self.mesh_text}): use a multiple of {dp}"
            )
        self._validate_data_parallel()
        if self.pipelined:
            self._validate_pipeline()
        if self.sizes.heads % tp:
            raise ConfigError(f"--heads {self.sizes.heads} can't be shared by tp={tp}: use a multiple of {tp}")
        if self.sizes.d_hidden % tp:
            raise ConfigError(f"--d-hidden {self.sizes.d_hidden} can't be shared by tp={tp}: use a multiple of {tp}")
        if self.sequence_parallel and not any(axis == "tp" for axis, _ in self.mesh):
            raise ConfigError(
                f"--sequence-parallel shards over tp but the mesh is {self.mesh_text}: "
                "give --mesh with a tp axis, e.g. tp=2"
            )
        if self.sequence_parallel and self.sizes.sequence % tp:
            raise ConfigError(
                f"--sequence {self.sizes.sequence} can't be cut into tp={tp} equal parts: use a multiple of {tp}"
            )

    def _validate_data_parallel(self) -> None:
        axes = [axis for axis, _ in self.mesh if axis in DATA_AXES]
        if self.fsdp and axes not in (["dp"], ["dpr", "dps"]):
            raise ConfigError(
                f"--fsdp shards over dp, or over dps with replicas over dpr, but the mesh is {self.mesh_text}: "
                "give e.g. --mesh dp=4, or --mesh dpr=2,dps=2"
            )
        if not self.fsdp and axes not in ([], ["dp"]):
            raise ConfigError(f"--mesh {self.mesh_text}: the axes dpr and dps are for --fsdp; add it, or use dp")
        if self.precision and not self.fsdp:
            raise ConfigError(
                f"--precision {self.precision} is what --fsdp gathers and computes in: add --fsdp, or use --dtype"
            )

    def _validate_pipeline(self) -> None:
        order = ORDERS.get(self.schedule)
        if order is None:
            near = difflib.get_close_matches(self.schedule.lower().replace("-", ""), ORDERS, n=2)
            meant = f"did you mean {' or '.join(near)}? It" if near else "it"
            raise ConfigError(f"--schedule {self.schedule} is unknown: {meant} must be one of {', '.join(ORDERS)}")
        ranks = self.axis_size("pp")
        stages = ranks * order.chunks
        if self.sizes.layers < stages:
            deals = f"{order.chunks} stages on each rank" if order.chunks > 1 else "one stage on each rank"
            raise ConfigError(
                f"--layers {self.sizes.layers} can't be dealt out to {stages} stages (pp={ranks}, and {self.schedule} has "
                f"{deals}): use at least {stages} layers, or fewer ranks along pp"
            )
        if self.micro_batches < 0:
            raise ConfigError(f"--micro-batches {self.micro_batches} must be at least 1")
        if self.rows < self.parts:
            raise ConfigError(
                f"--micro-batches {self.micro_batches}: of --batch {self.batch} a rank has {self.rows} rows "
                f"(--mesh {self.mesh_text}), too few to be cut into so many: use at most {self.rows}, or a larger batch"
            )

    def _validate_sizes(self) -> None:
        numbers = {
            "--d-model": self.sizes.d_model,
            "--layers": self.sizes.layers,
            "--heads": self.sizes.heads,
            "--d-hidden": self.sizes.d_hidden,
            "--sequence": self.sizes.sequence,
            "--batch": self.batch,
            "--max-bytes": self.max_bytes,
            "--eval-batches": self.eval_batches,
        }
        for flag, value in numbers.items():
            if value < 1:
                raise ConfigError(f"{flag} {value} must be at least 1")
        self._validate_training()
        if self.sizes.d_model % self.sizes.heads or self.sizes.head_width % 2:
            raise ConfigError(
                f"--d-model {self.sizes.d_model} with --heads {self.sizes.heads} must give each head an even, whole "
                "width (rotary position embedding turns pairs): use a multiple of twice the heads"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype} is unknown: use one of {', '.join(DTYPES)}")

    def _validate_training(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr} must be a positive, finite number")
        numbers = {
            "--steps": self.steps,
            "--warmup": self.warmup,
            "--weight-decay": self.weight_decay,
            "--clip": self.clip,
            "--eval-every": self.eval_every,
        }
        for flag, value in numbers.items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{flag} {value} must be 0 or a positive number")


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Reads `dp=2,tp=2` into axis names and sizes, in the order given (outermost first).

    Raises:
        ConfigError: An entry is not `axis=size`, the axis is unknown or used twice, or the size is not a positive
            integer.
    """
    mesh: dict[str, int] = {}
    for entry in text.split(","):
        axis, equals, size = (part.strip() for part in entry.partition("="))
        if not equals or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"--mesh {text!r}: {entry.strip()!r} is not AXIS=SIZE with a size of at least 1; write e.g. dp=2,tp=2"
            )
        if axis not in MESH_AXES:
            raise ConfigError(f"--mesh {text!r}: unknown axis {axis!r}; this example knows {', '.join(MESH_AXES)}")
        if axis in mesh:
            raise ConfigError(f"--mesh {text!r}: axis {axis!r} is given twice")
        mesh[axis] = int(size)
    return tuple(mesh.items())
