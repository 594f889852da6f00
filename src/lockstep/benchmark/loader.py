"""Compare loaders: the same JPEGs, the same cores, the same output. Loaders alternate; each turn is
a separate process.

All yield batches of uint8 RGB [N, size, size, 3]. From every image they take a random window of 8
to 100 % of its area, resize it bilinearly and mirror it half the time. Lockstep's loaders, DALI and
TensorFlow resize without antialiasing; Pillow always antialiases. The loaders of others are written
as their documentation shows.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lockstep.benchmark.pillow_operators import apply_operations
from lockstep.data.decoding.decode import decode, is_plain_jpeg
from lockstep.data.index import Index, open_index
from lockstep.data.loading.dali import DaliLoader, import_dali
from lockstep.data.loading.host import HostLoader
from lockstep.data.loading.loaders import plan_training
from lockstep.data.sources import FOLDER, find_source, find_split, holds_split
from lockstep.recipes import Recipe
from lockstep.recipes.augmentations.randaugment import RandAugment
from lockstep.recipes.operations import Operations
from lockstep.system.errors import DataError, nearest
from lockstep.system.machine import cores

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
WARMUP_BATCHES = 3
MOST_IMAGES = 4096
"""At most this many images are taken from a data set; some loaders hold them in memory."""


@dataclass(frozen=True)
class Work:
    """The task of every loader."""

    data: str
    threads: int
    batch: int
    size: int
    seconds: float
    """Length of a turn after the first batches, in seconds."""


@dataclass(frozen=True)
class Turn:
    """The result of one turn."""

    images_per_sec: float
    cpu_ms: float
    """Processor time of an image on all cores together. It stays comparable on a machine that also
    does other things."""
    peak_mb: float
    """Peak use of main memory."""


def run_ours(kind: type[HostLoader] | type[DaliLoader], work: Work, index: Index) -> Iterator[int]:
    """Run a loader of Lockstep."""
    with kind(index, antialias=False, threads=work.threads) as loader:
        for batch in loader.batches(plan_training(index, _make_recipe(work), 0)):
            yield len(batch.images)


def run_host_augmented(augmentation: Operations, work: Work, index: Index) -> Iterator[int]:
    """Run the host loader with an augmentation."""
    recipe = _make_recipe(work).replace(augmentations=[augmentation])
    how: dict[str, Any] = {"augmentations": recipe.augmentations, "threads": work.threads}
    with HostLoader(index, antialias=False, **how) as loader:
        for batch in loader.batches(plan_training(index, recipe, 0)):
            yield len(batch.images)


def run_dali_fused(work: Work, index: Index) -> Iterator[int]:
    """Run DALI as NVIDIA's systems use it: with its reader and its decoder of random crops."""
    fn, types, pipeline_def = import_dali()

    def pipeline() -> Any:
        files = _list_files(index)
        encoded, labels = fn.readers.file(files=files, random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=AREA,
            random_aspect_ratio=ASPECT,
            num_attempts=100,
        )
        size = [work.size, work.size]
        images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=False)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    size = {"batch_size": work.batch, "num_threads": work.threads}
    built = pipeline_def(pipeline, **size, device_id=None, seed=1)()
    built.build()
    while True:
        images, _ = built.run()
        yield len(images)


def run_torch_pillow(
    work: Work, index: Index, augmentation: Operations | None = None
) -> Iterator[int]:
    """Run a PyTorch DataLoader with Pillow and one worker process for each core.

    An augmentation draws operations, which Pillow does, one for each of its images.
    """
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    pictures: Any = Pictures(_list_files(index), work.size, augmentation)
    # With replacement: an epoch without an end, as in the other loaders.
    sampler = RandomSampler(pictures, replacement=True, num_samples=2**40)
    loader: DataLoader[Any] = DataLoader(
        pictures, batch_size=work.batch, sampler=sampler, num_workers=work.threads
    )
    torch.set_num_threads(1)
    for images in loader:
        yield len(images)


