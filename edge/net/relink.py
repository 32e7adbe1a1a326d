"""Link changes while a model runs: between two answers, at both ends, on rank 0's command.

The lower rank of a link decides and dials, as at the beginning. The two agree over the link in use, in CONTROL frames:

| the lower rank | the higher rank |
| keep  | goes on |
| other | lets the lower one dial again and says ready. It answers measurements on both links until they are done |
| then keep or use | goes on, or takes the new link and closes the one that was in use |

Every rank serves the ranks below it first, in their order, then asks those above it. So no two wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from devices.errors import TrustError
from edge.errors import EngineError
from edge.net.dialling import OTHER, USUAL, Dialled, Dialler, Trial
from edge.net.peers import Listener, Peer
from transport.collective import Group
from transport.errors import ProtocolError, TransportError
from transport.frame import Kind
from transport.link import Link
from transport.measure import answer, finish

_WORD_BYTES = 16
_KEEP, _OTHER, _READY, _TAKE = b"keep", b"other", b"ready", b"use"
_MOST_WHY = 300  # characters, of another rank
_MOST_LINKS = 1 << 10


class Order(IntEnum):
    """Command to the ranks about their links."""

    REPORT = 0  # nothing: they say how they are linked
    COMPARE = 1  # measure both ways anew, and take the one to prefer
    USUAL = 2  # take the usual way
    COMPARED = 3  # take the way that the last comparison preferred


_REASONS = {Order.USUAL: "the usual way", Order.COMPARED: "by what tokens took"}


@dataclass(frozen=True)
class LinkState:
    """State of one link, reported by the rank that dialled it."""

    ranks: tuple[int, int]  # the lower one first
    kind: str
    why: str  # this kind
    usual: bool  # whether it is the usual way, or the only one

    def to_json(self) -> dict[str, Any]:
        """Plain values, by field."""
        return {"ranks": list(self.ranks), "kind": self.kind, "why": self.why, "usual": self.usual}

    @classmethod
    def from_json(cls, values: Any) -> LinkState:
        """Read what `to_json` wrote. ValueError for anything else: it comes from another device."""
        try:
            low, high = (int(rank) for rank in values["ranks"])
            kind, why, usual = str(values["kind"]), str(values["why"]), bool(values["usual"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no link: {error}") from error
        if not 0 <= low < high or kind not in (USUAL, OTHER):
            raise ValueError("a link that cannot be")
        return cls((low, high), kind, "".join(c if c.isprintable() else " " for c in why)[:_MOST_WHY], usual)


@dataclass(frozen=True)
class Report:
    """Report of a rank between answers."""

    compute_s: float  # of a decode step since the last report, at the fast end; 0 where there was none
    links: tuple[LinkState, ...]  # those that it dialled

    def to_json(self) -> dict[str, Any]:
        """Plain values, by field."""
        return {"compute_s": self.compute_s, "links": [link.to_json() for link in self.links]}

    @classmethod
    def from_json(cls, values: Any) -> Report:
        """Read what `to_json` wrote. ValueError for anything else: it comes from another device."""
        try:
            compute_s, links = float(values["compute_s"]), values["links"]
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no report: {error}") from error
        if not 0 <= compute_s < math.inf or not isinstance(links, list) or len(links) > _MOST_LINKS:
            raise ValueError("a report with figures that cannot be")
        return cls(compute_s, tuple(map(LinkState.from_json, links)))


class Relink:
    """Links of one rank, and the means to dial them again."""

    def __init__(
        self,
        dialler: Dialler,
        above: Sequence[Peer],
        below: Mapping[int, str],
        dialled: Mapping[int, Dialled],
        listener: Listener | None,
    ) -> None:
        """above: in the order of ranks. below: their names. dialled: the links to those above."""
        self.dialled = dict(dialled)
        self._dialler, self._above, self._below, self._listener = dialler, above, dict(below), listener
        self._compared = {rank: dialled_link.link.kind for rank, dialled_link in dialled.items()}

    @property
    def able(self) -> bool:
        """Return whether links may change: not if the owner named a transport, nor if they stream."""
        return self._dialler.transport == "auto" and not self._dialler.streams

    def states(self) -> tuple[LinkState, ...]:
        """The links that this rank dialled."""
        own_rank = self._dialler.rank
        return tuple(
            LinkState((own_rank, rank), link.link.kind, link.why, link.usual) for rank, link in self.dialled.items()
        )

    def again(self, group: Group, order: Order) -> None:
        """Do what rank 0 says about all links of this rank, in `group`; all ranks of it at the same time.

        What cannot be dialled changes nothing. EngineError if links may not change; errors of the links in use.
        """
        if not self.able:
            raise EngineError("links were made to stay, and are to be changed; this is an error of rank 0")
        for rank in sorted(self._below):
            self._serve(group, rank)
        for peer in self._above:
            self._ask(group, peer, order)
        agree(group, self.dialled)

    # --- as the lower rank ---

    def _ask(self, group: Group, peer: Peer, order: Order) -> None:
        now, link = self.dialled[peer.rank], group.links[peer.rank]
        kind = self._target_kind(peer.rank, order)
        if kind is None:
            link.send(_KEEP, Kind.CONTROL)
            return
        link.send(_OTHER, Kind.CONTROL)
        if _word(link) != _READY:
            raise ProtocolError(f"{link.peer} was to be ready for another link, it said something else")
        try:
            redialled = self._dialled(peer, now, link, kind, order)
        except (TransportError, TrustError) as error:
            if link.broken is not None:
                raise
            # The other way may be compared again; the usual one would be tried after each answer, so it is not.
            kinds = now.kinds if now.usual else (now.link.kind,)
            self._compared[peer.rank] = now.link.kind
            redialled = replace(now, kinds=kinds, why=f"{now.why}; {kind} failed: {error}")
        finish(link)
        if redialled.link is now.link:
            link.send(_KEEP, Kind.CONTROL)
        else:
            link.send(_TAKE, Kind.CONTROL)
            group.replace(peer.rank, redialled.link)
        self.dialled[peer.rank] = redialled

    def _target_kind(self, rank: int, order: Order) -> str | None:
        """Return the kind to dial; None: no change."""
        now = self.dialled[rank]
        if len(now.kinds) < 2:
            return None
        if order is Order.COMPARE:
            return next(kind for kind in now.kinds if kind != now.link.kind)
        target_kind = now.kinds[0] if order is Order.USUAL else self._compared[rank]
        return None if target_kind == now.link.kind else target_kind

    def _dialled(self, peer: Peer, now: Dialled, link: Link, kind: str, order: Order) -> Dialled:
        """Return the link to use from now on: `now`, or one of the other kind."""
        fresh = self._dialler.connect(kind, peer)
        try:
            if order is Order.COMPARE:
                trials = {now.link.kind: Trial(link), kind: Trial(fresh)}
                best, why = self._dialler.compare(trials, {})
                self._compared[peer.rank] = best
            else:
                best, why = kind, f"{kind}, {_REASONS[order]}"
            if best == kind:
                return replace(now, link=fresh, figures=self._dialler.use(fresh), why=why)
        except BaseException:
            fresh.close()
            raise
        fresh.close()
        return replace(now, figures=self._dialler.figures(link), why=why)

    # --- as the higher rank ---

    def _serve(self, group: Group, rank: int) -> None:
        link, name = group.links[rank], self._below[rank]
        word = _word(link)
        if word == _KEEP:
            return
        if word != _OTHER or self._listener is None:
            raise ProtocolError(f"{link.peer} was to say whether its link stays, it said something else")
        self._listener.expect(rank)
        try:
            link.send(_READY, Kind.CONTROL)
            answer(link)
            word = _word(link)
            if word == _TAKE:
                fresh = self._listener.wait_for({rank: name}, link.deadlines.connect_timeout_s)
                group.replace(rank, fresh[rank])
            elif word != _KEEP:
                raise ProtocolError(f"{link.peer} was to keep or change its link, it said something else")
        finally:
            self._listener.pause()


def agree(group: Group, dialled: Mapping[int, Dialled]) -> None:
    """Agree on the worst latency and bandwidth in the group, of the links that each rank dialled."""
    figures = [link.figures for link in dialled.values()]
    group.agree(
        max((f.latency_s for f in figures), default=0.0),
        min((min(f.send_bytes_per_s, f.receive_bytes_per_s) for f in figures), default=math.inf),
    )


def _word(link: Link) -> bytes:
    frame = link.receive(max_bytes=_WORD_BYTES)
    if frame.kind is not Kind.CONTROL:
        raise ProtocolError(f"{link.peer} sent {frame.kind.name} where it was to say what comes of its link")
    return bytes(frame.payload)
