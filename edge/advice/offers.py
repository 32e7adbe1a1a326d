"""Offers for a model: kinds of devices that can be bought, with the speeds that their figures give them."""

from __future__ import annotations

from edge.advice.cheapest import PRICE, ClusterSearch, Offer, Targets
from edge.advice.kinds import DeviceKinds
from edge.planning.arrange import can_share, name_of, work_of
from edge.survey.profile import ASSUMED_LINK
from partition.errors import PlanError
from partition.model.model import ModelShape
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.speeds import LinkSpeed
from quant.gguf.file import GgufFile


def cluster_search(
    file: GgufFile,
    offered: DeviceKinds,
    targets: Targets,
    *,
    by: str = PRICE,
    prompt: int = 128,
    concurrency: int = 4,
    kv_type: str = "f16",
) -> ClusterSearch:
    """Return the search for a cluster that serves a model file, or the outline of one.

    by: what is to be the least. prompt: tokens of each request. concurrency: requests at once. PlanError for kinds
    without the price that is to be the least, and for requests that are longer than the model's context.
    """
    lacking = [kind.name for kind in offered.kinds if kind.price is None]
    if by == PRICE and lacking:
        raise PlanError(f"no price in {offered.currency} is known of {', '.join(lacking)}; give one in the catalog")
    context = ModelShape.from_gguf(file).context_length
    if prompt + targets.tokens > context:
        raise PlanError(
            f"a prompt of {prompt} tokens and {targets.tokens} of an answer are {prompt + targets.tokens}, and the"
            f" model's context is {context}; use fewer"
        )
    work = work_of(
        file,
        context=concurrency * (prompt + targets.tokens),
        concurrency=concurrency,
        prompt=prompt,
        depth=prompt + targets.tokens // 2,
        kv_type=kv_type,
    )
    sizes = PartSizes.from_file(file)
    offers = [Offer(kind, preset_speed(kind.preset, sizes, kind.name, kind.name)) for kind in offered.kinds]
    return ClusterSearch(work, offers, link_of(offered), targets, tensor=can_share(file), model=name_of(file))


def link_of(offered: DeviceKinds) -> LinkSpeed:
    """The link between any two devices: as stated, and for the rest a home's Wi-Fi."""
    stated = ASSUMED_LINK.latency_s if offered.latency_s is None else offered.latency_s
    return LinkSpeed(stated, offered.bytes_per_s or ASSUMED_LINK.bytes_per_s, estimate=True)
