"""Which version this is."""

from __future__ import annotations


def own_version() -> str:
    """Of the installed distribution; "unknown" when it runs from a bare source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("virial")
    except PackageNotFoundError:
        return "unknown"
