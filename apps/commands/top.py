"""`edge top`: shows what a server does, live: models, devices, and what happened."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from apps.errors import UsageError
from apps.options import add, option
from apps.show.table import print_json
from edge.units import between
from quant.text import age_text, bytes_text, counted, number_text, printable

if TYPE_CHECKING:
    from rich.console import Group

    from edge.net.server_client import ServerClient

HELP = "Show what a server does, live: its models, their devices, and what happened to them."
_STATUS = "/v1/cluster"
_BAR = 16  # characters of a bar
_EVENTS = 5  # latest lines of each model
_TIMEOUT_S = 10.0
_TERMINAL = "edge top redraws a terminal; use --once or --json here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "address of the server (default: http://127.0.0.1:8080)"
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080", metavar="URL", help=words)
    option(parser, "--api-key KEY", "key for the server (default: EDGE_API_KEY)")
    option(parser, "--every S", "seconds between two looks, 0.2 to 3600 (default: 1)", between(0.2, 3600), default=1.0)
    option(parser, "--once", "print one look, and end")
    add(parser, "--json", help="print one look as JSON, with the keys of /v1/cluster, and end")


def run(args: argparse.Namespace) -> int:
    from edge.net.server_client import ServerClient

    try:
        server = ServerClient(args.url, args.api_key or os.environ.get("EDGE_API_KEY"))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.json:
        return print_json(_look(server))
    if args.once:
        for line in lines(_look(server), time.time()):
            print(line)
        return 0
    if not sys.stdout.isatty():
        raise UsageError(_TERMINAL)
    return _live(server, args.every)


def _look(server: ServerClient) -> Mapping[str, Any]:
    """Return the status of the server. Raises TransportError, also if the answer is no status."""
    from transport.errors import TransportError

    status: Any = server.get(_STATUS, _TIMEOUT_S)
    models = status.get("models") if isinstance(status, dict) else None
    if not isinstance(models, list) or not all(
        isinstance(model, dict) and isinstance(model.get("model"), dict) for model in models
    ):
        raise TransportError(f"{server.where} has no {_STATUS} as edge serve has it; update it, or name another server")
    return dict(status)


def _live(server: ServerClient, every_s: float) -> int:
    """Redraw the view until Ctrl-C. A server that does not answer is asked again."""
    from rich.console import Console
    from rich.live import Live

    from transport.errors import TransportError

    status: Mapping[str, Any] = {"models": []}
    console = Console()
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live,
    ):
        while True:
            problem = ""
            try:
                status = _look(server)
            except TransportError as error:
                problem = f"{error}. The view shows the last known state."
            live.update(_rendered(status, problem, server.where), refresh=True)
            time.sleep(every_s)
    return 0


def _rendered(status: Mapping[str, Any], problem: str, where: str) -> Group:
    from rich.console import Group
    from rich.text import Text

    shown = [Text(f"edge top  {where}  Ctrl-C ends", style="dim")]
    if problem:
        shown.append(Text(printable(problem), style="red"))
    shown += [Text(line, style="" if line.startswith(" ") else "bold") for line in lines(status, time.time())]
    return Group(*shown)


def lines(status: Mapping[str, Any], now_s: float) -> Iterator[str]:
    """Yield the lines of the view. Values that a server of another version lacks are left out.

    now_s: seconds since 1970
    """
    if not status["models"]:
        yield "No model is loaded. A request loads one."
    for model in status["models"]:
        yield from map(printable, _model_lines(model, now_s))
    yield from map(printable, _device_lines(status))


def _device_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each device of the server, and one for each link."""
    devices = _items(status, "devices")
    if devices:
        yield "devices"
    width = max((len(str(device.get("name", "?"))[:30]) for device in devices), default=0)
    for device in devices:
        text = str(device.get("text", ""))[:300]
        parts = [f"{str(device.get('state', '?'))[:20]} ({age_text(_number(device, 'since'))}): {text}"]
        tiers = device.get("memory")
        for tier in ("gpu", "memory", "disk"):
            sizes = tiers.get(tier) if isinstance(tiers, dict) else None
            if isinstance(sizes, dict) and _number(sizes, "total") > 0:
                free, total = (bytes_text(int(max(0.0, _number(sizes, name)))) for name in ("free", "total"))
                parts.append(f"{tier} {free} free of {total}")
        parts += [f"load {100 * _number(device, 'load'):.0f} %"] if device.get("load") is not None else []
        parts += [f"{_number(device, 'temperature_c'):.0f} °C"] if device.get("temperature_c") is not None else []
        yield f"  {str(device.get('name', '?'))[:30]:<{width}}  {', '.join(parts)}"
    for link in _items(status, "links"):
        ends = f"{str(link.get('from', '?'))[:30]} - {str(link.get('to', '?'))[:30]}"
        rate = f", {bytes_text(int(max(0.0, _number(link, 'bytes_per_s'))))}/s" if link.get("bytes_per_s") else ""
        yield f"  {ends}: {number_text(1e3 * _number(link, 'latency_s'))} ms{rate}"


def _model_lines(status: Mapping[str, Any], now_s: float) -> Iterator[str]:
    yield str(status["model"].get("name", "?"))
    if error := status.get("error"):
        yield f"  {error}"
        return
    slots = [slot for slot in _items(status, "slots") if slot.get("is_processing")]
    sequences = status["model"].get("sequences", len(slots))
    figures = [
        f"{number_text(_number(status, 'tokens_per_s'))} tokens/s",
        f"{len(slots)} of {counted(int(_number({'n': sequences}, 'n')), 'slot')} in use",
        f"{int(_number(status, 'waiting'))} waiting",
    ]
    if restarts := int(_number(status, "restarts")):
        figures.append(counted(restarts, "restart"))
    yield f"  {', '.join(figures)}"
    devices = _items(status, "devices")
    n_layers = max([stop for device in devices if (stop := _span(device.get("layers"))[1])], default=0)
    width = max((len(str(device.get("name", "?"))[:30]) for device in devices), default=0)
    for device in devices:
        name = f"  {str(device.get('name', '?'))[:30]:<{width}}"
        if device.get("left_s") is not None:
            yield f"{name}  lost, or not used any more ({age_text(_number(device, 'left_s'))})"
            continue
        start, stop = _span(device.get("layers"))
        parts = [_bar(start, stop, n_layers), f"layers {start}-{stop - 1}" if stop > start else "no layers"]
        if (n_bytes := _number(device, "memory_bytes")) > 0:
            parts.append(bytes_text(int(n_bytes)))
        if isinstance(link := device.get("link"), str):
            parts.append(link[:40])
        yield f"{name}  {'  '.join(parts)}"
    for event in _items(status, "events")[-_EVENTS:]:
        yield f"  {age_text(max(0.0, now_s - _number(event, 'time')))}: {str(event.get('text', ''))[:300]}"


def _bar(start: int, stop: int, n_layers: int) -> str:
    """Draw the layers of a device among all layers."""
    n = max(1, n_layers)
    first, last = _BAR * start // n, -(-_BAR * stop // n)
    return "".join("█" if first <= i < last else "░" for i in range(_BAR))


def _items(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    items = values.get(name)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    return float(value) if abs(value) < 1e18 else 0.0


def _span(layers: Any) -> tuple[int, int]:
    """Return the range of layers [start, stop), or (0, 0) if there is none."""
    if isinstance(layers, list) and len(layers) == 2 and all(type(n) is int and 0 <= n < 1 << 20 for n in layers):
        return layers[0], max(layers)
    return 0, 0
