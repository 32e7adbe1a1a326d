"""Imports of commands when they run, for fork servers: many do, and each would take half a second.

Not the hub's library itself, which reads the environment when it is imported.
"""

import importlib
from contextlib import suppress

for name in ("edge.serve.server", "uvicorn.protocols.http.h11_impl", "yaml", "tqdm.auto", "httpx", "httpx2"):
    with suppress(ImportError):  # of libraries of another version
        importlib.import_module(name)
