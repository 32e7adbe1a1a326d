"""Find the position at which a loop of tokens is detected first."""

from collections.abc import Iterable

from edge.text.repetition import Repetition, RepetitionDetector


def first_loop(tokens: Iterable[int]) -> tuple[int, Repetition] | None:
    """The number of tokens after which a loop is noticed, and the loop; None where there is none."""
    detector = RepetitionDetector()
    for count, token in enumerate(tokens, 1):
        if (loop := detector.add(token)) is not None:
            return count, loop
    return None
