"""Worker inside this process, for engine processes that other processes on this device reach by links."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from devices.files import usable
from devices.names import host_name, join_address
from devices.paths import cache_folder, state_folder
from devices.probe import default_threads
from edge.models.digests import Digests
from edge.models.local_slices import CACHE_BYTES
from edge.models.slice_store import SliceStore
from edge.worker.limits import WorkerOptions
from edge.worker.service import Worker
from transport import rpc
from transport.connection_limit import ConnectionLimiter
from transport.grpc_link import CHANNEL_OPTIONS

_HOST = "127.0.0.1"
_THREADS = 16  # number of threads for calls; a session uses one thread for its whole life
_CONNECTIONS = 64


@contextmanager
def local_worker() -> Iterator[str]:
    """Yield the address of a worker that is reachable only from this machine. It ends with the block."""
    # Use half of the cores: the caller computes here, too, and more threads than cores would wait for each other.
    threads = max(1, default_threads() // 2)
    options = WorkerOptions(host_name(), _HOST, threads, None, None, None, prefix_bytes=0)
    limiter = ConnectionLimiter(_CONNECTIONS)
    worker = Worker(
        options, SliceStore(usable(cache_folder() / "slices"), CACHE_BYTES), Digests(state_folder()), limiter
    )
    pool = ThreadPoolExecutor(_THREADS, "worker here")
    server = grpc.server(pool, interceptors=[rpc.Admission(worker.admit)], options=[*CHANNEL_OPTIONS])
    try:
        server.add_generic_rpc_handlers((worker.handlers(),))
        port = server.add_insecure_port(f"{_HOST}:0")
        server.start()
        yield join_address(_HOST, port)
    finally:
        worker.sessions.close()
        server.stop(0).wait()
        limiter.close()
