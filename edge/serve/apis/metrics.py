"""/metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Status = Mapping[str, Any]
# Status group (missing for some models), key and help text.
_COUNTERS = (
    ("counters", "prompt_tokens", "Prompt tokens."),
    ("counters", "cached_tokens", "Prompt tokens taken from the prefix cache."),
    ("counters", "generated_tokens", "Generated tokens."),
    ("counters", "steps", "Forward passes, including those of prefix warming."),
    ("counters", "preemptions", "Preempted answers."),
    ("counters", "background_preemptions", "Prefix computations that another request preempted."),
    ("latency", "gaps", "Inter-token latencies measured."),
    ("latency", "gaps_within", "Inter-token latencies within --target-itl."),
    ("latency", "first_tokens", "First tokens of answers."),
    ("latency", "first_tokens_within", "First tokens within --target-ttft."),
    ("warming", "computed_tokens", "Tokens of prefixes computed while the server was idle."),
    ("warming", "used_tokens", "Tokens of prefixes computed ahead that prompts began with."),
    ("warming", "seconds", "Seconds spent on computing prefixes ahead."),
    ("speculation", "drafted", "Draft tokens verified."),
    ("speculation", "accepted", "Draft tokens accepted."),
)
_NAMES = {"warming": "edge_warming_{}", "speculation": "edge_{}_tokens"}  # metric names of groups other than edge_{}
_GAUGES: Mapping[str, tuple[str, Callable[[Status], float | None]]] = {
    "edge_memory_share_bytes": ("Memory limit of the model.", lambda status: _share(status, "limit")),
    "edge_memory_resident_bytes": ("Resident memory of the model.", lambda status: _share(status, "resident")),
    "edge_memory_use_ratio": ("Share of recent minutes spent computing.", lambda status: _share(status, "use")),
    "edge_requests_waiting": ("Requests that wait for a slot.", lambda status: status["waiting"]),
    "edge_tokens_per_second": ("Generated tokens per second, recently.", lambda status: status["tokens_per_s"] or 0.0),
    "edge_slots": ("Maximum number of concurrent answers.", lambda status: status["model"]["sequences"]),
    "edge_slots_busy": ("Answers being generated.", lambda s: sum(slot["is_processing"] for slot in s["slots"])),
}


def _share(status: Status, key: str) -> float | None:
    return (status.get("memory") or {}).get(key)


def metrics(statuses: Sequence[Status], networks: Sequence[Status] = ()) -> bytes:
    """Return the metrics of all models in Prometheus' text format.

    networks: statistics of ONNX networks in the form of the Open Inference Protocol, with `running` and `ready`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([status for status in statuses if "counters" in status]))
    if networks:
        registry.register(_CollectedNetworks(networks))
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


class _CollectedNetworks(Collector):
    def __init__(self, networks: Sequence[Status]) -> None:
        self._networks = networks

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("edge_network_requests", "Requests.", labels=["model", "outcome"])
        seconds = CounterMetricFamily("edge_network_seconds", "Time of requests by phase.", labels=["model", "phase"])
        rows = CounterMetricFamily("edge_network_rows", "Rows of requests with outputs.", labels=["model"])
        runs = CounterMetricFamily("edge_network_runs", "Runs, which may have several requests.", labels=["model"])
        running = GaugeMetricFamily("edge_network_requests_running", "Requests without an answer.", labels=["model"])
        ready = GaugeMetricFamily("edge_network_ready", "1 if the network is loaded.", labels=["model"])
        for network in self._networks:
            name, phases = network["name"], network["inference_stats"]
            for outcome in ("success", "fail"):
                requests.add_metric([name, outcome], phases[outcome]["count"])
            for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
                seconds.add_metric([name, phase], phases[phase]["ns"] / 1e9)
            rows.add_metric([name], network["inference_count"])
            runs.add_metric([name], network["execution_count"])
            running.add_metric([name], network["running"])
            ready.add_metric([name], network["ready"])
        return (requests, seconds, rows, runs, running, ready)
