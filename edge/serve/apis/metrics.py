"""/metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Status = Mapping[str, Any]
# Group in the status, which some models do not have, key, and text.
_COUNTERS = (
    ("counters", "prompt_tokens", "Tokens of prompts."),
    ("counters", "cached_tokens", "Tokens of prompts that need not be computed."),
    ("counters", "generated_tokens", "Tokens of answers."),
    ("counters", "steps", "Passes over the weights, including those of prefix warming."),
    ("counters", "preemptions", "Answers that had to wait for others after they began."),
    ("counters", "background_preemptions", "Prefix computations that another request preempted."),
    ("latency", "gaps", "Gaps between two tokens of an answer."),
    ("latency", "gaps_within", "Gaps within --target-itl."),
    ("latency", "first_tokens", "First tokens of answers."),
    ("latency", "first_tokens_within", "First tokens within --target-ttft."),
    ("warming", "computed_tokens", "Tokens of prefixes that were computed while nobody asked."),
    ("warming", "used_tokens", "Of these, those that prompts began with."),
    ("warming", "seconds", "Seconds of computing prefixes."),
    ("speculation", "drafted", "Tokens that were drafted and verified."),
    ("speculation", "accepted", "Of these, those that were chosen."),
)
_NAMES = {"warming": "edge_warming_{}", "speculation": "edge_{}_tokens"}  # of other groups: edge_{}
_GAUGES: Mapping[str, tuple[str, Callable[[Status], float | None]]] = {
    "edge_memory_share_bytes": ("Memory that the model may hold now.", lambda status: _share(status, "limit")),
    "edge_memory_resident_bytes": ("Memory that it holds.", lambda status: _share(status, "resident")),
    "edge_memory_use_ratio": ("Part of the last minutes in which it computed.", lambda status: _share(status, "use")),
    "edge_requests_waiting": ("Requests that wait for a slot.", lambda status: status["waiting"]),
    "edge_tokens_per_second": ("Tokens of answers, lately.", lambda status: status["tokens_per_s"] or 0.0),
    "edge_slots": ("Answers that may be in the making.", lambda status: status["model"]["sequences"]),
    "edge_slots_busy": ("Answers in the making.", lambda s: sum(slot["is_processing"] for slot in s["slots"])),
}


def _share(status: Status, key: str) -> float | None:
    return (status.get("memory") or {}).get(key)


def metrics(statuses: Sequence[Status]) -> bytes:
    """Return the figures of all models, in Prometheus' text form."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([status for status in statuses if "counters" in status]))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, statuses: Sequence[Status]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        for group, key, text in _COUNTERS:
            labels = ["model", "draft"] if group == "speculation" else ["model"]
            counter = CounterMetricFamily(_NAMES.get(group, "edge_{}").format(key), text, labels=labels)
            for status in self._statuses:
                values = status.get(group) or {}
                if values.get(key) is not None:
                    named = {**values, "model": status["model"]["name"]}
                    counter.add_metric([named[label] for label in labels], values[key])
            yield counter
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for status in self._statuses:
                if (figure := value(status)) is not None:
                    gauge.add_metric([status["model"]["name"]], figure)
            yield gauge
