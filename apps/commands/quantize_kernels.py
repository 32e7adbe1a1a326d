"""`edge quantize --kernels`: how fast this device computes with each type, and the type that follows from it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from apps.show.format import counted
from apps.show.progress import progress
from apps.show.table import print_columns, print_note
from devices.probe import default_threads
from edge.quantization.kernels import COLUMNS, KernelSpeed, known_kernels, measure_kernels, slow_kinds
from quant.mixes import MIXES, Mix
from quant.types import TYPES

_KERNELS = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_0",
    "q4_k", "q4_1", "q5_0", "q5_k", "q5_1", "q6_k", "q8_0", "bf16", "f16", "f32",
)  # fmt: skip
_DEFAULTS = ("q4_k_m", "iq4_nl", "q4_0")  # mixes of about 4.5 bits, the least damage first
_NEARLY = 0.9  # of the fastest of them: as fast


def default_mix(threads: int | None) -> Mix:
    """What a model becomes where nothing is said, as measured on this device."""
    return _default(known_kernels(threads or default_threads()))


def _default(speeds: Sequence[KernelSpeed]) -> Mix:
    """Of the usual mixes, the one with the least damage that is about as fast as the fastest of them."""
    decode = {one.type.name: one.decode for one in speeds}
    mixes = [MIXES[name] for name in _DEFAULTS]
    fastest = max(decode[mix.type.name] for mix in mixes)
    return next(mix for mix in mixes if decode[mix.type.name] >= _NEARLY * fastest)


def run(args: argparse.Namespace) -> int:
    """Show how fast this device computes with each type; the exit code."""
    threads = args.threads or default_threads()
    with progress("Measuring", unit="rounds") as bar:
        speeds = measure_kernels(
            [TYPES[name] for name in _KERNELS], COLUMNS, threads, prompts=True, progress=bar.update
        )
    slow = slow_kinds(speeds)
    default = _default(known_kernels(threads, again=True)).name
    if args.json:
        print(
            json.dumps({"threads": threads, "types": [_kernel_json(one, slow) for one in speeds], "default": default})
        )
        return 0
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


def _kernel_json(one: KernelSpeed, slow: dict[str, str]) -> dict[str, Any]:
    return {
        "type": one.type.name,
        "bits_per_weight": one.type.bits_per_weight,
        "decode_gweights_per_s": one.decode,
        "prefill_gweights_per_s": one.prefill,
        "repacked": one.repacked,
        "slower_than": slow.get(one.type.name),
    }
