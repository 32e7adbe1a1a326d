"""Fixtures of tests with a page in node."""

from tests.browser.conftest import node  # noqa: F401
