"""The order in which waiting requests begin: by priority, and then fair to clients.

Start-time fair queuing (Goyal, Vin and Cheng, 1997): each request has a start tag, and the least tag begins first. A
client's next request starts, in virtual time, when its previous one ends, so that a client with many requests waits
behind its own and not in front of others. Virtual time is the tag of the latest request that has begun.
"""

from __future__ import annotations


class FairOrder:
    """Start tags for the requests of one model."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # virtual end of each client's last request

    def tag(self, client: str, cost: float, weight: float = 1.0) -> float:
        """Return the start tag of a client's new request.

        cost: its work, in tokens.
        weight: share of the client. While two clients wait, their work is in the ratio of their weights.
        """
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + cost / weight
        return start

    def begun(self, tag: float) -> None:
        """Note that a request has begun. Clients whose requests have all begun are forgotten."""
        if tag > self._now:
            self._now = tag
            self._ends = {client: end for client, end in self._ends.items() if end > tag}
