"""Find the cheapest cluster that serves a language model within targets.

The search tries clusters in order of cost and returns the first whose simulation reaches the targets. A cluster's plans
are the planner's front of the limited objectives and throughput. Weights stay in memory. More than SHARING devices
become pipeline stages of one device each, so that thousands of clusters can be tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from math import inf
from typing import Any

from edge.llm.options import EngineOptions
from edge.planning.arrange import can_share, name_of, work_of
from edge.planning.device_kinds import DeviceKind, DeviceKinds
from edge.profiling.profile import ASSUMED_LINK
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.formats import PLANNED
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from partition.search.cluster_bounds import ClusterBounds
from partition.search.clusters import Cost, Members, clusters
from partition.search.planner import Planner
from partition.simulate.arrivals import Arrivals, poisson
from partition.simulate.result import Simulated
from partition.simulate.simulate import simulate
from partition.simulate.times import capacity_per_s
from quant.text import bytes_text, number_text, seconds_text

PRICE, WATTS, DEVICES = BY = ("price", "watts", "devices")
PERCENTILES = ("p50", "p90", "p99")
MOST_DEVICES = 8
# Maximum cluster size with tensor-parallel groups. Larger clusters use stages of one device.
SHARING = 4
_ROUNDED = 1 + 1e-9
_NEAREST_OF = 4  # number of clusters simulated for the error message if no cluster reaches the targets


@dataclass(frozen=True)
class Targets:
    """Request load and latency limits. At least one of the two limits is set."""

    arrivals_per_s: float
    latency_s: float = inf  # limit of the inter-token latency
    ttft_s: float = inf  # limit of the time to first token
    percentile: str = "p90"  # percentile of requests that the limits apply to
    tokens: int = 128  # length of an answer
    requests: int = 200  # number of simulated requests
    seed: int = 0

    def excess(self, simulated: Simulated) -> float:
        """Return the worst ratio of a simulated value to its limit: 1 or less if all targets are reached."""
        ttft_s = getattr(simulated.ttft_s, self.percentile, 0.0)
        latency_s = getattr(simulated.tpot_s, self.percentile, 0.0)
        return max(ttft_s / self.ttft_s, latency_s / self.latency_s, self.arrivals_per_s / simulated.capacity_per_s)

    def describe(self) -> str:
        """Return the limits in words."""
        limits = [
            f"{seconds_text(self.latency_s)} a token" if self.latency_s < inf else "",
            f"{number_text(self.ttft_s)} s to the first one" if self.ttft_s < inf else "",
        ]
        text = " and ".join(filter(None, limits))
        return f"{text} ({self.percentile} of requests) at {number_text(self.arrivals_per_s)} requests a second"


@dataclass(frozen=True)
class Offer:
    """Kind of device, and its speed with the model."""

    kind: DeviceKind
    speed: DeviceSpeed

    def cost(self, by: str) -> Cost:
        """Return the costs that order clusters: first the cost named by `by`, then the others as tie-breakers."""
        price = inf if self.kind.price is None else self.kind.price
        watts = self.kind.preset.watts
        return {PRICE: (price, 1.0, watts), WATTS: (watts, 1.0, price), DEVICES: (1.0, price, watts)}[by]


@dataclass(frozen=True)
class Served:
    """Simulated cluster with its serving plan."""

    kinds: tuple[DeviceKind, ...]  # kind of each device, owner first
    names: tuple[str, ...]  # name of each device, owner first
    plan: Plan
    predicted: Prediction
    simulated: Simulated
    excess: float

    @property
    def addresses(self) -> dict[str, str]:
        """Device names by address in the plan."""
        return {LOCAL: self.names[0], **{name: name for name in self.names[1:]}}

    @property
    def price(self) -> float | None:
        """Total price of all devices, or None if a price is unknown."""
        prices = [kind.price for kind in self.kinds]
        return None if None in prices else sum(price for price in prices if price is not None)

    @property
    def watts(self) -> float:
        """Total power of all devices while they compute, in watts."""
        return sum(kind.preset.watts for kind in self.kinds)

    @property
    def counts(self) -> dict[str, int]:
        """Number of devices of each kind."""
        names = [kind.name for kind in self.kinds]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def describe(self) -> str:
        """Return the devices in words."""
        return " + ".join(f"{count} {name}" for name, count in self.counts.items())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that docs/cli/buy.md describes."""
        memory = self.predicted.renamed(self.addresses).memory_bytes
        return {
            "devices": [
                {
                    "name": name,
                    "kind": kind.name,
                    "title": kind.preset.title,
                    "price": kind.price,
                    "price_source": kind.price_source,
                    "watts": kind.preset.watts,
                    "memory_bytes": memory[name],
                }
                for name, kind in zip(self.names, self.kinds, strict=True)
            ],
            "counts": self.counts,
            "price": self.price,
            "watts": self.watts,
            "planned": {
                "format": PLANNED,
                "plan": self.plan.to_json(),
                "predicted": self.predicted.to_json(),
                "devices": [{"name": name, "address": address} for address, name in self.addresses.items()],
            },
            "simulated": self.simulated.to_json(),
        }


