"""`edge buy`: the cheapest devices on which a model answers in time, before anything is bought or downloaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.engine_options import engine_options
from apps.errors import UsageError
from apps.options import add, in_flight, is_onnx, option, seed, set_common
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json, print_note, print_notes
from edge.units import between, items, positive, positive_int, whole
from quant.text import number_text, seconds_text

if TYPE_CHECKING:
    from edge.planning.cheapest import Served, Targets
    from edge.planning.device_kinds import DeviceKinds
    from partition.model.file import ModelFile

HELP = "Find the cheapest devices on which a model answers within time limits, before buying anything."
FORMAT = "edge-buy-1"
# Copies of names in edge.planning.cheapest, so that --help stays quick; a test compares them.
BY, PERCENTILES, MOST_DEVICES = ("price", "watts", "devices"), ("p50", "p90", "p99"), 8
REQUESTS, GEN_TOKENS, PROMPT, CONCURRENCY = 200, 128, 128, 4
_COLUMNS = ("device", "count", "unit price", "watts", "source of price")
_TIMES = ("", "limit", "p50", "p90", "p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = "--type --arrivals --max-latency --percentile --prompt-tokens --gen-tokens --kinds --max-devices --json"
    set_common(parser, common)
    parser.add_argument("model", metavar="MODEL", help="name of a model in the catalog, or a GGUF file")
    words = "weight type of a model in the catalog (default: the first type in which it is published)"
    option(parser, "--type T", words)
    group = parser.add_argument_group("requirements")
    words = "average number of requests per second, at random times"
    option(group, "--arrivals RATE", words, between(1e-6, 1e4), required=True)
    option(group, "--max-latency MS", "maximum time for each token after the first, in milliseconds", positive)
    option(group, "--max-ttft S", "maximum time to the first token, in seconds", positive)
    words = "share of requests that must stay within these limits: p50, p90 or p99 (default: p90)"
    option(group, "--percentile P", words, choices=PERCENTILES, default="p90")
    option(group, "--prompt-tokens N", f"tokens in a prompt (default: {PROMPT})", positive_int, default=PROMPT)
    option(group, "--gen-tokens N", f"tokens in an answer (default: {GEN_TOKENS})", positive_int, default=GEN_TOKENS)
    words = f"maximum number of concurrent requests; others wait (default: {CONCURRENCY})"
    option(group, "--concurrency C", words, in_flight, default=CONCURRENCY)
    add(group, "--kv-type", help="type of the KV cache (default: f16)")
    group = parser.add_argument_group("devices to choose from")
    option(group, "--catalog FILE", "file with kinds of devices, instead of the presets", Path)
    option(group, "--kinds A,B", "use only these kinds of devices", items)
    option(
        group, "--by WHAT", "total to minimize: price, watts or devices (default: price)", choices=BY, default="price"
    )
    most = whole(1, MOST_DEVICES)
    words = f"maximum number of devices, 1 to {MOST_DEVICES} (default: {MOST_DEVICES})"
    option(group, "--max-devices N", words, most, default=MOST_DEVICES)
    option(
        parser, "--requests N", f"number of simulated requests (default: {REQUESTS})", positive_int, default=REQUESTS
    )
    option(parser, "--seed N", "seed of the arrival times (default: 0)", seed, default=0)
    add(parser, "--json")


def run(args: argparse.Namespace) -> int:
    targets = _targets(args)
    offered, notes = _offered(args)
    from edge.planning.cheapest import cluster_search

    with _model(args) as (file, weights):
        search = cluster_search(
            file, offered, targets, replace(engine_options(args), sequences=args.concurrency),
            by=args.by, prompt=args.prompt_tokens,
        )  # fmt: skip
        cheapest = search.cheapest(args.by, args.max_devices, ShownSteps("buy"))
    link = search.link
    assumed = "assumed" if offered.latency_s is None or offered.bytes_per_s is None else "stated"
    mbps = number_text(link.bytes_per_s / 125_000)
    notes += [
        "speeds are estimates from published figures; a price without another source is that of one new device when it"
        " was released, without accessories",
        f"links are {assumed}: {seconds_text(link.latency_s)} one way, {mbps} Mbit/s between any two devices",
        before(cheapest.cheaper, cheapest.planned - 1),
    ]
    result = {
        "format": FORMAT,
        **weights,
        "by": args.by,
        "currency": offered.currency,
        "arrivals_per_s": targets.arrivals_per_s,
        "limits": {
            "latency_s": None if targets.latency_s == inf else targets.latency_s,
            "ttft_s": None if targets.ttft_s == inf else targets.ttft_s,
            "percentile": targets.percentile,
        },
        **{name: getattr(args, name) for name in ("prompt_tokens", "gen_tokens", "concurrency", "requests", "seed")},
        "link": {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s, "assumed": assumed == "assumed"},
        "kinds": [
            {"name": kind.name, "price": kind.price, "watts": kind.preset.watts, "price_source": kind.price_source}
            for kind in offered.kinds
        ],
        "cheaper": cheapest.cheaper,
        "planned": cheapest.planned,
        "cluster": cheapest.served.to_json(),
        "notes": notes,
    }
    if args.json:
        return print_json(result)
    _show(result, cheapest.served)
    return 0


def _targets(args: argparse.Namespace) -> Targets:
    if args.max_latency is None and args.max_ttft is None:
        raise UsageError("needs a limit: --max-latency MS for each token, --max-ttft S for the first one, or both")
    if args.max_latency is not None and args.gen_tokens == 1:
        raise UsageError(
            "--max-latency limits tokens after the first, but --gen-tokens 1 has none: leave one of them out"
        )
    from edge.planning.cheapest import Targets

    return Targets(
        args.arrivals,
        inf if args.max_latency is None else args.max_latency / 1e3,
        inf if args.max_ttft is None else args.max_ttft,
        args.percentile,
        args.gen_tokens,
        args.requests,
        args.seed,
    )


def _offered(args: argparse.Namespace) -> tuple[DeviceKinds, list[str]]:
    """Return the kinds of devices to choose from, and a note on presets that are left out."""
    from edge.planning.device_kinds import preset_kinds, read_kinds

    if args.catalog is not None:
        offered = read_kinds(args.catalog)
        return (offered if args.kinds is None else offered.named(args.kinds)), []
    offered = preset_kinds()
    if args.kinds is not None:
        return offered.named(args.kinds), []
    left_out = [kind.name for kind in offered.kinds if args.by == "price" and kind.price is None]
    kinds = tuple(kind for kind in offered.kinds if kind.name not in left_out)
    words = [f"left out because their price is unknown: {', '.join(left_out)}; --catalog can add prices"]
    return replace(offered, kinds=kinds), words if left_out else []


@contextmanager
def _model(args: argparse.Namespace) -> Iterator[tuple[ModelFile, dict[str, Any]]]:
    """Yield the model's file (or its outline, without weights) and a description of its weights."""
    from edge.models.catalog import catalog
    from partition.model.file import ModelFile

    path = Path(args.model)
    if is_onnx(args.model):
        raise UsageError("edge buy is for language models; it takes a name in the catalog or a GGUF file")
    if path.exists():
        if args.type is not None:
            raise UsageError("--type is for models in the catalog; a file has its types already: leave --type out")
        file = ModelFile.open(path)
        yield file, {"model": args.model, "type": None, "size_bytes": file.shape.weight_bytes}
        return
    shaped = {model.name: model for model in catalog() if model.shape is not None}
    model = shaped.get(args.model.lower())
    if model is None:
        raise UsageError(
            f"{args.model!r:.80} is neither a file nor a model in the catalog, which has {', '.join(shaped)}"
        )
    from edge.planning.candidates import candidates

    name = args.type or (model.types or ("q4_k_m",))[0]
    with candidates([model], [name], ShownSteps("buy")) as [candidate]:
        type_, size = candidate.mix.name, candidate.shape.weight_bytes
        yield candidate.file, {"model": model.name, "type": type_, "size_bytes": size}


