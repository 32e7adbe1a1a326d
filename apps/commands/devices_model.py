"""`edge devices probe MODEL`: what devices take for the parts of one model, and what the links between them do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands import planning
from apps.commands.distributed import worker_addresses
from apps.options import dimension
from apps.show.format import bytes_text, ms_text
from apps.show.table import print_columns, print_note

if TYPE_CHECKING:
    from partition.predict.onnx_predict import OnnxDevice
    from partition.predict.speeds import DeviceSpeed

LLM_COLUMNS = ("device", "layer", "4 rows", "prompt", "half", "head", "memory", "measured")
ONNX_COLUMNS = ("device", "whole", "parts", "longest part", "memory", "measured")
LINK_COLUMNS = ("from", "to", "latency", "bandwidth", "measured")
_PROMPT_ROWS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and the devices."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF or ONNX: show what devices take for its parts")
    group = parser.add_argument_group("with a model")
    group.add_argument("--cluster", type=Path, metavar="FILE", help="devices and links: cluster.toml")
    group.add_argument("--workers", type=worker_addresses, metavar="A,B", help="this device and HOST[:PORT],...")
    group.add_argument("--insecure", action="store_true", help="allow workers that run with --insecure")
    group.add_argument(
        "--dim", type=dimension, action="append", metavar="NAME=N", help="size of an open ONNX dimension"
    )
    others = ("transport", "wire", "threads", "memory", "context", "concurrency", "prompt_tokens", "kv_type")
    parser.set_defaults(**dict.fromkeys(others))


def run(args: argparse.Namespace) -> int:
    """Measure what is not known, and print it."""
    from apps.show.planned import notes
    from edge.planning.describe import known_json
    from partition.predict.speeds import DeviceSpeed

    with planning.spaces(args) as ((space,), _):
        known = known_json(space)
        if args.json:
            print(json.dumps({"model": str(space.path), "kind": space.kind, **known}))
            return 0
        columns = LLM_COLUMNS if space.kind == "llm" else ONNX_COLUMNS
        rows = [_llm_row(one) if isinstance(one, DeviceSpeed) else _onnx_row(one) for one in space.known.speeds]
        print_columns(columns, rows, whole=("device",))
        if known["links"]:
            print()
            print_columns(LINK_COLUMNS, [_link_row(link) for link in known["links"]], whole=("from", "to"))
        for note in notes(space):
            print_note(note)
    return 0


def _llm_row(speed: DeviceSpeed) -> tuple[str, ...]:
    """Of a layer; `prompt` is a token of many."""
    return (
        speed.name,
        _ms(speed.layer_s.at(1)),
        _ms(speed.layer_s.at(4)),
        _ms(speed.layer_s.at(_PROMPT_ROWS) / _PROMPT_ROWS),
        _ms(speed.half_layer_s.at(1)),
        _ms(speed.head_s.at(1)),
        bytes_text(speed.memory_bytes),
        _when(speed.estimate, speed.age_s, speed.busy),
    )


def _onnx_row(speed: OnnxDevice) -> tuple[str, ...]:
    return (
        speed.name,
        _ms(speed.seconds(0, len(speed.segments_s))),
        str(len(speed.segments_s)),
        _ms(max(speed.segments_s)),
        bytes_text(speed.memory_bytes),
        _when(speed.estimate, speed.age_s, speed.busy),
    )


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    bandwidth = f"{link['bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s"
    return link["from"], link["to"], _ms(link["latency_s"]), bandwidth, _when(link["estimate"], link.get("age_s", 0.0))


def _ms(seconds: float) -> str:
    return f"{ms_text(1e3 * seconds)} ms"


def _when(estimate: bool, age_s: float, busy: bool = False) -> str:
    from apps.show.format import age_text

    return "estimate" if estimate else age_text(age_s) + (", while busy" if busy else "")
