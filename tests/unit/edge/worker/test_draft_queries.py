"""Test drafts over a link: the bytes that are sent, and those that each end refuses."""

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest

from edge.worker import draft_queries
from edge.worker.draft_queries import MOST_TOKENS, DraftQuery, RemoteProposer, follow, pack, unpack
from tests.support.links import PATIENT, WAIT_S, start
from tests.support.memory_link import pair
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused
from transport.frame import Kind
from transport.link import Link

N_VOCAB, CONTEXT = 1000, 2048


class Counting:
    """Drafts that the last token is followed by the next numbers, and remembers what it was asked."""

    context, n_vocab = CONTEXT, N_VOCAB

    def __init__(self) -> None:
        self.queries: list[tuple[list[int], int]] = []

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        self.queries.append((list(tokens), n))
        return [(tokens[-1] + i) % N_VOCAB for i in range(1, n + 1)]


@contextmanager
def followed(model: Counting) -> Iterator[tuple[RemoteProposer, Link, Future[None]]]:
    """Yield a proposer that asks, its link, and what comes of the other end."""
    near, far = pair(("the owner", "the worker"), PATIENT)
    done = start(follow, model, far)
    yield RemoteProposer(near, CONTEXT, N_VOCAB), near, done
    near.close()


def test_a_token_crosses_once() -> None:
    """Twelve bytes a request, four for a token that is new, and four for a draft: nothing else."""
    model = Counting()
    with followed(model) as (proposer, link, done):
        text = [5, 6, 7]
        for new, n, known in (((), 3, 0), ((8, 9), 7, 3), ((8, 8), 1, 4), ((8, 8), 2, 5)):
            now = [*text, *new]
            sent, received = link.sent_bytes, link.received_bytes
            assert proposer.propose(now, n) == [now[-1] + i for i in range(1, n + 1)]
            assert link.sent_bytes - sent == 12 + 4 * (len(now) - known)
            assert link.received_bytes - received == 4 * n
            assert model.queries[-1] == (now, n)
        proposer.end()
        assert done.result(WAIT_S) is None


def test_a_long_text_goes_in_parts() -> None:
    """So that each answer is soon there: a deadline is of one part."""
    model, text = Counting(), [i % N_VOCAB for i in range(2 * MOST_TOKENS + 1)]
    with followed(model) as (proposer, _, _):
        assert proposer.propose(text, 2) == [text[-1] + 1, text[-1] + 2]
    assert [(len(tokens), n) for tokens, n in model.queries] == [(512, 0), (1024, 0), (1025, 2)]
    assert model.queries[-1][0] == text


def test_requests_are_what_was_packed() -> None:
    for request in (DraftQuery(0, 7, (1, 2, 3)), DraftQuery(9, 0, ()), None):
        assert unpack(pack(request)) == request


HEAD = struct.Struct("<BBHII")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "has 0 bytes; it has 12"),
        (HEAD.pack(1, 0, 0, 0, 1) + b"\0\0", "has 14 bytes"),
        (HEAD.pack(3, 0, 0, 0, 1), "operation 3 with flags 0 and 0 is not known"),
        (HEAD.pack(1, 1, 0, 0, 1), "flags 1 and 0"),
        (HEAD.pack(1, 0, 1, 0, 1), "flags 0 and 1"),
        (HEAD.pack(1, 0, 0, 1, 1) + bytes(4), r"with the first 1 already sent; 0 tokens are known"),
        (HEAD.pack(1, 0, 0, 0, 1), "drafts after 0 tokens"),
        (HEAD.pack(1, 0, 0, 0, CONTEXT) + bytes(4), f"{CONTEXT} drafts after 1 tokens"),
        (pack(DraftQuery(0, 1, (N_VOCAB,))), "token ids are from 0 to 999"),
        (pack(DraftQuery(0, 1, (-1,))), "token ids are from 0 to 999"),
        (pack(DraftQuery(0, 1, (1,) * (MOST_TOKENS + 1))), "at most"),
    ],
)
def test_what_cannot_be_asked_is_refused(data: bytes, words: str) -> None:
    model = Counting()
    with followed(model) as (_, link, done):
        link.send(data, Kind.CONTROL)
        with pytest.raises(ProtocolError, match=words):
            done.result(WAIT_S)
    assert not model.queries


def test_only_requests_are_taken() -> None:
    with followed(Counting()) as (_, link, done):
        link.send(pack(DraftQuery(0, 1, (1,))))
        with pytest.raises(ProtocolError, match="sent DATA where a request for drafts"):
            done.result(WAIT_S)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda link: link.send(ids(1)), ProtocolError, "was asked to draft 2 tokens, but sent 4 bytes of DATA"),
        (lambda link: link.send(ids(1, 2), Kind.CONTROL), ProtocolError, "sent 8 bytes of CONTROL"),
        (lambda link: link.send(ids(1, 2, 3)), ProtocolError, "at most 8"),
        (lambda link: link.send(ids(1, N_VOCAB)), ProtocolError, "token ids are from 0 to 999"),
        (lambda link: link.send(ids(-1, 1)), ProtocolError, "token ids are from 0 to 999"),
        (lambda link: link.refuse("no memory"), Refused, "no memory"),
        (lambda link: link.close(), LinkClosed, "closed the link"),
    ],
)
def test_an_answer_that_cannot_be_is_none(answer: Callable[[Link], None], error: type[Exception], words: str) -> None:
    near, far = pair(("the owner", "the worker"), PATIENT)
    done = start(lambda: (far.receive(), answer(far)))
    with pytest.raises(error, match=words):
        RemoteProposer(near, CONTEXT, N_VOCAB).propose([1], 2)
    done.result(WAIT_S)


def test_an_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_queries, "ANSWER_S", 0.01)
    near, _ = pair(("the owner", "the worker"), PATIENT)
    with pytest.raises(LinkTimeout, match=r"the worker sent nothing for 0\.01 s"):
        RemoteProposer(near, CONTEXT, N_VOCAB).propose([1], 2)


def test_a_wait_that_was_given_up_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late answer would be taken for the answer to the next request."""
    near, _ = pair(("the owner", "the worker"), PATIENT)
    proposer = RemoteProposer(near, CONTEXT, N_VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr(near, "receive", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            proposer.propose([1], 2)
    with pytest.raises(LinkClosed):
        proposer.propose([1], 2)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt
