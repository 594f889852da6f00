"""What is known about a data set from its index."""

from typing import Any

import numpy as np

from lockstep.data.index import Index


def facts(index: Index) -> dict[str, Any]:
    """Return counts, bytes, sizes in pixels and images by class, as plain values."""
    shorter = index.sizes.min(axis=1)
    counts = np.bincount(index.rows["label"], minlength=len(index.classes)).tolist()
    return {
        "format": index.source.format,
        "files": len(index.source.files) or len(index),
        "images": len(index),
        "bytes": int(index.rows["length"].sum(dtype=np.int64)),
        "quarantined": len(index.quarantined),
        "shorter_side": {"least": int(shorter.min()), "median": int(np.median(shorter)), "most": int(shorter.max())},
        "images_by_class": dict(zip(index.classes, counts, strict=True)),
        "digest": index.digest,
    }
