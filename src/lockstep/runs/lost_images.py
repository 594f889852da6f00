"""Images that a run did not have because a read failed, or because of an older version."""

from pathlib import Path

from lockstep.data.inspection import FAILURES
from lockstep.data.listing import list_images
from lockstep.data.sources import find_url
from lockstep.data.split import find_run_sources
from lockstep.recipes import load_recipe
from lockstep.runs.environment import Images, read_environment
from lockstep.runs.resuming import find_last_data
from lockstep.system.errors import CheckpointError, DataError
from lockstep.system.text import format_count


def list_lost_images(run: Path) -> list[str]:
    """Return lines on images that the run in a folder left out because the system failed to read
    them, and on additional images in its data set.

    Raises `CheckpointError` if it is not a run's folder.
    """
    environment = read_environment(run)
    if not environment:
        raise CheckpointError(f"{run} is not the folder of a run that has begun")
    lines: list[str] = []
    count = 0
    validation: Images = environment.get("val", {})
    for name, images in (("train", environment.get("train", {})), ("val", validation)):
        quarantined = images.get("quarantined", [])
        count += images.get("images", 0) + len(quarantined)
        failed = [bad for bad in quarantined if bad["reason"] in FAILURES]
        lines += [f"{name}: {bad['file']} was left out: {bad['reason']}" for bad in failed]
    more = _count_images(run, validates=validation.get("images", 0) > 0) - count
    if more > 0:
        lines.append(
            f"the data set has {format_count(more, 'image')} that the run did not have: new, or"
            " missing at the time"
        )
    return lines


def _count_images(run: Path, *, validates: bool) -> int:
    """Return how many images the data set of a run has, good and bad; 0 if it is missing, or in
    a store."""
    count = 0
    try:
        data = find_last_data(run)
        if find_url(data) is None:
            division = load_recipe(run / "recipe.yaml").division
            for source in find_run_sources(data, division, validates=validates).sources:
                listing = list_images(source)
                count += len(listing) + len(listing.damaged)
    except (DataError, CheckpointError):  # also of a folder that nobody trusts
        return 0
    return count
