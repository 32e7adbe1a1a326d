"""/metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Status = Mapping[str, Any]
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that need not be computed.",
    "generated_tokens": "Tokens of answers.",
    "steps": "Passes over the weights, also for prefixes that are computed ahead and for batches.",
    "preemptions": "Answers that had to wait for others after they began.",
    "background_preemptions": "Prefixes and answers of batches that did, which any other request preempts.",
    "migrations": "Moves of answers in the making from one placement of the model to another.",
}
_LATENCY = {
    "gaps": "Gaps between two tokens of an answer.",
    "gaps_within": "Gaps within --target-itl.",
    "first_tokens": "First tokens of answers.",
    "first_tokens_within": "First tokens within --target-ttft.",
}  # of models that have such a target
_WARMING = {
    "computed_tokens": "Tokens of prefixes that were computed while nobody asked.",
    "used_tokens": "Of these, those that prompts began with.",
    "seconds": "Seconds of computing prefixes.",
}
_DRAFTS = {
    "drafted": "Tokens that were drafted and verified.",
    "accepted": "Of these, those that were chosen.",
}
_GAUGES: dict[str, tuple[str, Callable[[Status], float]]] = {
    "edge_requests_waiting": ("Requests that wait for a slot.", lambda status: status["waiting"]),
    "edge_tokens_per_second": ("Tokens of answers, lately.", lambda status: status["tokens_per_s"] or 0.0),
    "edge_slots": ("Answers that may be in the making.", lambda status: status["model"]["sequences"]),
    "edge_slots_busy": ("Answers in the making.", lambda s: sum(slot["is_processing"] for slot in s["slots"])),
}
_MEMORY = {
    "limit": ("share_bytes", "Memory that the model may hold now."),
    "resident": ("resident_bytes", "Memory that it holds."),
    "use": ("use_ratio", "Part of the last minutes in which it computed."),
}  # of models that share the server's memory


def metrics(statuses: Sequence[Status]) -> bytes:
    """Return the figures of all models, in Prometheus' text form."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([status for status in statuses if "counters" in status]))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, statuses: Sequence[Status]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        for group, texts in (("counters", _COUNTERS), ("latency", _LATENCY)):
            for key, text in texts.items():
                counter = CounterMetricFamily(f"edge_{key}", text, labels=["model"])
                for status in self._statuses:
                    if (value := (status.get(group) or {}).get(key)) is not None:
                        counter.add_metric([status["model"]["name"]], value)
                yield counter
        for key, text in _WARMING.items():
            counter = CounterMetricFamily(f"edge_warming_{key}", text, labels=["model"])
            for status in self._statuses:
                if (warming := status.get("warming")) is not None:
                    counter.add_metric([status["model"]["name"]], warming[key])
            yield counter
        for key, text in _DRAFTS.items():
            counter = CounterMetricFamily(f"edge_{key}_tokens", text, labels=["model", "draft"])
            for status in self._statuses:
                if (drafts := status.get("speculation")) is not None:
                    counter.add_metric([status["model"]["name"], drafts["draft"]], drafts[key])
            yield counter
        for key, (suffix, text) in _MEMORY.items():
            gauge = GaugeMetricFamily(f"edge_memory_{suffix}", text, labels=["model"])
            for status in self._statuses:
                if (share := status.get("memory")) is not None:
                    gauge.add_metric([status["model"]["name"]], share[key])
            yield gauge
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for status in self._statuses:
                gauge.add_metric([status["model"]["name"]], value(status))
            yield gauge
