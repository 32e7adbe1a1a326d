"""Standard routes, which are compared by default: settings of llama.cpp, and the ways that this runtime adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.quantization.routes import Route, drafted, from_prefix_cache, one_by_one, streams
from partition.model.file import ModelLike

STREAMS = 8
ROWS = 8  # rows of a pass that verifies drafts
_SMALL_BATCH = 32
_OUTPUTS = 64  # rows with logits in a pass

Opened = Callable[[EngineOptions], AbstractContextManager[TextEngine]]


def options_for(options: EngineOptions, chunk_tokens: int) -> EngineOptions:
    """Return `options` for engines that compute chunks of `chunk_tokens` tokens, with room for drafts."""
    batch = min(options.rows, chunk_tokens)
    return replace(options, context=chunk_tokens, batch=batch, outputs=min(batch, _OUTPUTS), sequences=1)


def local_route(model: ModelLike, options: EngineOptions, name: str = "one device") -> Route:
    """Return the route of a model on this device. options: result of `options_for`"""
    return Route(name, partial(Engine, model, options))


def setting_routes(model: ModelLike, options: EngineOptions) -> list[Route]:
    """Return routes with llama.cpp's own settings on this device, except the settings in `options`."""
    flash = "off" if options.flash_attention != "off" else "on"
    batch = min(_SMALL_BATCH, options.rows)
    changed = {
        f"flash attention {flash}": replace(options, flash_attention=flash),
        f"steps of {_SMALL_BATCH} rows": replace(options, batch=batch, outputs=batch),
        "weights not repacked": replace(options, repack=False),
    }
    routes = [local_route(model, setting, name) for name, setting in changed.items()]
    routes.append(Route("a row a pass", partial(Engine, model, options), one_by_one))
    if options.threads != 1:
        routes.append(Route("the same on 1 thread", partial(Engine, model, replace(options, threads=1)), one_by_one))
    return routes


def answer_routes(options: EngineOptions, opened: Opened, where: str = "") -> list[Route]:
    """Return the routes that answer requests in other ways.

    opened: opens an engine with the given options
    where: location of the engine, for people
    """
    behind = f", {where}" if where else ""
    wide = replace(options, context=STREAMS * (options.context or 1), sequences=STREAMS, outputs=STREAMS)
    return [
        Route(f"passes of {ROWS} rows{behind}", partial(opened, options), drafted(ROWS)),
        Route(f"kept prompt{behind}", partial(_keeping, options, opened), from_prefix_cache),
        Route(f"{STREAMS} streams{behind}", partial(opened, wide), streams(STREAMS)),
    ]


def remote_route(options: EngineOptions, opened: Opened, where: str) -> Route:
    """Return the route of a model on engines of other devices. where: their location, for people"""
    return Route(where, partial(opened, options))


@contextmanager
def _keeping(options: EngineOptions, opened: Opened) -> Iterator[TextEngine]:
    """Open an engine with a prefix cache. This device's blocks go to a temporary folder; workers use their own
    folders."""
    with (
        TemporaryDirectory(prefix="edge-kept-") as folder,
        opened(replace(options, prefixes=PrefixOptions(folder=Path(folder)))) as engine,
    ):
        yield engine
