"""Commands that run a candidate on the devices it was predicted for."""

from __future__ import annotations

import shlex

from edge.advice.candidates import Candidate
from edge.advice.speeds import Profile
from edge.survey.cluster import Cluster
from partition.plan.plan import LOCAL
from partition.predict.pareto import Point
from quant.mixes import mix_by_name

_CONTEXT = 4096  # tokens, where `edge chat` is told none
_MIB = 1 << 20


def command(one: Candidate, point: Point, profile: Profile, context: int, cluster: Cluster) -> str:
    """Return the command line that fetches and runs a candidate, or that makes it first from a published file; "" for a
    shape that is published nowhere. Names of presets stand for the addresses of such devices."""
    source, first = _source(one), ""
    if not source:
        return ""
    if one.mix.name not in one.model.types and one.model.types:
        made = f"{one.model.name}-{one.mix.name}.gguf"
        first, source = f"edge quantize {_widest(one)} {made} --type {one.mix.name} && ", made
    words = ["edge", "chat", source]
    if context != _CONTEXT:
        words += ["--context", str(context)]
    own = next(speed for speed in profile.speeds if speed.device == LOCAL)
    if point.predicted.memory_bytes.get(LOCAL, 0) >= own.memory_bytes:  # it is full: the rest is paged
        words += ["--memory", f"{own.memory_bytes // _MIB}MiB"]
    addresses = [device for device in dict.fromkeys(point.plan.devices) if device != LOCAL]
    if addresses:
        words += ["--workers", ",".join(addresses)]
        words += ["--insecure"] if cluster.insecure else []
    return first + shlex.join(words)


def _source(one: Candidate) -> str:
    """Return the name by which `edge chat` finds the file of this type."""
    model = one.model
    if not model.source:
        return ""
    if one.mix.name in model.types[:1] or not model.repo:
        return model.name
    return f"{model.repo}:{one.mix.name}"


def _widest(one: Candidate) -> str:
    """The published file with the most bits, which another type is made from."""
    best = max(one.model.types, key=lambda name: mix_by_name(name).type.bits_per_weight)
    return f"{one.model.repo}:{best}" if one.model.repo else one.model.name
