"""Test that an unreadable request gives its place to others before its call ends."""

import traceback

import grpc
import pytest

from transport import edge_pb2, rpc


class Aborted(Exception):
    pass


class Context:
    """Context of a call, as gRPC gives it: `abort` raises."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code = code
        raise Aborted(details)

    def cancel(self) -> None:
        raise AssertionError("the request came in time")


def test_an_unreadable_request_is_not_kept_by_its_error() -> None:
    body, context = b"\x0a" + bytes(1 << 20), Context()
    with pytest.raises(Aborted) as error:
        rpc._first(iter([body]), context, edge_pb2.SliceOffer.FromString)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    raised: BaseException | None = error.value
    while raised is not None:
        for frame, _ in traceback.walk_tb(raised.__traceback__):
            if frame.f_globals["__name__"] == rpc.__name__:
                assert not any(value is body for value in frame.f_locals.values())
        raised = raised.__context__
