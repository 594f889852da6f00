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
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lockstep.data.decoding.decode import decode, is_plain_jpeg
from lockstep.data.index import Index, open_index
from lockstep.data.loading.dali import DaliLoader, import_dali
from lockstep.data.loading.host import HostLoader
from lockstep.data.sources import FOLDER, find_source, find_split, holds_split
from lockstep.recipes import Recipe
from lockstep.recipes.order import training_plans
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


def host(work: Work, index: Index) -> Iterator[int]:
    """Run Lockstep's host loader."""
    with HostLoader(index, size=work.size, antialias=False, threads=work.threads) as loader:
        for batch in loader.batches(training_plans(_recipe(work), index.sizes, 0)):
            yield len(batch.images)


def dali(work: Work, index: Index) -> Iterator[int]:
    """Run Lockstep's DALI loader."""
    with DaliLoader(index, size=work.size, antialias=False, threads=work.threads) as loader:
        for batch in loader.batches(training_plans(_recipe(work), index.sizes, 0)):
            yield len(batch.images)


def dali_fused(work: Work, index: Index) -> Iterator[int]:
    """Run DALI as NVIDIA's systems use it: with its reader and its decoder of random crops."""
    fn, types, pipeline_def = import_dali()

    @pipeline_def(batch_size=work.batch, num_threads=work.threads, device_id=None, seed=1)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(files=_files(index), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=AREA,
            random_aspect_ratio=ASPECT,
            num_attempts=100,
        )
        images = fn.resize(
            images, size=[work.size, work.size], interp_type=types.INTERP_LINEAR, antialias=False
        )
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    built = pipeline()
    built.build()
    while True:
        images, _ = built.run()
        yield len(images)


def torch_pillow(work: Work, index: Index) -> Iterator[int]:
    """Run a PyTorch DataLoader with Pillow and one worker process for each core."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    pictures: Any = Pictures(_files(index), work.size)
    # With replacement: an epoch without an end, as in the other loaders.
    sampler = RandomSampler(pictures, replacement=True, num_samples=2**40)
    loader: DataLoader[Any] = DataLoader(
        pictures, batch_size=work.batch, sampler=sampler, num_workers=work.threads
    )
    torch.set_num_threads(1)
    for images in loader:
        yield len(images)


class Pictures:
    """A map-style dataset of files, opened, cropped, resized and mirrored by Pillow."""

    def __init__(self, files: list[str], size: int) -> None:
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> np.ndarray:
        from PIL import Image

        image = Image.open(self.files[i]).convert("RGB")
        top, left, height, width = _random_window(np.random, image.height, image.width)
        image = image.crop((left, top, left + width, top + height)).resize(
            (self.size, self.size), Image.Resampling.BILINEAR
        )
        if np.random.random() < 0.5:  # noqa: NPY002 - seeded by the DataLoader, one generator for each worker
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.array(image)


def tf_data(work: Work, index: Index) -> Iterator[int]:
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
        image = tf.image.resize(
            tf.image.decode_and_crop_jpeg(data, window, channels=3), [work.size, work.size]
        )
        return tf.image.random_flip_left_right(tf.cast(image, tf.uint8))

    files = _files(index)
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


def libjpeg_whole(work: Work, index: Index) -> Iterator[int]:
    """Decode whole images from memory with libjpeg-turbo, and do nothing else."""
    return _decoding(work, index, lambda data, size, window: decode(data))


def _decoding(work: Work, index: Index, how: Callable[[bytes, Any, Any], object]) -> Iterator[int]:
    files = [index.read(i) for i in range(len(index))]
    sizes = [tuple(size) for size in index.sizes.tolist()]

    def one(samples: list[int], windows: list[list[int]]) -> None:
        for sample, window in zip(samples, windows, strict=True):
            how(files[sample], sizes[sample], tuple(window))

    each = -(-work.batch // (4 * work.threads))
    with ThreadPoolExecutor(work.threads) as pool:
        waiting: list[Any] = []
        for plan in training_plans(_recipe(work), index.sizes, 0):
            starts = range(0, work.batch, each)
            samples = plan.samples.tolist()
            windows = plan.windows.tolist()
            begun = [pool.submit(one, samples[i : i + each], windows[i : i + each]) for i in starts]
            for task in waiting:
                task.result()
            if waiting:
                yield work.batch
            waiting = begun


CONTENDERS: dict[str, Callable[[Work, Index], Iterator[int]]] = {
    "host": host,
    "dali": dali,
    "dali-fused": dali_fused,
    "torch-pillow": torch_pillow,
    "tf-data": tf_data,
    "libjpeg-whole": libjpeg_whole,
}


def _recipe(work: Work) -> Recipe:
    return Recipe(
        global_batch_images=work.batch,
        epochs=100_000,
        crop_area=AREA,
        crop_aspect=ASPECT,
        image_size=work.size,
    )


def _random_window(random: Any, height: int, width: int) -> tuple[int, int, int, int]:
    for _ in range(100):
        area = height * width * random.uniform(*AREA)
        aspect = np.exp(random.uniform(*np.log(ASPECT)))
        rows = round((area / aspect) ** 0.5)
        columns = round((area * aspect) ** 0.5)
        if 0 < rows <= height and 0 < columns <= width:
            return (
                random.randint(0, height - rows + 1),
                random.randint(0, width - columns + 1),
                rows,
                columns,
            )
    return 0, 0, height, width


def _files(index: Index) -> list[str]:
    return [index.path(i) for i in range(len(index))]


def _plain_jpegs(work: Work) -> Index:
    """Return the index of the images that every loader decodes: at most `MOST_IMAGES` and at least
    a batch."""
    data = Path(work.data)
    index = open_index(
        find_split(data, "train") if holds_split(data, "train") else find_source(data)
    )
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


def measured(name: str, work: Work) -> Turn:
    """Measure one turn of a loader in this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.threads])
    batches = CONTENDERS[name](work, _plain_jpegs(work))
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