@dataclass(frozen=True)
class Cheapest:
    """Result of a search, with counts of the examined clusters."""

    served: Served
    cheaper: int  # number of clusters that come earlier in the order of cost
    planned: int  # number of clusters, including the result, that no bound ruled out


class ClusterSearch:
    """Search for clusters of the offered devices that serve one model."""

    def __init__(
        self,
        work: Work,
        offers: Sequence[Offer],
        link: LinkSpeed,
        targets: Targets,
        *,
        tensor: bool = True,
        model: str = "",
    ) -> None:
        """Set up the search.

        link: link between any two devices.
        tensor: the model's layers support tensor parallelism.
        """
        self._work, self.link, self._targets, self._tensor, self._model = work, link, targets, tensor, model
        self._offers = [replace(offer, speed=replace(offer.speed, disk_bytes_per_s=None)) for offer in offers]
        speeds = [offer.speed for offer in self._offers]
        self._bounds = ClusterBounds(work, speeds, link, tokens=targets.tokens, tensor=tensor)

    def cheapest(self, by: str, most_devices: int = MOST_DEVICES, steps: Steps = SILENT) -> Cheapest:
        """Return the cheapest cluster that reaches the targets.

        by: PRICE, WATTS or DEVICES.
        Raises PlanError, which describes the nearest cluster, if no cluster reaches the targets.
        """
        order = clusters(
            [offer.cost(by) for offer in self._offers], [offer.kind.most for offer in self._offers], most_devices
        )
        planned, ruled_out = 0, []
        with steps.step("Simulating clusters"):
            for cheaper, members in enumerate(order):
                excess = self._least_excess(members)
                if excess > _ROUNDED:
                    ruled_out.append((excess, members))
                    continue
                planned += 1
                served = self.served(members)
                if served is not None:
                    return Cheapest(served, cheaper, planned)
                ruled_out.append((excess, members))
            raise PlanError(self._why_none(ruled_out, most_devices))

    def served(self, members: Members, *, nearest: bool = False) -> Served | None:
        """Return the first plan on all of these devices that reaches the targets, or None.

        nearest: return the plan that comes nearest to the targets instead.
        """
        best: Served | None = None
        for owner in dict.fromkeys(members):
            rest = list(members)
            rest.remove(owner)
            for served in self._each_served((owner, *rest), nearest):
                if served.excess <= _ROUNDED and not nearest:
                    return served
                if nearest and (best is None or served.excess < best.excess):
                    best = served
        return best

    def _each_served(self, members: Members, nearest: bool) -> Iterator[Served]:
        """Simulate plans whose owner is the first of these devices, the best predicted plan first.

        nearest: simulate only the best plan, even if it is certainly too slow.
        """
        targets, kinds = self._targets, tuple(self._offers[kind].kind for kind in members)
        counts = [members[: i + 1].count(kind) for i, kind in enumerate(members)]
        names = tuple(kind.name if n == 1 else f"{kind.name}:{n}" for kind, n in zip(kinds, counts, strict=True))
        addresses = (LOCAL, *names[1:])
        speeds = {
            address: replace(self._offers[kind].speed, device=address, name=name)
            for kind, address, name in zip(members, addresses, names, strict=True)
        }
        links = Links(dict.fromkeys(permutations(addresses, 2), self.link))
        planner = Planner(
            self._work, list(speeds.values()), links, self._model, "", tensor=self._may_share(members), thin=False
        )  # The bounds use every bought device, so plans must not leave devices out.
        most_s = inf if nearest else targets.latency_s * _ROUNDED
        if not planner.front(("latency",), [1], [most_s])[0]:  # quick check that fails for most clusters
            return
        limited = {"latency": targets.latency_s, "ttft": targets.ttft_s}
        objectives = (*(name for name, limit in limited.items() if limit < inf), "throughput")
        caps = [most_s if name == "latency" else inf for name in objectives]
        plans = []
        for placed in planner.front(objectives, caps=caps)[0]:
            if len(set(placed.plan.devices)) < len(members) and not nearest:
                continue  # a smaller cluster, which was already tried
            predicted = predict(placed.plan, self._work, speeds, links, placed.microbatches)
            overload = targets.arrivals_per_s / capacity_per_s(predicted, self._work.prompt, targets.tokens)
            if nearest or overload <= _ROUNDED:
                ttft_s = (predicted.ttft_s or 0.0) / targets.ttft_s
                plans.append((max(overload, ttft_s, predicted.latency_s / targets.latency_s), placed.plan, predicted))
        plans.sort(key=lambda plan: plan[0])
        for _, plan, predicted in plans[:1] if nearest else plans:
            named = predicted.renamed({LOCAL: names[0]})
            simulated = simulate(named, self._arrivals, seed=targets.seed, owner=names[0])
            used = [i for i, address in enumerate(addresses) if address in plan.devices]
            yield Served(
                tuple(kinds[i] for i in used),
                tuple(names[i] for i in used),
                plan,
                predicted,
                simulated,
                targets.excess(simulated),
            )

    def _least_excess(self, members: Members) -> float:
        """Return a lower bound on the excess of any plan on these devices."""
        least, targets = self._bounds.bound(members, groups=self._may_share(members)), self._targets
        if least.latency_s == inf:
            return inf
        overload = targets.arrivals_per_s / least.capacity_per_s
        return max(overload, least.ttft_s / targets.ttft_s, least.latency_s / targets.latency_s)

    def _may_share(self, members: Members) -> bool:
        """Return whether these devices may use tensor parallelism."""
        return self._tensor and len(members) <= SHARING

    @cached_property
    def _arrivals(self) -> Arrivals:
        targets = self._targets
        return poisson(targets.arrivals_per_s, targets.requests, self._work.prompt, targets.tokens, targets.seed)

    def _why_none(self, ruled_out: Sequence[tuple[float, Members]], most_devices: int) -> str:
        """Return an error message that describes the nearest clusters."""
        none = f"no cluster of up to {most_devices} of these devices reaches {self._targets.describe()}"
        near = [members for excess, members in sorted(ruled_out)[:_NEAREST_OF] if excess < inf]
        tried = [served for members in near if (served := self.served(members, nearest=True)) is not None]
        if not tried:
            needs = bytes_text(self._bounds.needed_bytes)
            return f"{none}: no cluster has room for the model's {needs}; add larger devices, or use a smaller type"
        best = min(tried, key=lambda cluster: cluster.excess)
        result, percentile = best.simulated, self._targets.percentile
        token_s, ttft_s = getattr(result.tpot_s, percentile, 0.0), getattr(result.ttft_s, percentile, 0.0)
        return (
            f"{none}; the nearest of those tried, {best.describe()}, takes {seconds_text(token_s)} a token and"
            f" {number_text(ttft_s)} s to the first one, and has room for {number_text(result.capacity_per_s)} requests"
            " a second: use higher limits, fewer requests, faster devices or links, or a smaller model"
        )


