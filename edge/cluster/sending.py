"""Slices brought to workers before they are needed, so that a plan comes to life in little more than loading takes."""

from __future__ import annotations

from edge.cluster.fleet import Fleet
from edge.cluster.model_slices import ModelSlices
from edge.tasks import Progress
from partition.plan.plan import Plan


def send_ahead(fleet: Fleet, plan: Plan, slices: ModelSlices, check: Progress) -> None:
    """Bring the slices of a plan to its workers, where they are not yet.

    check: called on the way; what it raises ends it, and what is there by then need not be sent again. Else the errors
    of `ModelSlices.of`, `ModelSlices.name` and `Remote.send_slice`.
    """
    for placement in plan.placements:
        for rank, parts in slices.of_ranks(placement).items():
            for part in parts if rank else ():
                digest = slices.name(part, check)
                fleet.workers[placement.devices[rank]].send_slice(part.recipe, part.path, digest, check)
