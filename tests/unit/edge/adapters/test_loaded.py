"""Scales of adapters: an interrupted change leaves nothing known, so that the next request sets them again."""

import pytest

from edge.adapters.adapter import Scales
from edge.adapters.loaded import EngineAdapters


@pytest.mark.parametrize("then", ["old", "new"])
def test_interrupted_change_of_scales_is_made_again_whichever_scales_follow(then: str) -> None:
    before, after = (1.0,), (0.5,)
    used: list[Scales] = []
    interrupts = [False]

    def use(scales: Scales) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt
        used.append(scales)

    adapters = EngineAdapters((), use)
    adapters.use(before)
    adapters.use(before)
    assert used == [before]
    interrupts[0] = True
    with pytest.raises(KeyboardInterrupt):
        adapters.use(after)
    interrupts[0] = False
    scales = before if then == "old" else after
    adapters.use(scales)
    assert used == [before, scales]
    assert adapters.scales == scales
