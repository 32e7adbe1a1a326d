"""Test when a budget follows the free memory: down at once, up when the memory stays free."""

from edge.weights.elastic.governor import GROW_AFTER_S, SLACK, Governor

HELD = 1000


def test_less_room_than_is_held_shrinks_the_budget_at_once_and_by_a_little_more() -> None:
    governor = Governor(2000, HELD)
    assert governor.look(900, HELD, 0.0, 0.0) == 900 - 900 // SLACK


def test_more_room_counts_when_it_has_stayed_and_as_much_as_was_there_all_the_time() -> None:
    governor = Governor(2000, HELD)
    for now, room in ((0.0, 1800), (GROW_AFTER_S / 2, 1500), (GROW_AFTER_S - 0.1, 1900)):
        assert governor.look(room, HELD, 0.0, now) == HELD
    assert governor.look(1900, HELD, 0.0, GROW_AFTER_S) == 1500
    assert governor.look(1900, HELD, 0.0, 1.4 * GROW_AFTER_S) == 1500
    assert governor.look(1900, HELD, 0.0, 2 * GROW_AFTER_S) == 1900


def test_time_before_the_room_came_does_not_count() -> None:
    governor = Governor(2000, HELD)
    for k in range(20):
        assert governor.look(HELD + 1, HELD, 0.0, k * GROW_AFTER_S / 4) == HELD
    now = 5 * GROW_AFTER_S
    assert governor.look(1900, HELD, 0.0, now) == HELD
    assert governor.look(1900, HELD, 0.0, now + 0.9 * GROW_AFTER_S) == HELD
    assert governor.look(1900, HELD, 0.0, now + 1.1 * GROW_AFTER_S) == 1900


def test_a_budget_is_likely_when_its_room_has_stayed_for_half_of_the_time() -> None:
    governor = Governor(2000, HELD)
    for k in range(20):
        governor.look(HELD + 1, HELD, 0.0, k * GROW_AFTER_S / 4)
        assert governor.coming(k * GROW_AFTER_S / 4) == HELD
    now = 5 * GROW_AFTER_S
    for after, coming in ((0.0, HELD), (0.3, HELD), (0.6, 1900), (0.9, 1900)):
        assert governor.look(1900, HELD, 0.0, now + after * GROW_AFTER_S) == HELD
        assert governor.coming(now + after * GROW_AFTER_S) == coming
    governor.look(1500, HELD, 0.0, now + 0.95 * GROW_AFTER_S)
    assert governor.coming(now + 0.95 * GROW_AFTER_S) == 1500


def test_a_budget_never_passes_its_most() -> None:
    governor = Governor(1200, HELD)
    governor.look(5000, HELD, 0.0, 0.0)
    assert governor.look(5000, HELD, 0.0, GROW_AFTER_S) == 1200


def test_processes_that_wait_for_memory_shrink_it_unless_there_is_plenty() -> None:
    governor = Governor(2000, HELD)
    governor.look(1100, HELD, 0.0, 0.0)
    assert governor.look(1100, HELD, 0.005, 1.0) == HELD  # a little waiting is no pressure
    assert governor.look(1100, HELD, 0.305, 2.0) < HELD
    plenty = Governor(2000, HELD)
    plenty.look(1900, HELD, 0.0, 0.0)
    assert plenty.look(1900, HELD, 0.9, 1.0) == HELD


def test_room_of_before_a_shrink_does_not_count_as_steady() -> None:
    governor = Governor(2000, HELD)
    governor.look(1500, HELD, 0.0, 0.0)
    less = governor.look(900, HELD, 0.0, 0.8 * GROW_AFTER_S)
    for now in (0.9, 1.0, 1.5, 1.8):
        assert governor.look(1500, less, 0.0, now * GROW_AFTER_S) == less
        assert governor.budget == less
    assert governor.look(1500, less, 0.0, 1.9 * GROW_AFTER_S) == 1500
