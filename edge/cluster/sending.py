"""Slices brought to workers before they are needed, so that a plan comes to life in little more than loading takes."""

from __future__ import annotations

from edge.cluster.fleet import Fleet
from edge.slices.local import OwnSlices, rank_recipe
from edge.tasks import Progress
from partition.plan.plan import Plan
from quant.gguf.file import GgufFile


def send_ahead(fleet: Fleet, plan: Plan, file: GgufFile, model_digest: str, check: Progress) -> None:
    """Bring the slices of a plan to its workers, where they are not yet.

    check: called on the way; what it raises ends it, and what is there by then need not be sent again. Else the errors
    of `OwnSlices.digest` and `Remote.send_slice`.
    """
    own = OwnSlices()
    for placement in plan.placements:
        for rank, address in enumerate(placement.devices):
            if rank:
                recipe = rank_recipe(file, model_digest, placement.slice(rank))
                digest = own.digest(recipe, file.path, check)
                fleet.workers[address].send_slice(recipe, file.path, digest, check)
