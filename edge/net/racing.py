"""Race between the addresses of one rank. The first address that answers as the rank wins; others are closed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from transport.errors import LinkTimeout, TransportError
from transport.link import Link

# RFC 8305: time from the start of one try to the next; after a failure the next try starts immediately.
STAGGER_S = 0.25
_STEPS = 3  # steps of a try, each at most one timeout long: connect, TLS, HELLO


def race(hosts: Sequence[str], dial: Callable[[str, float], Link], timeout_s: float) -> tuple[str, Link]:
    """Dial the hosts in their order with short delays. Return the first that answers, and its link.

    dial: called in its own thread with a host and the seconds in which it may connect; it must verify the peer

    Later tries get less time to connect, so that several silent hosts take no longer than one. The race ends within
    three times `timeout_s`. Links of later tries are closed. If no host answers, raise the error of the first host,
    with the errors of the other hosts in its message.
    """
    results: queue.SimpleQueue[tuple[str, Link | Exception]] = queue.SimpleQueue()
    over, ending = False, threading.Lock()

    def attempt(host: str, left_s: float) -> None:
        result: Link | Exception
        try:
            result = dial(host, left_s)
        except Exception as error:
            result = error
        with ending:
            if not over:
                results.put((host, result))
                return
        if isinstance(result, Link):
            result.close()

    began = time.monotonic()
    delay_s = min(STAGGER_S, timeout_s / (2 * len(hosts)))  # leaves half of the time for the last try
    waiting, running = list(hosts), 0
    failed: dict[str, Exception] = {}
    try:
        while waiting or running:
            passed_s = time.monotonic() - began
            if waiting:
                host = waiting.pop(0)
                left_s = round(max(timeout_s / 2, timeout_s - passed_s), 2)
                threading.Thread(target=attempt, args=(host, left_s), daemon=True, name=f"dial {host}").start()
                running += 1
            try:
                host, result = results.get(timeout=delay_s if waiting else max(0.0, _STEPS * timeout_s - passed_s))
            except queue.Empty:
                if not waiting:
                    break
                continue
            running -= 1
            if isinstance(result, Link):
                return host, result
            failed[host] = result
        raise _error(hosts, failed, timeout_s)
    finally:
        with ending:
            over = True
        while not results.empty():
            _, result = results.get()
            if isinstance(result, Link):
                result.close()


def _error(hosts: Sequence[str], failed: dict[str, Exception], timeout_s: float) -> Exception:
    first = failed.pop(hosts[0], None) or LinkTimeout(f"{hosts[0]} did not answer within {_STEPS * timeout_s:g} s")
    if not isinstance(first, TransportError):
        return first
    others = "; ".join(f"at {host}: {failed.get(host, 'no answer')}" for host in hosts[1:])
    return type(first)(f"{first}; nor is it reached at its other addresses ({others})")
