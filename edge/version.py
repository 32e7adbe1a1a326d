"""Versions of what is installed."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version


def version(package: str) -> str:
    """The version of an installed package; "unknown" in a checkout that is not installed."""
    try:
        return _version(package)
    except PackageNotFoundError:
        return "unknown"
