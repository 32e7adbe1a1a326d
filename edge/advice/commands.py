"""Commands that run a candidate on the devices it was predicted for."""

from __future__ import annotations

import shlex

from edge.advice.candidates import Candidate
from edge.advice.speeds import Profile
from edge.llm.options import DEFAULT_CONTEXT
from edge.survey.cluster import Cluster
from partition.plan.plan import LOCAL
from partition.predict.pareto import Point
from quant.mixes import mix_by_name

_MIB = 1 << 20


def command(candidate: Candidate, point: Point, profile: Profile, context: int, cluster: Cluster) -> str:
    """Return the command line that fetches and runs a candidate, or that makes it first from a published file; "" for a
    shape that is published nowhere. Names of presets stand for the addresses of such devices."""
    source, first = _source(candidate), ""
    if not source:
        return ""
    if candidate.mix.name not in candidate.model.types and candidate.model.types:
        file_name = f"{candidate.model.name}-{candidate.mix.name}.gguf"
        first, source = f"edge quantize {_widest(candidate)} {file_name} --type {candidate.mix.name} && ", file_name
    words = ["edge", "chat", source]
    if context != DEFAULT_CONTEXT:
        words += ["--context", str(context)]
    own = next(speed for speed in profile.speeds if speed.device == LOCAL)
    if point.predicted.memory_bytes.get(LOCAL, 0) >= own.memory_bytes:  # it is full: the rest is paged
        words += ["--memory", f"{own.memory_bytes // _MIB}MiB"]
    addresses = [device for device in dict.fromkeys(point.plan.devices) if device != LOCAL]
    if addresses:
        words += ["--workers", ",".join(addresses)]
        words += ["--insecure"] if cluster.insecure else []
    return first + shlex.join(words)


def _source(candidate: Candidate) -> str:
    """Return the name by which `edge chat` finds the file of this type."""
    model = candidate.model
    if not model.source:
        return ""
    if candidate.mix.name in model.types[:1] or not model.repo:
        return model.name
    return f"{model.repo}:{candidate.mix.name}"


def _widest(candidate: Candidate) -> str:
    """The published file with the most bits, which another type is made from."""
    best = max(candidate.model.types, key=lambda name: mix_by_name(name).type.bits_per_weight)
    return f"{candidate.model.repo}:{best}" if candidate.model.repo else candidate.model.name
