"""Test that generated pages are up to date."""

import re

from apps.cli import build_parser
from tests.support import ROOT
from tools import api_page


def test_the_reference_of_the_python_api_is_up_to_date() -> None:
    assert api_page.PAGE.read_text() == api_page.page(), "docs/api.md is out of date: run `make pages`"


def test_the_reference_shows_signatures_as_they_are_written() -> None:
    text = api_page.PAGE.read_text()
    assert '    draft: PathLike = "off",\n' in text
    assert "\n- `addresses: tuple[str, ...]`: HOST:PORT of each worker." in text  # a property
    assert "### NotEnoughMemory\n\nA kind of `" in text


def test_the_manifest_for_kubernetes_has_options_that_exist_and_time_to_drain() -> None:
    text = (ROOT / "docs" / "kubernetes.yaml").read_text()
    command, grace_s, port = (
        re.search(pattern, text) for pattern in (r"args: \[edge, (.*)\]", r"GracePeriodSeconds: (\d+)", r"Port: (\d+)}")
    )
    assert command is not None
    assert grace_s is not None
    assert port is not None
    options = build_parser().parse_args(command[1].replace('"', "").split(", "))
    assert int(grace_s[1]) > options.drain
    assert options.port == int(port[1])
