"""Test the share of time in which a process computed."""

import math

import pytest

from edge.parallel.busy import WINDOW_S, BusyShare
from tests.support.clock import Clock


def test_the_share_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    share = BusyShare(clock.monotonic)
    share.add(100.0)
    assert share.share == 0
    for computed_s in (100.5, 101.0, 101.5):
        clock.now += 1
        share.add(computed_s)
    assert share.share == pytest.approx(0.5)
    for _ in range(4):  # it rests
        clock.now += 1
        share.add(101.5)
    assert share.share == 0


def test_a_new_part_an_old_reading_and_impossible_ones_do_not_count() -> None:
    clock = Clock()
    share = BusyShare(clock.monotonic)
    share.add(5.0)
    clock.now += 1
    share.add(0.5)  # another part was loaded
    assert share.share == 0
    clock.now += 1
    for impossible in (math.nan, math.inf, -1.0):
        share.add(impossible)
    share.add(9.0)
    assert share.share == 1  # at most
    clock.now += WINDOW_S + 1
    assert share.share == 0
