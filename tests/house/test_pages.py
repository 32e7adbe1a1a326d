"""Test that generated pages are up to date."""

from tools import api_page


def test_the_reference_of_the_python_api_is_up_to_date() -> None:
    assert api_page.PAGE.read_text() == api_page.page(), "docs/api.md is out of date: run `make pages`"


def test_the_reference_shows_signatures_as_they_are_written() -> None:
    text = api_page.PAGE.read_text()
    assert '    draft: PathLike = "off",\n' in text
    assert "\n- `addresses: tuple[str, ...]`: HOST:PORT of each worker." in text  # a property
    assert "### NotEnoughMemory\n\nA kind of `" in text