def cluster_search(
    file: ModelFile,
    offered: DeviceKinds,
    targets: Targets,
    engine: EngineOptions,
    *,
    by: str = PRICE,
    prompt: int = 128,
) -> ClusterSearch:
    """Return the search for a cluster that serves a model file or an outline file.

    engine: options of the engine, with the concurrent sequences. Its context is set for them.
    by: cost to minimize: PRICE, WATTS or DEVICES.
    prompt: tokens of each prompt.
    Raises PlanError if a kind lacks the price to minimize, or if a request exceeds the model's context.
    """
    lacking = [kind.name for kind in offered.kinds if kind.price is None]
    if by == PRICE and lacking:
        raise PlanError(f"no price in {offered.currency} is known for {', '.join(lacking)}; give one in the catalog")
    context = file.shape.context_length
    if prompt + targets.tokens > context:
        raise PlanError(
            f"a prompt of {prompt} tokens and {targets.tokens} of an answer are {prompt + targets.tokens}, and the"
            f" model's context is {context}; use fewer"
        )
    engine = replace(engine, context=engine.sequences * (prompt + targets.tokens))
    work = work_of(file, engine, prompt=prompt, depth=prompt + targets.tokens // 2)
    sizes = PartSizes.from_file(file)
    offers = [Offer(kind, preset_speed(kind.preset, sizes, kind.name, kind.name)) for kind in offered.kinds]
    # Use stated link values, and typical home Wi-Fi for missing ones.
    latency_s = ASSUMED_LINK.latency_s if offered.latency_s is None else offered.latency_s
    link = LinkSpeed(latency_s, offered.bytes_per_s or ASSUMED_LINK.bytes_per_s, estimate=True)
    return ClusterSearch(work, offers, link, targets, tensor=can_share(file), model=name_of(file))
