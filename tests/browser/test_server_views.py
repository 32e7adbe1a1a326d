"""Test the views of the server's page in node, with stand-ins for the browser and the server."""

import shutil
import subprocess
from pathlib import Path

from tests.support import ROOT


def test_views_of_the_page_in_sequences_of_answers(node: str, tmp_path: Path) -> None:
    for script in (*(ROOT / "edge/serve/page").glob("*.js"), ROOT / "edge/pictures/axes.js"):
        shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    command = [node, str(ROOT / "tests/support/page_views.mjs"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