class Pictures:
    """A map-style dataset of files, opened, cropped, resized, mirrored and augmented by Pillow."""

    def __init__(self, files: list[str], size: int, augmentation: Operations | None) -> None:
        self.files = files
        self.size = size
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> np.ndarray:
        from PIL import Image

        image = Image.open(self.files[i]).convert("RGB")
        top, left, height, width = _draw_window(np.random, image.height, image.width)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        # The DataLoader seeds this generator, another one in each worker.
        if np.random.random() < 0.5:  # noqa: NPY002
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.augmentation is not None:
            numbers = np.random.random(self.augmentation.numbers).tolist()  # noqa: NPY002
            operations = self.augmentation.draw(numbers)
            image = apply_operations(image, operations, self.augmentation.fill)
        return np.array(image)


def run_tf_data(work: Work, index: Index) -> Iterator[int]:
    """Run tf.data with TensorFlow's fused decoding and cropping."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf  # type: ignore[import-untyped,import-not-found,unused-ignore]

    def load(path: Any) -> Any:
        data = tf.io.read_file(path)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            tf.zeros([1, 0, 4]),
            min_object_covered=0.1,
            area_range=AREA,
            aspect_ratio_range=ASPECT,
            max_attempts=100,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.image.decode_and_crop_jpeg(data, window, channels=3)
        image = tf.image.resize(image, [work.size, work.size])
        return tf.image.random_flip_left_right(tf.cast(image, tf.uint8))

    files = _list_files(index)
    options = tf.data.Options()
    options.threading.private_threadpool_size = work.threads
    options.threading.max_intra_op_parallelism = 1
    data = (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(len(files))
        .repeat()
        .map(load, num_parallel_calls=work.threads)
    )
    for images in data.batch(work.batch).prefetch(2).with_options(options):
        yield len(images)


def run_libjpeg(work: Work, index: Index) -> Iterator[int]:
    """Decode whole images from memory with libjpeg-turbo, and do nothing else."""
    files = [index.read(i) for i in range(len(index))]

    def decode_all(samples: list[int]) -> None:
        for sample in samples:
            decode(files[sample])

    size = -(-work.batch // (4 * work.threads))
    with ThreadPoolExecutor(work.threads) as pool:
        waiting: list[Any] = []
        for plan in plan_training(index, _make_recipe(work), 0):
            samples = plan.samples.tolist()
            parts = [samples[i : i + size] for i in range(0, work.batch, size)]
            tasks = [pool.submit(decode_all, part) for part in parts]
            for task in waiting:
                task.result()
            if waiting:
                yield work.batch
            waiting = tasks


AUGMENTATIONS: dict[str, Operations] = {
    "randaugment": RandAugment(interpolation="bilinear"),
    "timm-randaugment": RandAugment(
        dialect="timm", magnitude=7, magnitude_std=0.5, increasing=True
    ),
}
"""What the loaders with an augmentation do: as torchvision's training script does with its default
magnitude, and timm's `rand-m7-mstd0.5-inc1`."""
CONTENDERS: dict[str, Callable[[Work, Index], Iterator[int]]] = {
    "host": partial(run_ours, HostLoader),
    "dali": partial(run_ours, DaliLoader),
    "dali-fused": run_dali_fused,
    "torch-pillow": run_torch_pillow,
    "tf-data": run_tf_data,
    "libjpeg-whole": run_libjpeg,
}
for _name, _augmentation in AUGMENTATIONS.items():
    CONTENDERS[f"host-{_name}"] = partial(run_host_augmented, _augmentation)
    CONTENDERS[f"torch-pillow-{_name}"] = partial(run_torch_pillow, augmentation=_augmentation)


def _make_recipe(work: Work) -> Recipe:
    return Recipe(
        global_batch_images=work.batch,
        epochs=100_000,
        crop_area=AREA,
        crop_aspect=ASPECT,
        image_size=work.size,
    )


def _draw_window(random: Any, height: int, width: int) -> tuple[int, int, int, int]:
    for _ in range(100):
        area = height * width * random.uniform(*AREA)
        aspect = np.exp(random.uniform(*np.log(ASPECT)))
        rows = round((area / aspect) ** 0.5)
        columns = round((area * aspect) ** 0.5)
        if 0 < rows <= height and 0 < columns <= width:
            top = random.randint(0, height - rows + 1)
            return top, random.randint(0, width - columns + 1), rows, columns
    return 0, 0, height, width


def _list_files(index: Index) -> list[str]:
    return [index.path(i) for i in range(len(index))]


