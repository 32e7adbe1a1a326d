"""`edge devices probe`: what this machine is and can do; with a model, what devices take for its parts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import planning
from apps.errors import UsageError
from apps.options import add, refuse
from apps.show.table import print_columns, print_json, print_notes, print_table
from quant.text import age_text, bytes_text, seconds_text

if TYPE_CHECKING:
    from partition.predict.onnx_predict import OnnxDevice
    from partition.predict.speeds import DeviceSpeed

HELP = "Show what this machine is and can do; with a model, what devices take for its parts."
LLM_COLUMNS = ("device", "layer", "4 rows", "prompt", "half", "head", "memory", "measured")
ONNX_COLUMNS = ("device", "whole", "parts", "longest part", "memory", "measured")
LINK_COLUMNS = ("from", "to", "latency", "bandwidth", "measured")
_PROMPT_ROWS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: which part to measure, and how to print it."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF or ONNX: show what devices take for its parts")
    group = parser.add_argument_group("with a model")
    add(group, "--cluster", "--workers", "--insecure", "--dim", "--input")
    others = ("transport", "wire", "threads", "memory", "context", "concurrency", "prompt_tokens", "kv_type")
    parser.set_defaults(**dict.fromkeys(others))
    parser.add_argument("--fresh", action="store_true", help="measure now, also what was measured within a day")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="measure the disk of this folder (default: where slices are kept)"
    )
    add(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Measure what is not known, and print all of it. UsageError for options that are not for what is asked."""
    if args.model is not None:
        if args.folder is not None:
            raise UsageError("--folder is of this machine alone; leave MODEL out")
        return _run_model(args)
    refuse(args, ("cluster", "workers", "insecure", "dim", "input"), "is for a MODEL: name one")
    if args.folder is not None and not args.folder.is_dir():
        raise UsageError(f"--folder needs a folder that exists; {args.folder} is none")
    from edge.survey.machine import machine_rows, this_machine

    machine = this_machine(args.folder, args.fresh)
    if args.json:
        return print_json(machine.to_json())
    missing = [f"{what} not measured: {why}" for what, why in machine.not_measured.items()]
    print_table(machine.profile.name, machine_rows(machine), missing)
    return 0


def _run_model(args: argparse.Namespace) -> int:
    """Profile devices for the parts of one model, and the links between them."""
    from edge.planning.describe import known_json, notes
    from partition.predict.speeds import DeviceSpeed

    with planning.spaces(args) as ((space,), _):
        known = known_json(space)
        if args.json:
            return print_json({"model": str(space.path), "kind": space.kind, **known})
        columns = LLM_COLUMNS if space.kind == "llm" else ONNX_COLUMNS
        rows = [_llm_row(one) if isinstance(one, DeviceSpeed) else _onnx_row(one) for one in space.known.speeds]
        print_columns(columns, rows, whole=("device",))
        if known["links"]:
            print()
            print_columns(LINK_COLUMNS, [_link_row(link) for link in known["links"]], whole=("from", "to"))
        print_notes(notes(space))
    return 0


def _llm_row(speed: DeviceSpeed) -> tuple[str, ...]:
    """Return the row of a layer; `prompt` is a token of many."""
    return (
        speed.name,
        seconds_text(speed.layer_s.at(1)),
        seconds_text(speed.layer_s.at(4)),
        seconds_text(speed.layer_s.at(_PROMPT_ROWS) / _PROMPT_ROWS),
        seconds_text(speed.half_layer_s.at(1)),
        seconds_text(speed.head_s.at(1)),
        bytes_text(speed.memory_bytes),
        _when(speed.estimate, speed.age_s, speed.busy),
    )


def _onnx_row(speed: OnnxDevice) -> tuple[str, ...]:
    return (
        speed.name,
        seconds_text(speed.seconds(0, len(speed.segments_s))),
        str(len(speed.segments_s)),
        seconds_text(max(speed.segments_s)),
        bytes_text(speed.memory_bytes),
        _when(speed.estimate, speed.age_s, speed.busy),
    )


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    latency, bandwidth = seconds_text(link["latency_s"]), f"{link['bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s"
    return link["from"], link["to"], latency, bandwidth, _when(link["estimate"], link.get("age_s", 0.0))


def _when(estimate: bool, age_s: float, busy: bool = False) -> str:
    return "estimate" if estimate else age_text(age_s) + (", while busy" if busy else "")
