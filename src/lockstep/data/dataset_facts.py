"""Facts about a data set, from its index."""

import os
from typing import Any

import numpy as np

from lockstep.data.index import Index
from lockstep.data.sources import FOLDER


def facts(index: Index) -> dict[str, Any]:
    """Return counts, bytes, sizes in pixels and images by class, as plain values.

    In names of classes, bytes that are not UTF-8 are written as in `\\xff`.
    """
    shorter = index.sizes.min(axis=1)
    counts = np.bincount(index.rows["label"], minlength=len(index.classes)).tolist()
    # Such names cannot be printed or written as JSON. Replacing the bytes could make two names
    # equal.
    names = [os.fsencode(name).decode(errors="backslashreplace") for name in index.classes]
    return {
        "format": index.source.format,
        "files": len(index) if index.source.format == FOLDER else len(index.source.files),
        "images": len(index),
        "bytes": int(index.rows["length"].sum(dtype=np.int64)),
        "quarantined": len(index.quarantined),
        "shorter_side": {
            "least": int(shorter.min()),
            "median": int(np.median(shorter)),
            "most": int(shorter.max()),
        },
        "images_by_class": dict(zip(names, counts, strict=True)),
        "digest": index.digest,
    }