def _children() -> Iterator[Path]:
    """Yield the folders in /proc of running processes that this process has started."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended in the meantime
            yield from [Path("/proc") / child for child in children.read_text().split()]


def _cpu_sec() -> float:
    """Return the processor time of this process and of those it has started, in seconds."""
    own = time.process_time()
    tick = os.sysconf("SC_CLK_TCK")
    for child in _children():
        fields = (child / "stat").read_text().rpartition(")")[2].split()
        own += (int(fields[11]) + int(fields[12])) / tick
    return own


def _peak_mb() -> float:
    """Return the sum of the peak memory of this process and of those it has started."""
    texts = [
        Path("/proc/self/status").read_text(),
        *((child / "status").read_text() for child in _children()),
    ]
    return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in texts) / 1024


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
    index = _plain_jpegs(work)
    strange = next((i for i in range(len(index)) if not is_plain_jpeg(index.read(i))), None)
    if strange is not None:
        raise DataError(
            f"{index.path(strange)} is not a JPEG that every loader decodes; remove it from the"
            " folder"
        )
    taken: dict[str, list[Turn]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    for turn in range(turns):
        for i, name in enumerate(names):
            if name not in missing:
                result = _in_a_process(name, work)
                if isinstance(result, str):
                    missing[name] = result
                else:
                    taken[name].append(result)
            if progress is not None:
                progress(turn * len(names) + i + 1, turns * len(names))
    results: dict[str, Any] = {name: {"missing": reason} for name, reason in missing.items()}
    for name in names:
        if name not in missing:
            columns = {
                key: [asdict(turn)[key] for turn in taken[name]]
                for key in ("images_per_sec", "cpu_ms", "peak_mb")
            }
            results[name] = {key: round(median(values), 3) for key, values in columns.items()}
            results[name]["turns"] = [round(value, 1) for value in columns["images_per_sec"]]
    return {
        "work": asdict(work),
        "images": len(index),
        "results": {name: results[name] for name in names},
    }


def _in_a_process(name: str, work: Work) -> Turn | str:
    command = [
        sys.executable,
        "-P",
        "-m",
        __name__,
        name,
        json.dumps(asdict(work), allow_nan=False),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Turn(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(
        json.dumps(asdict(measured(sys.argv[1], Work(**json.loads(sys.argv[2])))), allow_nan=False)
    )
    sys.stdout.flush()
    os._exit(0)  # do not wait for the loaders' own threads and workers
