"""Load weights that adapt to the available memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from edge.errors import NotEnoughMemory
from edge.weights.budget import Opening
from edge.weights.elastic.governor import SLACK, Governor, limit_of
from edge.weights.elastic.room import ROOM, Room
from edge.weights.elastic.sizes import Preference, Sizes
from edge.weights.elastic.weights import ElasticWeights, RoomIsGone
from edge.weights.load import Loaded, load_weights
from edge.weights.memory import MIB, MemoryNeed
from quant.gguf.elastic import elastic_sizes

_ATTEMPTS = 3  # attempts to load the model while other processes take memory


def loader(least: int | None, prefer: Preference) -> Callable[[Opening], Loaded]:
    """Return the function that loads a model whose memory may shrink to `least` bytes. None: the memory is constant."""
    return load_weights if least is None else partial(load_elastic, least, prefer)


def load_elastic(least: int, prefer: Preference, opening: Opening, room: Room = ROOM) -> Loaded:
    """Load a model in the largest size that currently fits, between `least` and the budget of `opening`.

    The size changes with the memory. Raises NotEnoughMemory or WeightsError.
    """
    sizes_ = elastic_sizes(opening.request.file)
    shared = opening.plan(opening.roles(sizes_[-1].tensors), least)
    sizes = Sizes(opening, sizes_, shared.parts, shared.sizes, least, prefer)
    # A budget grows only by more than this slack. Without the slack, a budget just below `sizes.most` could never
    # reach it.
    most = min(opening.options.memory, sizes.most + 2 * sizes.most // SLACK + 1)
    room.share.request(min(limit_of(sizes.least), most), most)
    for _ in range(_ATTEMPTS):
        budget = min(most, room.for_process(most))
        if budget < sizes.least:
            break
        choice = sizes.choose(budget)
        need = MemoryNeed({**shared.parts, **choice.plan.parts}, most, budget=most)
        if opening.accounted is not None:
            opening.accounted(need, choice.plan)
        with suppress(RoomIsGone):  # retry with the memory that is left now
            weights = ElasticWeights(opening, sizes, Governor(most, budget), room)
            # the need may have become smaller
            need = MemoryNeed({**shared.parts, **weights.plan.parts}, most, budget=most)
            return Loaded(weights, need, shared.sizes)
    raise NotEnoughMemory(
        f"{opening.request.file.shape.name} needs at least {sizes.least / MIB:,.0f} MiB in its smallest size; of the"
        f" {most / MIB:,.0f} MiB that it may have, {budget / MIB:,.0f} are free. Free memory, or use a smaller"
        " --context"
    )