def _open_images(work: Work) -> Index:
    """Return the index of the images that every loader decodes: at most `MOST_IMAGES` and at least
    a batch."""
    data = Path(work.data)
    has_split = holds_split(data, "train")
    index = open_index(find_split(data, "train") if has_split else find_source(data))
    if index.source.format != FOLDER:
        raise DataError(
            f"{data} is not an image folder, which every loader reads; use lockstep data pack"
            f" {data} DIR --format folder"
        )
    index = replace(index, rows=index.rows[:MOST_IMAGES])
    if len(index) < work.batch:
        raise DataError(
            f"{data} has {len(index)} images, fewer than a batch; use --batch {len(index)}"
        )
    return index


def measure(name: str, work: Work) -> Turn:
    """Measure one turn of a loader in this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.threads])
    batches = CONTENDERS[name](work, _open_images(work))
    for _ in range(WARMUP_BATCHES):
        next(batches)
    began = time.perf_counter()
    cpu_began = _cpu_sec()
    images = 0
    while time.perf_counter() - began < work.seconds:
        images += next(batches)
    wall = time.perf_counter() - began
    cpu = _cpu_sec() - cpu_began
    return Turn(images / wall, 1000 * cpu / images, _peak_mb())


def _list_children() -> Iterator[Path]:
    """Yield the folders in /proc of running processes that this process has started."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended in the meantime
            yield from [Path("/proc") / child for child in children.read_text().split()]


def _cpu_sec() -> float:
    """Return the processor time of this process and of those it has started, in seconds."""
    own = time.process_time()
    tick = os.sysconf("SC_CLK_TCK")
    for child in _list_children():
        fields = (child / "stat").read_text().rpartition(")")[2].split()
        own += (int(fields[11]) + int(fields[12])) / tick
    return own


def _peak_mb() -> float:
    """Return the sum of the peak memory of this process and of those it has started."""
    kilobytes = 0
    for folder in (Path("/proc/self"), *_list_children()):
        text = (folder / "status").read_text()
        kilobytes += int(text.partition("VmHWM:")[2].split()[0])
    return kilobytes / 1024


def compare(
    names: list[str], work: Work, turns: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return the turns of every loader and their median, or why it cannot run.

    Raises `DataError` for an unknown name, or data that not every loader reads.
    """
    for name in names:
        if name not in CONTENDERS:
            raise DataError(f"there is no loader {name!r} to measure. {nearest(name, CONTENDERS)}")
    if work.threads > cores():
        raise DataError(f"{work.threads} threads are more than the {cores()} cores of this machine")
    index = _open_images(work)
    strange = next((i for i in range(len(index)) if not is_plain_jpeg(index.read(i))), None)
    if strange is not None:
        raise DataError(
            f"{index.path(strange)} is not a JPEG that every loader decodes; remove it from the"
            " folder"
        )
    done: dict[str, list[Turn]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    for number in range(turns * len(names)):
        name = names[number % len(names)]
        if name not in missing:
            result = _measure_in_process(name, work)
            if isinstance(result, str):
                missing[name] = result
            else:
                done[name].append(result)
        if progress is not None:
            progress(number + 1, turns * len(names))
    results: dict[str, Any] = {}
    for name in names:
        results[name] = {"missing": missing[name]} if name in missing else _summarise(done[name])
    return {"work": asdict(work), "images": len(index), "results": results}


def _summarise(turns: list[Turn]) -> dict[str, Any]:
    """Return the medians of turns, and their speeds."""
    speeds = [turn.images_per_sec for turn in turns]
    return {
        "images_per_sec": round(median(speeds), 3),
        "cpu_ms": round(median(turn.cpu_ms for turn in turns), 3),
        "peak_mb": round(median(turn.peak_mb for turn in turns), 3),
        "turns": [round(speed, 1) for speed in speeds],
    }


def _measure_in_process(name: str, work: Work) -> Turn | str:
    task = json.dumps(asdict(work), allow_nan=False)
    command = [sys.executable, "-P", "-m", __name__, name, task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Turn(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    result = measure(sys.argv[1], Work(**json.loads(sys.argv[2])))
    print(json.dumps(asdict(result), allow_nan=False))
    sys.stdout.flush()
    os._exit(0)  # do not wait for the loaders' own threads and workers
