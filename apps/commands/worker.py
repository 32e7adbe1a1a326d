"""`edge worker`: lets other devices use this one, until it is stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from apps.engine_options import MemoryAction
from apps.errors import UsageError
from apps.options import add, check_usable, device_name, option, set_common
from devices.sizes import parse_bytes
from edge.llm.options import MAX_THREADS
from edge.units import memory_options

HELP = "Let other devices use this one: run as a daemon that they reach over the network."

DEFAULT_LISTEN = "127.0.0.1:7070"
DEFAULT_CACHE = "20GiB"
_LINK_S = 3600.0  # seconds within which the link of --browser must be opened


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--listen --name --memory --threads --models --browser --join --insecure --announce")
    words = (
        f"address or port to listen on; port 0: any free port (default: {DEFAULT_LISTEN}; in a cluster 0.0.0.0:7070)"
    )
    option(parser, "--listen HOST:PORT", words)
    option(
        parser, "--name NAME", "name of this device (default: its name in the cluster, or the host name)", device_name
    )
    words = "memory limit, such as 2GiB; a range such as 1GiB..2GiB follows the memory that is free (default: no limit)"
    add(parser, "--memory", type=memory_options, action=MemoryAction, metavar="SIZE[..SIZE]", help=words)
    parser.set_defaults(least_memory=None)
    add(parser, "--threads", help="number of threads (default: one per physical core of --affinity)")
    add(parser, "--affinity", help="compute on these cores only, such as 0,2-3 (default: all)")
    words = "maximum number of layers on the GPU in a session (default: as many as fit and speed the model up)"
    add(parser, "--gpu-layers", help=words)
    add(parser, "--gpu-memory", help="limit of GPU memory for a session (default: all free GPU memory)")
    words = "folder of model files; slices of these models are read from here instead of sent over the network"
    option(parser, "--models DIR", words, Path)
    words = f"disk space for model slices (default: {DEFAULT_CACHE})"
    option(parser, "--cache-size SIZE", words, parse_bytes, default=DEFAULT_CACHE)
    words = "disk space for the encrypted KV cache of the owner's prompts; 0: store nothing (default: 2GiB)"
    add(parser, "--prefix-cache", help=words)
    words = "serve a page with which browsers compute stages, in place of this device; prints a link for a new one"
    option(parser, "--browser", words, action="store_true")
    trust = parser.add_argument_group("trust")
    option(trust, "--join TOKEN", "join a cluster with the token that `edge cluster invite` printed")
    add(trust, "--insecure", help="listen to other machines without encryption: anyone who reaches it can use it")
    words = "let other devices find this worker by mDNS (default: yes, if it is secure and can be reached)"
    option(trust, "--announce", words, action=argparse.BooleanOptionalAction)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from devices.files import is_usable, usable
    from devices.names import host_name
    from devices.paths import cache_folder, credentials_folder, state_folder
    from devices.probe import default_threads
    from devices.trust import credentials
    from devices.trust.invitation import parse_token
    from edge import log
    from edge.ending import signals_are_for_the_program
    from edge.net.channel import is_loopback, parse_listen
    from edge.prefixes.store import DEFAULT_BYTES
    from edge.worker.daemon import DaemonOptions, serve
    from edge.worker.limits import WorkerOptions

    if args.browser:
        from apps.browser import serve_browser

        return serve_browser(args.name, _LINK_S, args.listen)
    if args.models is not None and not args.models.is_dir():
        raise UsageError(f"--models {args.models} is not a folder; name one with GGUF files")
    affinity: tuple[int, ...] = args.affinity or ()
    if affinity:
        check_usable(affinity)
    folder = credentials_folder()
    if args.join is not None:
        _check_name(args.name, parse_token(args.join).holder.name)
        credentials.store_token(folder, args.join)
    membership = None if args.insecure else credentials.load(folder)
    if membership:
        _check_name(args.name, membership.holder.name)
    try:
        host, port = parse_listen(args.listen or "", DEFAULT_LISTEN if membership is None else "0.0.0.0:7070")
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    # A worker that listens only to this machine needs no credentials, and shows none.
    secure = membership is not None and not is_loopback(host)
    log.set_up()
    is_usable(state_folder())
    if membership is not None and not secure:
        why = "it listens only to this machine, so it shows no certificate; --listen 0.0.0.0:7070 changes that"
        log.info("in-the-clear", name=membership.holder.name, role=membership.holder.role, why=why)
    with signals_are_for_the_program():
        serve(
            DaemonOptions(
                worker=WorkerOptions(
                    name=membership.holder.name if membership else args.name or host_name(),
                    host=host,
                    threads=args.threads or min(default_threads(), len(affinity) or MAX_THREADS),
                    memory_limit_bytes=args.memory,
                    least_memory=args.least_memory,
                    models=args.models,
                    credentials=folder if secure else None,
                    affinity=affinity,
                    gpu_layers=args.gpu_layers,
                    gpu_memory=args.gpu_memory,
                    prefix_bytes=DEFAULT_BYTES if args.prefix_cache is None else args.prefix_cache,
                ),
                port=port,
                insecure=args.insecure,
                announce=args.announce,
                cache=usable(cache_folder() / "slices"),
                cache_bytes=args.cache_size,
                state=state_folder(),
            )
        )
    return 0


def _check_name(wanted_name: str | None, own_name: str) -> None:
    """Raise UsageError if --name differs from the name that the owner of the cluster gave this device."""
    if wanted_name and wanted_name != own_name:
        raise UsageError(f"--name {wanted_name}: this device is called {own_name} in its cluster; leave --name out")
