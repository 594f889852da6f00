"""The loaders of others, written as their documentation shows, and Lockstep's with augmentations.

DALI and TensorFlow resize without antialiasing, as Lockstep's loaders do here; Pillow always
antialiases. Run with the name of a contender and a task, this measures a turn of it.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.loaders.pillow_operators import apply_operations
from lockstep.benchmark.loader import (
    AREA,
    ASPECT,
    LOADERS,
    Loader,
    Work,
    make_recipe,
    open_images,
    print_turn,
)
from lockstep.data.decoding.decode import decode, is_plain_jpeg
from lockstep.data.index import Index
from lockstep.data.loading.dali import import_dali
from lockstep.data.loading.host import HostLoader
from lockstep.data.loading.loaders import plan_training
from lockstep.data.sources import FOLDER
from lockstep.recipes.augmentations.randaugment import RandAugment
from lockstep.recipes.operations import Operations
from lockstep.system.errors import DataError

PROGRAM = ("-m", "benchmarks.loaders.contenders")
"""The arguments of Python for a process that measures one of `CONTENDERS`."""


def run_host_augmented(augmentation: Operations, work: Work, index: Index) -> Iterator[int]:
    """Run the host loader with an augmentation."""
    recipe = make_recipe(work).replace(augmentations=[augmentation])
    how: dict[str, Any] = {"augmentations": recipe.augmentations, "threads": work.threads}
    with HostLoader(index, antialias=False, **how) as loader:
        for batch in loader.batches(plan_training(index, recipe, 0)):
            yield len(batch.images)


def run_dali_fused(work: Work, index: Index) -> Iterator[int]:
    """Run DALI as NVIDIA's systems use it: with its reader and its decoder of random crops."""
    fn, types, pipeline_def = import_dali()

    def pipeline() -> Any:
        files = list_files(index)
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


def run_dali_dynamic(work: Work, index: Index) -> Iterator[int]:
    """Run DALI's dynamic mode, whose operators are called one by one, with the same decoder."""
    import nvidia.dali.experimental.dynamic as dali  # type: ignore[import-not-found,unused-ignore]

    _, types, _ = import_dali()
    dali.set_num_threads(work.threads)
    files = list_files(index)
    reader = dali.readers.File(files=files, labels=[0] * len(files), random_shuffle=True)
    while True:
        for encoded, _ in reader.next_epoch(batch_size=work.batch):
            images = dali.decoders.image_random_crop(
                encoded,
                device="cpu",
                random_area=AREA,
                random_aspect_ratio=ASPECT,
                num_attempts=100,
            )
            size = [work.size, work.size]
            images = dali.resize(
                images, size=size, interp_type=types.INTERP_LINEAR, antialias=False
            )
            mirrored = dali.random.coin_flip(batch_size=len(encoded.tensors))
            images = dali.as_tensor(dali.flip(images, horizontal=mirrored), pad=False).evaluate()
            yield images.shape[0]


def run_torch_pillow(
    work: Work, index: Index, augmentation: Operations | None = None
) -> Iterator[int]:
    """Run a PyTorch DataLoader with Pillow and one worker process for each core.

    An augmentation draws operations, which Pillow does, one for each of its images.
    """
    return run_torch(work, Pictures(list_files(index), work.size, augmentation))


def run_torch_codec(work: Work, index: Index) -> Iterator[int]:
    """Run the same DataLoader with torchcodec's decoder of JPEGs and PyTorch's resize."""
    return run_torch(work, DecodedTensors(list_files(index), work.size))


def run_torch(work: Work, pictures: Any) -> Iterator[int]:
    """Run a PyTorch DataLoader of a map-style dataset, with one worker process for each core."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler

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
        top, left, height, width = draw_window(np.random, image.height, image.width)
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


class DecodedTensors:
    """A map-style dataset of files, decoded by torchcodec, cropped, resized and mirrored as
    tensors."""

    def __init__(self, files: list[str], size: int) -> None:
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Any:
        import torch
        from torch.nn.functional import interpolate
        from torchcodec.decoders import (  # type: ignore[import-not-found,unused-ignore]
            ImageReadMode,
            decode_jpeg,
        )

        data = torch.from_numpy(np.fromfile(self.files[i], np.uint8))
        image = decode_jpeg(data, mode=ImageReadMode.RGB)
        top, left, height, width = draw_window(np.random, *image.shape[1:])
        image = image[None, :, top : top + height, left : left + width]
        image = interpolate(image, size=(self.size, self.size), mode="bilinear")[0]
        return image.flip(-1) if np.random.random() < 0.5 else image  # noqa: NPY002


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

    files = list_files(index)
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
        for plan in plan_training(index, make_recipe(work), 0):
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
CONTENDERS: dict[str, Loader] = {
    **LOADERS,
    "dali-fused": run_dali_fused,
    "dali-dynamic": run_dali_dynamic,
    "torch-pillow": run_torch_pillow,
    "torchcodec": run_torch_codec,
    "tf-data": run_tf_data,
    "libjpeg-whole": run_libjpeg,
}
for name, augmentation in AUGMENTATIONS.items():
    CONTENDERS[f"host-{name}"] = partial(run_host_augmented, augmentation)
    CONTENDERS[f"torch-pillow-{name}"] = partial(run_torch_pillow, augmentation=augmentation)


def draw_window(random: Any, height: int, width: int) -> tuple[int, int, int, int]:
    for _ in range(100):
        area = height * width * random.uniform(*AREA)
        aspect = np.exp(random.uniform(*np.log(ASPECT)))
        rows = round((area / aspect) ** 0.5)
        columns = round((area * aspect) ** 0.5)
        if 0 < rows <= height and 0 < columns <= width:
            top = random.randint(0, height - rows + 1)
            return top, random.randint(0, width - columns + 1), rows, columns
    return 0, 0, height, width


def list_files(index: Index) -> list[str]:
    return [index.path(i) for i in range(len(index))]


def check_images(work: Work) -> None:
    """Raise `DataError` if an image is not one that every loader decodes."""
    index = open_images(work)
    if index.source.format != FOLDER:
        raise DataError(
            f"{work.data} is not an image folder, which every loader reads; use lockstep data pack"
            f" {work.data} DIR --format folder"
        )
    strange = next((i for i in range(len(index)) if not is_plain_jpeg(index.read(i))), None)
    if strange is not None:
        raise DataError(
            f"{index.path(strange)} is not a JPEG that every loader decodes; remove it from the"
            " folder"
        )


if __name__ == "__main__":
    print_turn(CONTENDERS)
