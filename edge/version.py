"""Version of an installed package."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version


def version(package: str) -> str:
    """Return the version of an installed package; "unknown" in a checkout that is not installed."""
    try:
        return _version(package)
    except PackageNotFoundError:
        return "unknown"
