"""Threads that parse requests: schemas of tools take up to half a second, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_PARSERS = ThreadPoolExecutor(2, thread_name_prefix="parser")


async def parsed(parse: Callable[..., T], *arguments: object) -> T:
    """Return what a function makes of a request. Its errors."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_PARSERS, lambda: context.run(parse, *arguments))
