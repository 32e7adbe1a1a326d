"""Ready for the loss of devices: the slices that other plans need are where they belong before anything is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.cluster.fleet import Fleet, device
from edge.errors import EdgeError
from edge.parallel.mirror import MirroredHistory
from edge.slices.local import OwnSlices
from edge.tasks import AggregateProgress, ShowStep
from partition.plan.plan import LOCAL, Plan, Slice
from partition.slices.gguf_slice import slice_recipe
from quant.gguf.file import GgufFile
from quant.text import bytes_text, counted


@dataclass
class Standby:
    """What is held so that a model goes on soon after a loss, and what that costs."""

    losses: int  # of devices, that it is ready for
    mirror: MirroredHistory | None = None  # None: keys and values are not copied
    slice_bytes: dict[str, int] = field(default_factory=dict)  # on disks, by device, beside what runs
    missing: list[str] = field(default_factory=list)  # what it is not ready for, a sentence each

    def lines(self) -> list[str]:
        """What it is, for people."""
        held = ", ".join(f"{bytes_text(size)} on {name}" for name, size in self.slice_bytes.items() if size)
        line = f"ready for the loss of {counted(self.losses, 'device')}: slices for it take {held or 'no more room'}"
        if self.mirror is not None:
            size = f"{bytes_text(self.mirror.token_bytes)} a token, at most {bytes_text(self.mirror.max_bytes)}"
            line += f"; keys and values are copied to this device's memory ({size})"
        return [line, *self.missing]

    def describe(self) -> str:
        """What it costs now, in a line."""
        parts = [f"ready for the loss of {counted(self.losses, 'device')}"]
        if self.mirror is not None:
            now = self.mirror
            parts.append(
                f"{bytes_text(now.held_bytes)} of keys and values held here; {bytes_text(now.copied_bytes)} copied in"
                f" {now.copied_s:.2f} s"
            )
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        return {
            "losses": self.losses,
            "slice_bytes": self.slice_bytes,
            "missing": self.missing,
            "mirror": None if self.mirror is None else self.mirror.to_json(),
        }


def keep_slices(
    fleet: Fleet, file: GgufFile, digest: str, running: Plan, plans: Sequence[Plan], standby: Standby, show: ShowStep
) -> None:
    """See that the slices of plans are on the devices of a fleet, and note in `standby` what they take beside those of
    the plan that runs, and what cannot be there. digest: of the model."""
    workers = {device(address): worker for address, worker in fleet.workers.items()}
    own = OwnSlices()
    there = _parts(running)
    lacking = dict.fromkeys(part for plan in plans for part in _parts(plan) if part not in there)
    recipes = {(address, cut): slice_recipe(file, digest, cut) for address, cut in lacking}
    total = AggregateProgress(show, sum(recipe.n_bytes for recipe in recipes.values()), lambda: None)
    for (address, _), recipe in recipes.items():
        name = "this device" if address == LOCAL else workers[address].label
        try:
            with total.part(recipe.n_bytes) as sent:
                named = own.digest(recipe, file.path)
                if address == LOCAL:
                    with own.use(recipe, file.path, named, sent):
                        pass  # it is kept
                else:
                    workers[address].send_slice(recipe, file.path, named, sent)
            standby.slice_bytes[name] = standby.slice_bytes.get(name, 0) + recipe.n_bytes
        except EdgeError as error:
            standby.missing.append(f"a slice is not kept on {name}: {error}")


def _parts(plan: Plan) -> list[tuple[str, Slice]]:
    """Who needs which part of the model from a cache. Who does all of it needs the model's file alone."""
    if plan.world_size == 1:
        return []
    return [(device(address), plan.slice(rank)) for rank, address in enumerate(plan.devices)]
