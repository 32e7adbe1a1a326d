"""Ready for the loss of devices: the slices that other plans need are where they belong before anything is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.cluster.fleet import Fleet, device
from edge.cluster.spares import AUTO, Room, Spares, StandbySlice
from edge.errors import EdgeError
from edge.parallel.mirror import SHARE, Mirror, not_copied
from edge.slices.local import CACHE_BYTES, OwnSlices
from edge.tasks import AggregateProgress, ShowStep, Steps
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from quant.text import bytes_text, counted


@dataclass
class Standby:
    """Standby slices and KV mirror, from which a model goes on soon after a loss, and their cost."""

    losses: int  # of devices, that it is ready for
    mirror: Mirror | None = None  # None: keys and values are not copied
    slice_bytes: dict[str, int] = field(default_factory=dict)  # on disks, by device, beside what runs
    slices: dict[str, list[str]] = field(default_factory=dict)  # which these are, for people
    missing: list[str] = field(default_factory=list)  # what it is not ready for, a sentence each

    def lines(self) -> list[str]:
        """Describe it for people."""
        slices = ", ".join(
            f"{bytes_text(size)} on {name} ({', '.join(self.slices[name])})"
            for name, size in self.slice_bytes.items()
            if size
        )
        line = f"ready for the loss of {counted(self.losses, 'device')}: slices for it take {slices or 'no more room'}"
        if self.mirror is not None:
            size = f"{bytes_text(self.mirror.token_bytes)} a token, at most {bytes_text(self.mirror.max_bytes)}"
            line += f"; keys and values are copied to this device's memory ({size}), for {SHARE:.0%} of a token at most"
        return [line, *self.missing]

    def describe(self) -> str:
        """Describe its cost by now, in a line."""
        parts = [f"ready for the loss of {counted(self.losses, 'device')}"]
        if self.mirror is not None:
            now = self.mirror
            parts.append(
                f"{bytes_text(now.held_bytes)} of keys and values held here; {bytes_text(now.copied_bytes)} copied in"
                f" {now.copied_s:.2f} s"
            )
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "losses": self.losses,
            "slice_bytes": self.slice_bytes,
            "slices": self.slices,
            "missing": self.missing,
            "mirror": None if self.mirror is None else self.mirror.to_json(),
        }


def stand_by(
    losses: int | str, spares: Spares, mirror: Mirror | str, room: Room, fleet: Fleet, steps: Steps
) -> Standby | None:
    """Have everything where it is needed when so many devices are lost; AUTO: as many as there is room for, and None
    where that is none. mirror: where keys and values are copied, or why they are not.

    The errors of `Spares.after`. What cannot be prepared is said.
    """
    copied = mirror if isinstance(mirror, Mirror) else None
    if losses == AUTO:
        spare, why = spares.most(room, copied.max_bytes if copied else 0)
        if why:
            steps.say(f"ready for no {'more losses' if spare.losses else 'loss'}: {why}")
        if not spare.losses:
            return None
    elif isinstance(losses, str):
        raise PlanError(f"spare is {losses[:40]!r}; needed is a number of devices, or {AUTO!r}")
    else:
        spare = spares.after(losses)
    standby = Standby(spare.losses, copied)
    if isinstance(mirror, str):
        standby.missing.append(not_copied(mirror))
    standby.missing += spare.missing
    with steps.step("Preparing for a loss") as show:
        _keep_slices(fleet, spares, spare.standby, standby, show)
    for line in standby.lines():
        steps.say(line)
    return standby


def slices_limits(fleet: Fleet | None) -> dict[str, int]:
    """Bytes of slices that this device and those of a fleet keep, by address as `device` writes it."""
    there = fleet.slices_limits if fleet is not None else {}
    return {LOCAL: CACHE_BYTES, **{device(address): limit for address, limit in there.items()}}


def _keep_slices(
    fleet: Fleet, spares: Spares, standby_slices: Sequence[StandbySlice], standby: Standby, show: ShowStep
) -> None:
    """See that slices are on the devices of a fleet, and note in `standby` what they take, and what cannot be there."""
    workers = {device(address): worker for address, worker in fleet.workers.items()}
    own = OwnSlices()
    total = AggregateProgress(show, sum(slice_.part.recipe.n_bytes for slice_ in standby_slices), lambda: None)
    described = defaultdict[str, list[str]](list)
    for slice_ in standby_slices:
        name = "this device" if slice_.address == LOCAL else workers[slice_.address].label
        path, recipe = slice_.part.path, slice_.part.recipe
        try:
            with total.part(recipe.n_bytes) as sent:
                named = spares.slices.name(slice_.part)
                if slice_.address == LOCAL:
                    with own.use(recipe, path, named, sent):
                        pass  # it is kept
                else:
                    workers[slice_.address].send_slice(recipe, path, named, sent)
            standby.slice_bytes[name] = standby.slice_bytes.get(name, 0) + recipe.n_bytes
            described[name].append(slice_.describe(spares.plan.sizes))
        except EdgeError as error:
            standby.missing.append(f"a slice is not kept on {name}: {error}")
    # A slice of adapters is described as that of the model.
    standby.slices |= {name: list(dict.fromkeys(lines)) for name, lines in described.items()}
