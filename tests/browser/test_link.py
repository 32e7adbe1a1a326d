"""Test a page's link in sequences of events that seeds choose."""

import subprocess

from tests.support import ROOT


def test_replaced_worker_changes_nothing_and_each_command_gets_one_answer_in_order(node: str) -> None:
    """A worker may fail, hang, or send messages after it was replaced."""
    script = str(ROOT / "tests/support/link_sequences.mjs")
    result = subprocess.run([node, script, "300", "60"], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
