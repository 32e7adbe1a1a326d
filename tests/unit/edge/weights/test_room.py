"""Test the memory accounting of a process: how much of its plan it holds, and how much is free."""

from edge.weights.elastic.room import Room


def test_what_a_process_holds_beyond_its_plan_is_not_there_for_weights() -> None:
    resident, free = 500, 300
    room = Room(lambda: resident, lambda: free)
    assert room.for_process(400) == 400 + 300
    assert room.for_process(900) == 500 + 300  # of what is planned, the rest is not there yet
