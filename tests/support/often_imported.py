"""Imports that most commands need when they run; fork servers import them once in advance.

Not the hub's library itself, which reads the environment when it is imported. Nor what few need: it would make each
process larger.
"""

import importlib
from contextlib import suppress

for name in (
    "anyio._backends._asyncio",
    "apps.quantize_gguf",
    "edge.api.cluster",
    "edge.quantization.fit",
    "edge.serve.server",
    "httpx",
    "httpx2",
    "tqdm.auto",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.h11_impl",
    "yaml",
):
    with suppress(ImportError):  # of libraries of another version
        importlib.import_module(name)
