"""The version of Lockstep."""

from importlib import metadata

DISTRIBUTION = "lockstep-vision"
SOURCE_TREE = "0+source"
"""The version of a source tree that is not installed."""


def version() -> str:
    """Return the installed version; `SOURCE_TREE` if Lockstep runs from a source tree that is not
    installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return SOURCE_TREE
