"""A browser's page in node computes trained weights as native llama.cpp does."""

from pathlib import Path

import numpy as np

from tests.browser.conftest import Open, node, open_page  # noqa: F401
from tests.browser.test_page import SIZES, decode, natively

TOKENS = [504, 3575, 282, 4649, 314, 7042, 30, 669, 314, 260, 3575, 282]


def test_logits_of_trained_weights_equal_native_ones(open_page: Open, smollm2: Path, tmp_path: Path) -> None:  # noqa: F811
    bridge = open_page(tmp_path)
    name, _ = bridge.send_file(smollm2)
    bridge.call("load", file=name, **SIZES)
    native, page = natively(smollm2, TOKENS), decode(bridge, TOKENS)
    # Trained weights in Q4_1 amplify the last bits, natively, too: between flash attention on and off.
    usual = natively(smollm2, TOKENS, flash="on") - native
    assert np.abs(page - native).mean() < np.abs(usual).mean()
    assert np.abs(page - native).max() < 1.5 * np.abs(usual).max()
