"""Options of the engine that runs a language model, and the checks on them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from apps.options import add, given_options, io_chunk, keep_to_cores, option, refuse
from devices.sizes import parse_bytes
from edge.llm.options import FLASH_ATTENTION, MAX_IO_THREADS, PREFERENCES, EngineOptions
from edge.units import memory_options, positive_int, whole

ENGINE_OPTIONS = tuple(field.name for field in fields(EngineOptions))  # a command offers some of them


class MemoryAction(argparse.Action):
    """Stores the result of `edge.units.memory_options`: `memory`, and `least_memory` for a range."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        vars(namespace).update(values)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that control how the model is loaded and run."""
    group = parser.add_argument_group("engine")
    add(group, "--context", help="number of tokens in the context (default: the model's, at most 4096)")
    add(group, "--threads", help="number of threads (default: depends on the cores and the model)")
    add(group, "--affinity")
    words = "number of prompt tokens computed in one pass (default: 512; with --memory, measured)"
    option(group, "--batch N", words, positive_int)
    add(group, "--gpu-layers", help="number of layers on the GPU (default: as many as fit and speed the model up)")
    words = "limit of GPU memory, such as 6GiB; layers that do not fit are copied to the GPU when needed"
    add(group, "--gpu-memory", help=words)
    add(group, "--kv-type", default="f16")
    option(group, "--flash-attention", "use flash attention (default: auto)", choices=FLASH_ATTENTION, default="auto")
    words = "rearrange weights for this CPU: faster, but needs memory for the copy (default: if it fits)"
    option(group, "--repack", words, action=argparse.BooleanOptionalAction)
    group = parser.add_argument_group("memory")
    words = "memory limit, such as 3GiB; weights that do not fit are read from disk again for every token."
    words += " A range such as 1.2GiB..4GiB follows the memory that is free (default: no limit)"
    add(group, "--memory", type=memory_options, action=MemoryAction, metavar="SIZE[..SIZE]", help=words)
    parser.set_defaults(least_memory=None)
    words = "with a memory range, what to do first when free memory shrinks: speed uses fewer bits per weight, quality"
    words += " keeps the bits and reads weights from disk (default: speed)"
    option(group, "--prefer", words, choices=PREFERENCES)
    words = "part of --memory that holds weights read from disk (default: measured)"
    option(group, "--window SIZE", words, parse_bytes)
    words = "number of threads that read weights from disk (default: measured)"
    option(group, "--io-threads N", words, whole(1, MAX_IO_THREADS))
    option(group, "--io-chunk SIZE", "bytes of one read from disk (default: measured)", io_chunk)
    option(group, "--verify", "check that weights read from disk again have not changed")


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the engine options of a command. Options that it does not offer have their defaults.

    Raises UsageError if options contradict each other.
    """
    check_engine_arguments(args)
    return EngineOptions(**given_options(args, ENGINE_OPTIONS))


def options_of_chunks(args: argparse.Namespace) -> EngineOptions:
    """Return the engine options for evaluating a text in chunks, and bind this process to the cores of --affinity.

    Raises UsageError if options contradict each other.
    """
    refuse(args, ("context",), "is not used: each chunk has a context of its own; use --chunk-tokens instead")
    keep_to_cores(args.affinity)
    return engine_options(args)


def check_engine_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError if engine options contradict each other."""
    options = given_options(args, ENGINE_OPTIONS)
    if "gpu_memory" in options:
        refuse(args, ("gpu_layers", "lora", "reproducible"), "does not go with --gpu-memory; leave one out")
    if "least_memory" not in options:
        refuse(args, ("prefer",), "needs a memory range: give one with --memory SIZE..SIZE")
    if "memory" not in options:
        about_budget = ("window", "io_threads", "io_chunk", "verify")
        refuse(args, about_budget, "needs a memory limit: give one with --memory SIZE")
    elif options.get("gpu_layers"):
        refuse(args, ("lora",), "does not go with both --memory and --gpu-layers; leave one out")
