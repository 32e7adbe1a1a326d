"""Threads that parse requests: tool schemas may take half a second, which must not delay other requests."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_PARSERS = ThreadPoolExecutor(2, thread_name_prefix="parser")


async def parsed(parse: Callable[..., T], *arguments: object) -> T:
    """Run a parser in a thread and return its result. Raises its errors."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_PARSERS, lambda: context.run(parse, *arguments))