def before(cheaper: int, planned: int) -> str:
    """Return a sentence on the clusters that cost less than the chosen one: how many, and how they were ruled out.

    cheaper: number of clusters that come first in the order of cost.
    planned: how many of these were planned and simulated; bounds ruled out the others.
    """
    if not cheaper:
        return "no cluster that costs less was tried: this is the first in the order of cost"
    clusters = "1 cluster that costs" if cheaper == 1 else f"{cheaper:,} clusters that cost"
    if not planned:
        return f"{clusters} no more cannot reach the limits: bounds show it without a plan"
    rest = cheaper - planned
    by_bounds = f"; bounds rule out {rest:,} of them, and {planned:,} were planned and simulated" if rest else ""
    return f"{clusters} no more cannot reach the limits{by_bounds or ': planned and simulated'}"


def _show(result: dict[str, Any], served: Served) -> None:
    """Print the devices to buy, the layers on each device, and the times of requests."""
    from edge.planning.describe import stage_rows

    def money(price: float | None) -> str:
        return "-" if price is None else f"{price:,.2f} {result['currency']}"

    weights = f"{result['model']} {result['type'] or ''}".strip()
    watts = number_text(served.watts)
    print_note(f"{served.describe()}: {money(served.price)}, {watts} W while all devices compute, for {weights}")
    print()
    kinds = {kind.name: kind for kind in served.kinds}
    rows = [
        [name, str(count), money(kinds[name].price), number_text(kinds[name].preset.watts), kinds[name].price_source]
        for name, count in served.counts.items()
    ]
    print_columns(_COLUMNS, rows, whole=_COLUMNS[:-1])
    print()
    columns, rows_of_stages = stage_rows(served.predicted, served.addresses)
    print_columns(columns, rows_of_stages, whole=("stage", "device"))
    print()
    simulated, limits = served.simulated, result["limits"]
    times = (
        ("first token", simulated.ttft_s, limits["ttft_s"]),
        ("each further token", simulated.tpot_s, limits["latency_s"]),
    )
    cells = [
        [name, "-" if limit is None else _ms(limit), *(_ms(getattr(spread, percentile)) for percentile in PERCENTILES)]
        for name, spread, limit in times
        if spread is not None
    ]
    print_columns(_TIMES, cells, whole=_TIMES)
    print()
    arrivals, capacity = number_text(result["arrivals_per_s"]), number_text(simulated.capacity_per_s)
    print(f"{arrivals} requests arrive per second; the devices can answer {capacity} per second")
    print_notes(result["notes"])


def _ms(seconds: float) -> str:
    return seconds_text(seconds) if seconds < 10 else f"{number_text(seconds)} s"
