"""When links are compared again and changed: by known times of tokens, without links and without a clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.net.relink import LinkState, Order, Report
from edge.parallel.link_watch import LinkWatch, expected_s
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from quant.text import number_text
from quant.wire import WIRES
from tests.conftest import Synthetic
from tests.support import memory_link
from transport.collective import Group

TCP = (LinkState((0, 1), "tcp", "chosen", True),)
GRPC = (LinkState((0, 1), "grpc", "chosen", False),)
COMPUTE_S = 0.030  # of a token, on both ranks


def answered(watch: LinkWatch, communication_s: float, links: tuple[LinkState, ...], burst_s: float = 0.0) -> Order:
    """One answer of 32 tokens, half of them hit by a burst; what to do after it."""
    for i in range(32):
        watch.token(COMPUTE_S + communication_s + burst_s * (i % 2), COMPUTE_S)
    assert watch.due
    order = Order.REPORT if watch.fits(links) else watch.order([COMPUTE_S, COMPUTE_S], links)
    assert not watch.due
    return order


def watching() -> LinkWatch:
    return LinkWatch(0.005, [2])


@given(burst_s=st.floats(0, 0.5))
def test_links_that_do_what_they_should_are_left_alone(burst_s: float) -> None:
    watch = watching()
    assert [answered(watch, 0.006, TCP, burst_s) for _ in range(5)] == [Order.REPORT] * 5
    assert not watch.changes


@given(burst_s=st.floats(0, 0.5), grpc_s=st.floats(0.009, 0.072))
def test_noise_chose_grpc(burst_s: float, grpc_s: float) -> None:
    """The figures that were seen: tokens of 64 ms where TCP takes 37. One answer is given on it, and no more. So it is
    where it takes no longer than was measured of it."""
    watch = watching()
    assert answered(watch, grpc_s, GRPC, burst_s) is Order.USUAL
    watch.changed(GRPC, TCP, 0.005)
    assert [answered(watch, 0.007, TCP, burst_s) for _ in range(5)] == [Order.REPORT] * 5
    assert len(watch.changes) == 1
    took = f"{number_text(grpc_s * 1e3)} ms"
    assert watch.changes[0].startswith(f"after answer 1: a token's communication took {took}, 5.00 ms expected; ")
    assert watch.changes[0].endswith("ranks 0 and 1 use tcp, no longer grpc (chosen)")


def test_grpc_that_is_truly_faster_is_found_again() -> None:
    watch = watching()
    assert answered(watch, 0.012, GRPC) is Order.USUAL
    watch.changed(GRPC, TCP, 0.005)
    assert answered(watch, 0.030, TCP) is Order.COMPARED
    watch.changed(TCP, GRPC, 0.005)
    assert [answered(watch, 0.012, GRPC) for _ in range(3)] == [Order.REPORT] * 3


def test_tcp_that_became_slow_is_compared_and_what_is_not_better_in_use_does_not_stay() -> None:
    watch = watching()
    assert answered(watch, 0.020, TCP) is Order.COMPARE
    watch.changed(TCP, GRPC, 0.005)
    assert answered(watch, 0.019, GRPC) is Order.USUAL  # not clearly better
    watch.changed(GRPC, TCP, 0.005)
    assert answered(watch, 0.020, TCP) is Order.REPORT  # compared already
    assert answered(watch, 0.029, TCP) is Order.COMPARED  # 19 ms are clearly less
    assert len(watch.changes) >= 2


def test_links_are_not_compared_again_and_again() -> None:
    """A network that is slow whichever way: one comparison, and another where it becomes much worse."""
    watch = watching()
    orders = []
    for communication_s in (0.02, 0.02, 0.025, 0.02, 0.04, 0.04):
        orders.append(answered(watch, communication_s, TCP))
        if orders[-1] is Order.COMPARE:
            watch.changed(TCP, TCP, 0.005)
    assert [order is Order.COMPARE for order in orders] == [True, False, False, False, True, False]
    assert all(change.endswith("all links stay") for change in watch.changes)


def test_the_computing_of_others_is_no_communication() -> None:
    """Rank 0 waits for a rank that computes three times as long, and for the stage behind both."""
    watch = LinkWatch(0.005, [2, 1])
    for _ in range(8):
        watch.token(0.010 + 0.020 + 0.040 + 0.006, 0.010)
    assert not watch.fits(TCP)  # by its own waits alone
    assert watch.order([0.010, 0.030, 0.040], TCP) is Order.REPORT
    for _ in range(8):
        watch.token(0.010 + 0.020 + 0.040 + 0.016, 0.010)
    assert watch.order([0.010, 0.030, 0.040], TCP) is Order.COMPARE


def test_a_few_tokens_say_nothing() -> None:
    watch = watching()
    for _ in range(7):
        watch.token(1.0, 0.0)
    assert not watch.due


def test_what_communication_should_take(synthetic: Synthetic) -> None:
    can = limits(GgufFile.open(synthetic("llama", "f32")))
    group = Group(0, {1: memory_link.pair()[0], 2: memory_link.pair()[0]})
    group.latency_s, group.bandwidth = 1e-3, 1e6
    devices = [LOCAL, "a:1", "b:1"]
    tensor = make_plan(can, "m", "", devices, "tensor", [1, 1, 1])
    sums, message_s = 2 * can.sizes.layers, 1e-4
    back_s = 1e-3 + 4000 / 1e6 + message_s
    mesh_s = 1e-3 + 2 * 4000 / 1e6
    split_s = 2e-3 + 2 / 3 * 8000 / 1e6
    result = expected_s(tensor, 1000, group, "mesh", None)
    assert result == pytest.approx(sums * (mesh_s + message_s) + back_s)
    assert expected_s(tensor, 1000, group, "auto", None) == pytest.approx(
        sums * (min(mesh_s, split_s) + message_s) + back_s
    )
    half = WIRES["f16"]
    assert expected_s(tensor, 1000, group, "mesh", half) == pytest.approx(
        sums * (1e-3 + 2 * 2000 / 1e6 + message_s) + 1e-3 + 2000 / 1e6 + message_s
    )
    staged = make_plan(can, "m", "", devices[:2], "pipeline", [1, 1])
    assert expected_s(staged, 1000, group, "auto", None) == pytest.approx(2 * back_s)


@pytest.mark.parametrize(
    "said",
    [
        None,
        3,
        [],
        {},
        {"compute_s": "x", "links": []},
        {"compute_s": -1, "links": []},
        {"compute_s": float("nan"), "links": []},
        {"compute_s": 1, "links": 3},
        {"compute_s": 1, "links": [3]},
        {"compute_s": 1, "links": [{"ranks": [1, 0], "kind": "tcp", "why": "", "usual": True}]},
        {"compute_s": 1, "links": [{"ranks": [0, 1], "kind": "pigeon", "why": "", "usual": True}]},
        {"compute_s": 1, "links": [{"ranks": [0, 1, 2], "kind": "tcp", "why": "", "usual": True}]},
    ],
)
def test_reports_that_cannot_be(said: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        Report.from_json(said)


def test_a_report_crosses_as_it_is() -> None:
    report = Report(0.25, (*TCP, LinkState((1, 2), "grpc", "a\x1b[31m" + "b" * 1000, False)))
    back = Report.from_json(report.to_json())
    assert (back.compute_s, back.links[0]) == (0.25, TCP[0])
    assert back.links[1].why == "a [31m" + "b" * 294


def test_the_last_hundred_changes_are_remembered() -> None:
    watch = watching()
    for i in range(250):
        watch.changes.append(f"change {i}: ")
        watch.changed(TCP, TCP, 0.005)
    assert [line.partition(":")[0] for line in watch.changes] == [f"change {i}" for i in range(150, 250)]
