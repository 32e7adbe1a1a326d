"""Options of the engine that runs a language model, and what they ask of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from apps.errors import UsageError
from apps.options import MAX_IO_THREADS, PREFERENCES, add, io_chunk, keep_to_cores, option, refuse
from edge.units import memory_options, parse_bytes, positive_int, whole

if TYPE_CHECKING:
    from edge.llm.options import EngineOptions

# Fields of EngineOptions that are options of commands; a test holds that these are all that there are.
ENGINE_OPTIONS = (
    "context", "batch", "threads", "gpu_layers", "gpu_memory", "repack", "flash_attention", "kv_type",
    "memory", "least_memory", "prefer", "window", "io_threads", "io_chunk", "verify",
)  # fmt: skip


class MemoryAction(argparse.Action):
    """Sets `memory`, and `least_memory` where a range was given, from what `edge.units.memory_options` returned."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        vars(namespace).update(values)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to load and run the model."""
    group = parser.add_argument_group("engine")
    add(group, "--context", help="tokens of context (default: the model's, at most 4096)")
    add(group, "--threads", help="default: by cores and model")
    add(group, "--affinity")
    option(group, "--batch N", "prompt tokens in one pass (default: 512; with --memory, measured)", positive_int)
    add(group, "--gpu-layers", help="layers on the GPU (default: as many as fit and pay)")
    add(group, "--gpu-memory", help="most of a GPU's memory, such as 6GiB: layers that do not fit pass through it")
    add(group, "--kv-type", default="f16")
    group.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto")
    words = "lay weights out for this CPU: faster, takes memory of its own (default: where it fits)"
    option(group, "--repack", words, action=argparse.BooleanOptionalAction)
    group = parser.add_argument_group("memory")
    words = "use at most so much, such as 3GiB: what of the model does not fit is read from disk again for every token;"
    words += " 1.2GiB..4GiB: as much of that as is free at any time (default: no limit)"
    add(group, "--memory", type=memory_options, action=MemoryAction, metavar="SIZE[..SIZE]", help=words)
    parser.set_defaults(least_memory=None)
    words = "where memory gets less, speed: fewer bits before weights are paged; quality: paged before (default: speed)"
    option(group, "--prefer", words, choices=PREFERENCES)
    option(group, "--window SIZE", "part of it that such weights pass through (default: measured)", parse_bytes)
    option(group, "--io-threads N", "that read them (default: measured)", whole(1, MAX_IO_THREADS))
    option(group, "--io-chunk SIZE", "that is read at once (default: measured)", io_chunk)
    option(group, "--verify", "check that what is read again has not changed")


def engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options by name. UsageError for options that do not go together."""
    check_engine_arguments(args)
    return {name: getattr(args, name) for name in ENGINE_OPTIONS} | {"prefer": args.prefer or "speed"}


def options_of_chunks(args: argparse.Namespace) -> EngineOptions:
    """Return the engine options for a text in chunks. From then on this process keeps to the requested cores.
    UsageError for options that do not go together."""
    from edge.llm.options import EngineOptions

    refuse(args, ("context",), "is not used: every chunk has a context of its own; use --chunk-tokens in its place")
    keep_to_cores(args.affinity)
    return EngineOptions(**engine_values(args))


def check_engine_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError for engine options that do not go together."""
    if args.gpu_memory is not None:
        refuse(args, ("memory", "gpu_layers", "lora", "reproducible"), "does not go with --gpu-memory")
    if args.least_memory is None:
        refuse(args, ("prefer",), "is about memory that changes: give a range with --memory SIZE..SIZE")
    if args.memory is None:
        about_budget = ("window", "io_threads", "io_chunk", "verify")
        refuse(args, about_budget, "is about a budget: give one with --memory SIZE")
    elif args.gpu_layers:
        raise UsageError("--memory is a budget of this machine's own memory; leave --gpu-layers out, or the budget")
