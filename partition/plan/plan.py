"""Plan of a model: the device of each layer, attention head, FFN column and vocabulary row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from devices.names import join_address, parse_address
from partition import fields
from partition.errors import PlanError
from partition.fields import MOST_BYTES, Bounds, is_digest

FORMAT = "edge-plan-1"
LOCAL = "local"  # device of rank 0: the owner's own
MAX_WORLD_SIZE = 64  # limit of ranks in a plan
MAX_REPLICAS = 63  # limit of replicas in a plan
_MOST_NAME = 255  # limit of characters of a model's name
_NESTED = "prefill: it has a prefill of its own; leave that out"
_NESTED_REPLICAS = "it has replicas of its own; list them in the outer plan"


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `start` up to, but not including, `stop`. `len` is their count; an empty range is false."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise PlanError(f"the range [{self.start}, {self.stop}]; expected 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        """Return the first and the last number, for people."""
        if len(self) < 2:
            return str(self.start) if self else "none"
        return f"{self.start}-{self.stop - 1}"

    def to_json(self) -> list[int]:
        """Return [start, stop]."""
        return [self.start, self.stop]

    @classmethod
    def from_json(cls, values: Any, where: str) -> "Range":
        """Return the range that `to_json` wrote. Raises PlanError, which names the wrong value."""
        ends = fields.items(values, where)
        if len(ends) != 2:
            raise PlanError(f"{where}: {len(ends)} numbers; expected two, [start, stop]")
        start, stop = (fields.number(end, where) for end in ends)
        if start > stop:
            raise PlanError(f"{where}: [{start}, {stop}]; expected start <= stop")
        return cls(start, stop)


NOTHING = Range(0, 0)


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice of the model that one rank holds, which is cut from the model's file."""

    layers: Range  # layers of the model
    heads: Range  # query heads of every layer; all heads on each rank if attention cannot be shared
    ff: Range  # FFN columns of every layer, and of every expert if there are experts
    vocab: Range  # rows of the output head; empty unless the stage is the last
    first: bool  # first shard of its stage, which alone holds biases that are added before a sum over ranks


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of the units into which the model can be divided. Heads and FFN columns are counted in one layer."""

    layers: int
    heads: int
    heads_kv: int
    ff: int
    vocab: int

    def __post_init__(self) -> None:
        least = {"layers": 1, "heads": 0, "heads_kv": 0, "ff": 0, "vocab": 1}
        for name, few in least.items():
            if getattr(self, name) < few:
                raise PlanError(f"{name} is {getattr(self, name)}, expected {few} or more")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank: its device, and its part of each layer of its stage."""

    device: str  # a worker's HOST or HOST:PORT; LOCAL for the owner's own device
    heads: Range
    ff: Range
    vocab: Range = NOTHING
    threads: int | None = None  # number of threads; None: the device's default
    affinity: tuple[int, ...] = ()  # processors to run on; empty: the device's default
    gpu_layers: int | None = None  # number of the stage's layers on the device's GPU
    # Memory budget of the rank's process in bytes. Weights that do not fit are paged.
    memory: Annotated[int | None, Bounds(MOST_BYTES)] = None

    def __post_init__(self) -> None:
        check_device(self.device, self.threads, self.affinity)
        if self.gpu_layers is not None and self.gpu_layers < 0:
            raise PlanError(f"{self.device}: gpu_layers is {self.gpu_layers}, expected 0 or more")
        if self.memory is not None and self.memory < 1:
            raise PlanError(f"{self.device}: memory is {self.memory}, expected 1 byte or more")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without values that are the device's default."""
        return fields.encoded(self, without=("threads", "affinity", "gpu_layers", "memory"))


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers, and the ranks that share them."""

    layers: Range  # empty for a thin owner, whose single shard has all heads and columns of no layer
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Plan:
    """A whole model, distributed to ranks. Ranks are numbered stage by stage and shard by shard; rank 0 is LOCAL.

    The first of several stages may have no layers. Its only rank, rank 0, is then a thin owner: it has the tokens, the
    token table and the sampler, and computes nothing. Prompts may have a placement of their own, `prefill`. Its KV
    cache moves to this placement, which generates. Raises PlanError unless every layer, head, FFN column and vocabulary
    row has exactly one place.

    `replicas` are further whole copies of the model, which answer other requests at the same time. No device computes
    in two copies. Rank 0 of each copy is LOCAL, so at most one copy computes on LOCAL and the others have thin owners.
    The plan itself is the copy with the lowest latency.
    """

    model: str  # name for people
    model_digest: str  # SHA-256 of the model's file; "" if unknown
    sizes: Sizes
    stages: tuple[Stage, ...]
    microbatches: int | None = None  # groups of requests in a pipeline; None: one for each computing stage
    prefill: "Plan | None" = None  # separate placement that computes prompts, if any
    prefill_from: int = 0  # `prefill` is used from this number of new prompt tokens on (break-even length)
    replicas: "tuple[Plan, ...]" = ()  # further whole copies on other devices, without replicas of their own

    def __post_init__(self) -> None:
        check_model(self.model, self.model_digest)
        if self.microbatches is not None and self.microbatches < 1:
            raise PlanError(f"microbatches is {self.microbatches}, expected 1 or more")
        self._check_prefill()
        tiles("layers of the stages", [stage.layers for stage in self.computing], self.sizes.layers)
        if self.thin_owner and (len(self.stages[0].shards) != 1 or self.stages[0].layers.start):
            raise PlanError(
                f"stage 0 has no layers, begins with layer {self.stages[0].layers.start} and has"
                f" {len(self.stages[0].shards)} shards; expected layers [0, 0] and one shard, of this device"
            )
        for i, stage in enumerate(self.stages):
            self._check_shards(f"stage {i}", stage.shards, last=stage is self.stages[-1])
        if self.world_size > MAX_WORLD_SIZE:
            raise PlanError(f"{self.world_size} ranks; the maximum is {MAX_WORLD_SIZE}")
        for rank, device in enumerate(self.devices):
            if (device == LOCAL) != (rank == 0):
                raise PlanError(f"rank {rank} is on {device!r}; rank 0, and no other, is {LOCAL!r}")
        if self.replicas:
            self._check_replicas()

    def _check_prefill(self) -> None:
        if self.prefill_from < 0:
            raise PlanError(f"prefill_from is {self.prefill_from}, expected 0 or more tokens")
        if self.prefill is None:
            if self.prefill_from:
                raise PlanError(f"prefill_from is {self.prefill_from}, and there is no prefill; leave it out")
            return
        if self.prefill.prefill is not None:
            raise PlanError(_NESTED)
        if self.prefill.replicas:
            raise PlanError(f"prefill: {_NESTED_REPLICAS}")
        self._check_same_model("prefill", self.prefill)

    def _check_replicas(self) -> None:
        if len(self.replicas) > MAX_REPLICAS:
            raise PlanError(f"{len(self.replicas)} replicas; the maximum is {MAX_REPLICAS}")
        copy_of = dict.fromkeys(map(_one_notation, self.copies[0].computing_devices), "the first copy")
        for i, replica in enumerate(self.replicas):
            where = f"replicas[{i}]"
            if replica.replicas:
                raise PlanError(f"{where}: {_NESTED_REPLICAS}")
            self._check_same_model(where, replica)
            for device in replica.computing_devices:
                other = copy_of.setdefault(_one_notation(device), where)
                if other == where:
                    continue
                if device == LOCAL:
                    raise PlanError(f"{where}: it computes on this device, and so does {other}; expected a thin owner")
                raise PlanError(f"{where}: it computes on {device}, and so does {other}; a device has one copy")

    def _check_same_model(self, where: str, other: "Plan") -> None:
        for name in ("model", "model_digest", "sizes"):
            its, own = getattr(other, name), getattr(self, name)
            if its != own:
                raise PlanError(f"{where}, {name}: {its!s:.80}, expected that of the plan it belongs to, {own!s:.80}")

    def _check_shards(self, where: str, shards: tuple[Shard, ...], last: bool) -> None:
        for name, total in (("heads", self.sizes.heads), ("ff", self.sizes.ff)):
            ranges: list[Range] = [getattr(shard, name) for shard in shards]
            if total == 0:
                if len(shards) != 1:
                    raise PlanError(f"{where} has {len(shards)} shards of a model without {name}; expected one shard")
                if ranges[0] != NOTHING:
                    raise PlanError(f"{where}, {name}: {ranges[0]} of a model that has none")
            elif name == "ff" or ranges != [Range(0, total)] * max(1, len(shards)):  # all shards may have all heads
                tiles(f"{where}, {name}", ranges, total)
        if last:
            tiles(f"{where}, vocab", [shard.vocab for shard in shards], self.sizes.vocab)
        elif any(shard.vocab for shard in shards):
            raise PlanError(f"{where}, vocab: it is not the last stage, so it holds no vocabulary rows")

    @property
    def thin_owner(self) -> bool:
        """True if rank 0 holds no layer."""
        return len(self.stages) > 1 and not self.stages[0].layers

    @property
    def computing(self) -> tuple[Stage, ...]:
        """Stages that compute: all stages except a thin owner's."""
        return self.stages[self.thin_owner :]

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of ranks of each computing stage, preceded by 0 if there is a thin owner."""
        return (0,) * self.thin_owner + tuple(len(stage.shards) for stage in self.computing)

    @cached_property
    def _ranks(self) -> tuple[tuple[int, Shard], ...]:
        """Stage and shard of each rank."""
        return tuple((i, shard) for i, stage in enumerate(self.stages) for shard in stage.shards)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank."""
        return tuple(shard.device for _, shard in self._ranks)

    @property
    def placements(self) -> "tuple[Plan, ...]":
        """The first copy without `prefill`, which generates, followed by its prefill placement if there is one."""
        first = self.copies[0]
        if first.prefill is None:
            return (first,)
        return (replace(first, prefill=None, prefill_from=0), first.prefill)

    @property
    def copies(self) -> "tuple[Plan, ...]":
        """All copies of the model: the plan without its replicas, followed by the replicas."""
        if not self.replicas:
            return (self,)
        return (replace(self, replicas=()), *self.replicas)

    @property
    def computing_devices(self) -> tuple[str, ...]:
        """Devices that hold layers in any placement of any copy, each once."""
        stages = (s for copy in self.copies for placement in copy.placements for s in placement.computing)
        return tuple(dict.fromkeys(shard.device for stage in stages for shard in stage.shards))

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Devices of all placements of all copies, each once, LOCAL first."""
        placements = (placement for copy in self.copies for placement in copy.placements)
        return tuple(dict.fromkeys(device for placement in placements for device in placement.devices))

    def with_shards(self, change: Callable[[Shard], Shard]) -> "Plan":
        """Return the plan with each shard changed, including the shards of `prefill` and of the replicas."""
        stages = tuple(replace(stage, shards=tuple(map(change, stage.shards))) for stage in self.stages)
        prefill = self.prefill and self.prefill.with_shards(change)
        return replace(
            self, stages=stages, prefill=prefill, replicas=tuple(copy.with_shards(change) for copy in self.replicas)
        )

    def shard(self, rank: int) -> Shard:
        """Return a rank's shard. Like all methods with a rank, this raises PlanError for an unknown rank."""
        return self._ranks[self._checked(rank)][1]

    def stage_of(self, rank: int) -> int:
        """Return the number of a rank's stage."""
        return self._ranks[self._checked(rank)][0]

    def group(self, rank: int) -> tuple[int, ...]:
        """Return all ranks of this rank's stage in order, including this rank."""
        stage = self.stage_of(rank)
        return tuple(other for other, (its_stage, _) in enumerate(self._ranks) if its_stage == stage)

    def slice(self, rank: int) -> Slice:
        """Return the slice of the model that a rank holds."""
        shard = self.shard(rank)
        layers = self.stages[self.stage_of(rank)].layers
        return Slice(layers, shard.heads, shard.ff, shard.vocab, first=self.group(rank)[0] == rank)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there is no rank {rank}; the plan has ranks 0 to {self.world_size - 1}")
        return rank

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values for people to read and edit. Default values of shards are left out."""
        return {
            "format": FORMAT,
            **fields.encoded(self, without=("microbatches", "prefill", "prefill_from", "replicas")),
        }

    @classmethod
    def from_json(cls, values: Any, where: str = "") -> "Plan":
        """Return the plan that `to_json` wrote or a person edited. Raises PlanError, which names the wrong field.

        where: field that contains the plan; "" if none does
        """
        # Nested plans are refused before they are read, because they may be nested a thousand deep.
        if where and isinstance(values, dict):
            if values.get("replicas"):
                raise PlanError(f"{where}: {_NESTED_REPLICAS}")
            if where.endswith("prefill") and values.get("prefill") is not None:
                raise PlanError(where.removesuffix("prefill") + _NESTED)
        return fields.decoded(cls, values, where or "plan", inside=None if where else "", format=FORMAT)


def _one_notation(device: str) -> str:
    """Return the HOST:PORT of a device in lower case, so that two spellings of an address are equal."""
    try:
        return LOCAL if device == LOCAL else join_address(*parse_address(device)).lower()
    except ValueError:  # a name in a plan that is only predicted
        return device


def check_model(name: str, digest: str) -> None:
    """Raise PlanError unless a plan may have this model name, and the digest is valid or empty."""
    fields.text(name, "model")
    if digest and not is_digest(digest):
        raise PlanError(f"model_digest is {digest[:80]!r}; expected a SHA-256 in hexadecimal, or nothing")


def clean_name(name: str) -> str:
    """Return a model's name in the form for plans, with printable characters only."""
    printable = "".join(c if c.isprintable() else " " for c in name)[:_MOST_NAME].strip()
    return printable or "model"


def check_device(device: str, threads: int | None, affinity: Sequence[int]) -> None:
    """Raise PlanError unless a plan may contain this device, this number of threads and these processors."""
    if not (0 < len(device) <= 255 and device.isprintable()):
        raise PlanError(f"the device {device[:80]!r}; expected an address or a name, 1 to 255 characters")
    if threads is not None and threads < 1:
        raise PlanError(f"{device}: threads is {threads}, expected 1 or more")
    if len(set(affinity)) < len(affinity) or any(cpu < 0 for cpu in affinity):
        raise PlanError(f"{device}: affinity is {list(affinity)}; expected processors' numbers, each once")


def tiles(what: str, ranges: Sequence[Range], total: int) -> None:
    """Raise PlanError unless the non-empty `ranges` cover [0, total) in this order."""
    at = 0
    for i, part in enumerate(ranges):
        if not part:
            raise PlanError(f"{what}: part {i} is [{part.start}, {part.stop}], which is empty; leave that part out")
        if part.start != at:
            raise PlanError(f"{what}: part {i} is [{part.start}, {part.stop}], expected one that starts at {at}")
        at = part.stop
    if at != total:
        raise PlanError(f"{what}: the parts end at {at}, expected {total}")
