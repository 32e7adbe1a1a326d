"""`edge quantize --kernels`: how fast this device computes with each type, and the type that follows from it."""

from __future__ import annotations

import argparse

from apps.show.progress import progress
from apps.show.table import print_columns, print_json, print_note
from devices.probe import default_threads
from edge.quantization.kernels import COLUMNS, default_mix, measure_kernels, slow_kinds
from quant.text import counted
from quant.types import TYPES

_KERNELS = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_0",
    "q4_k", "q4_1", "q5_0", "q5_k", "q5_1", "q6_k", "q8_0", "bf16", "f16", "f32",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Show how fast this device computes with each type; the exit code."""
    threads = args.threads or default_threads()
    kinds = [TYPES[name] for name in _KERNELS]
    with progress("Measuring", unit="rounds") as show:
        speeds = measure_kernels(kinds, COLUMNS, threads, prompts=True, progress=show)
    slow = slow_kinds(speeds)
    default = default_mix(threads, again=True).name
    if args.json:
        types = [{**one.to_json(), "slower_than": slow.get(one.type.name)} for one in speeds]
        return print_json({"threads": threads, "types": types, "default": default})
    rows = [
        [
            one.type.name,
            f"{one.type.bits_per_weight:.2f}",
            f"{one.decode:.1f}",
            f"{one.prefill:.1f}",
            "repacked" if one.repacked else "",
            f"{slow[one.type.name]} is larger and decodes faster" if one.type.name in slow else "",
        ]
        for one in speeds
    ]
    print_columns(("type", "bits/weight", "decode", "prefill", "layout", "note"), rows)
    print_note(f"1e9 weights a second, {counted(threads, 'thread')}; without --type a model becomes {default} here")
    return 0
