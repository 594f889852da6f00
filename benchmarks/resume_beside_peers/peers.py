"""The libraries whose loaders are resumed, each as its documentation advises."""

import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

IMAGES = 240
SHARDS = 12
BATCH = 8
SAVE_EVERY = 4
Batches = Iterable[tuple[list[int], list[int]]]
"""The numbers and the checksums of pixels of the images of each batch."""
Loader = tuple[Batches, Callable[[], Any]]
"""The batches from where a state was saved, and what returns the state."""


@dataclass(frozen=True)
class Library:
    """What is resumed."""

    packages: tuple[str, ...]
    """Those whose versions are recorded."""
    modules: tuple[str, ...]
    """Those that are imported once for all launches."""
    open: Any
    """Returns the `Loader` of a launch, a rank and the states of all ranks of the last launch."""
    prepare: Callable[[Path], None] | None = None
    """Writes the images in the library's own format."""


@dataclass(frozen=True)
class Launch:
    """One start of a loader, in a process for each rank."""

    peer: str
    data: Path
    folder: Path
    seed: int
    number: int = 0
    ranks: int = 1
    workers: int = 2
    first_step: int = 0
    kill_step: int = 0

    @property
    def batch(self) -> int:
        return BATCH // self.ranks

    def find(self, number: int) -> Path:
        """Return the folder of what a launch of this run writes."""
        return self.folder / f"launch-{number}"

    def list_files(self) -> list[str]:
        """Return the paths of the images, in the order of their numbers."""
        return sorted(map(str, (self.data / "images").rglob("*.jpg")))


def crop(content: bytes) -> int:
    """Return the checksum of a random window, drawn by PyTorch's generator of the process."""
    import torch

    image = Image.open(BytesIO(content))
    top, left, height, width = torch.rand(4).tolist()
    size = (0.4 + 0.6 * width) * image.width, (0.4 + 0.6 * height) * image.height
    corner = left * (image.width - size[0]), top * (image.height - size[1])
    box = (*corner, corner[0] + size[0], corner[1] + size[1])
    return zlib.crc32(image.resize((32, 32), Image.Resampling.BILINEAR, box=box).tobytes())


def read_tensors(loader: Iterable[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the batches of a loader of dictionaries of tensors."""
    for batch in loader:
        yield batch["number"].tolist(), batch["pixels"].tolist()


def crop_sample(sample: dict[str, Any]) -> dict[str, int]:
    """Return an image's number and the checksum of a random window of it."""
    return {"number": sample["number"], "pixels": crop(sample["jpeg"])}


def list_samples(data: Path) -> Iterator[dict[str, Any]]:
    """Yield the images with their numbers."""
    for number, path in enumerate(sorted((data / "images").rglob("*.jpg"))):
        yield {"number": number, "jpeg": path.read_bytes()}


def prepare_litdata(data: Path) -> None:
    import litdata

    litdata.optimize(
        fn=dict,
        inputs=list(list_samples(data)),
        output_dir=str(data / "litdata"),
        num_workers=1,
        chunk_size=IMAGES // SHARDS,
    )


def open_litdata(launch: Launch, rank: int, states: list[Any]) -> Loader:
    """LitData's loader, whose state holds for other numbers of ranks and workers:
    https://github.com/Lightning-AI/litData#pause-resume"""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        f"{launch.data}/litdata",
        shuffle=True,
        seed=launch.seed,
        drop_last=False,
        transform=crop_sample,
    )
    loader = StreamingDataLoader(dataset, num_workers=launch.workers, batch_size=launch.batch)
    if states:
        loader.load_state_dict(states[0])
    return read_tensors(loader), loader.state_dict


def prepare_mosaic(data: Path) -> None:
    from streaming import MDSWriter

    size = max(len(sample["jpeg"]) for sample in list_samples(data)) * IMAGES // SHARDS
    columns = {"number": "int", "jpeg": "bytes"}
    with MDSWriter(out=str(data / "mosaic"), columns=columns, size_limit=size) as writer:
        for sample in list_samples(data):
            writer.write(sample)


def open_mosaic(launch: Launch, rank: int, states: list[Any]) -> Loader:
    """MosaicML Streaming's loader, whose state is that of rank 0:
    https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/fast_resumption.html
    https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/elastic_determinism.html
    """
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Crops(StreamingDataset):
        def __getitem__(self, at: int) -> Any:
            return crop_sample(super().__getitem__(at))

    clean_stale_shared_memory()
    dataset = Crops(
        local=f"{launch.data}/mosaic",
        shuffle=True,
        shuffle_seed=launch.seed,
        batch_size=launch.batch,
        num_canonical_nodes=1,
    )
    loader = StreamingDataLoader(dataset, batch_size=launch.batch, num_workers=launch.workers)
    if states:
        loader.load_state_dict(states[0])
    return read_tensors(loader), loader.state_dict


def replace_torchvision() -> None:
    """Put empty modules where MosaicML Streaming imports torchvision, for classes that are not used
    here: PyPI's torchvision does not fit PyTorch's build for CPUs."""
    names = ("", ".datasets", ".transforms", ".transforms.functional")
    for name in (f"torchvision{name}" for name in names):
        spec = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module_from_spec(spec)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


def prepare_datasets(data: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list(list(list_samples(data)))
    for shard in range(SHARDS):
        whole.shard(SHARDS, shard, contiguous=True).to_parquet(
            str(data / "datasets" / f"{shard:02}.parquet")
        )


def open_datasets(launch: Launch, rank: int, states: list[Any], buffer: int = 1) -> Loader:
    """A streamed data set in the loader that its documentation names, its shards in random order:
    https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration

    With a `buffer` of 1 nothing is lost from it. With the default of max_buffer_input_shards, the
    state of a shuffled data set cannot be loaded (IndexError). States are those of a rank; nothing
    is documented for another number of them.
    """
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = f"{launch.data}/datasets/*.parquet"
    dataset = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(launch.folder)
    )
    dataset = dataset.shuffle(seed=launch.seed, buffer_size=buffer, max_buffer_input_shards=1)
    dataset = split_dataset_by_node(dataset, rank=rank, world_size=launch.ranks)
    dataset = dataset.map(crop_sample, remove_columns=["jpeg"])
    return open_stateful(StatefulDataLoader, dataset, launch, rank, states)


def open_shuffled_datasets(launch: Launch, rank: int, states: list[Any]) -> Loader:
    """The same with a buffer, whose content is lost, as documented."""
    return open_datasets(launch, rank, states, buffer=32)


def open_stateful(
    kind: Any, dataset: Any, launch: Launch, rank: int, states: list[Any], **more: Any
) -> Loader:
    """Open torchdata's loader with the state of the rank, or of another one for a new rank."""
    loader = kind(dataset, batch_size=launch.batch, num_workers=launch.workers, **more)
    if states:
        loader.load_state_dict(states[rank % len(states)])
    return read_tensors(loader), loader.state_dict


class Photos:
    """Images by number. The state of the worker's random generator is saved, as advised:
    https://docs.pytorch.org/data/0.11/stateful_dataloader_tutorial.html"""

    def __init__(self, launch: Launch) -> None:
        self._files = launch.list_files()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"number": number, "pixels": crop(Path(self._files[number]).read_bytes())}

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import torch

        torch.set_rng_state(state["generator"])


def open_torchdata(launch: Launch, rank: int, states: list[Any]) -> Loader:
    """PyTorch's stateful loader with its sampler of ranks, shuffled. States are those of a rank;
    nothing is documented for another number of them."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    photos = Photos(launch)
    sampler = StatefulDistributedSampler(photos, launch.ranks, rank, seed=launch.seed)
    return open_stateful(StatefulDataLoader, photos, launch, rank, states, sampler=sampler)


def open_dali(launch: Launch, rank: int, states: list[Any]) -> Loader:
    """A pipeline of DALI with checkpoints; another pipeline than the saved one is undefined:
    https://docs.nvidia.com/deeplearning/dali/user-guide/docs/advanced_topics_checkpointing.html"""
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(enable_checkpointing=True)
    def read_and_crop() -> Any:
        jpegs, numbers = fn.readers.file(
            files=launch.list_files(),
            labels=list(range(IMAGES)),
            random_shuffle=True,
            initial_fill=64,
            shard_id=rank,
            num_shards=launch.ranks,
            name="reader",
        )
        images = fn.decoders.image_random_crop(jpegs)
        return fn.resize(images, resize_x=32, resize_y=32), numbers

    pipeline = read_and_crop(
        batch_size=launch.batch,
        num_threads=launch.workers,
        device_id=None,
        seed=launch.seed,
        checkpoint=states[rank % len(states)] if states else None,
    )
    policy = LastBatchPolicy.PARTIAL
    names = ["images", "numbers"]
    iterator = DALIGenericIterator(
        [pipeline], names, reader_name="reader", last_batch_policy=policy
    )

    def read() -> Iterator[tuple[list[int], list[int]]]:
        for (batch,) in iterator:
            sums = [zlib.crc32(image.numpy().tobytes()) for image in batch["images"]]
            yield batch["numbers"].flatten().tolist(), sums

    return read(), lambda: iterator.checkpoints()[0]


def train(launch: Launch, rank: int, folder: Path) -> None:
    """Train with Lockstep, and log what its loader gives to the engine."""
    import lockstep
    from lockstep.data.loading.host import HostLoader
    from lockstep.models.architectures import ModelSpec

    load = HostLoader.batches

    def log_batches(loader: HostLoader, plans: Iterable[Any]) -> Iterator[Any]:
        rows: list[list[int]] = []

        def note(plans: Iterable[Any]) -> Iterator[Any]:
            for plan in plans:
                rows.append(plan.samples.tolist())
                yield plan

        step = launch.first_step
        with (folder / f"log-{rank}").open("w", buffering=1) as log:
            for batch in load(loader, note(plans)):
                if step == launch.kill_step > 0 and rank == 0:
                    os.killpg(0, signal.SIGKILL)
                step += 1
                sums = [zlib.crc32(image.tobytes()) for image in batch.images]
                log.write(json.dumps([step, rows.pop(0), sums]) + "\n")
                yield batch

    HostLoader.batches = log_batches  # type: ignore[method-assign]
    model = ModelSpec(block="basic", layers=(1, 1, 1, 1), widths=(8, 8, 16, 16), expansion=1)
    changes = {"model": model, "epochs": 1, "warmup_epochs": 0, "lr": 0.01, "seed": launch.seed}
    recipe = lockstep.load_recipe("demo").replace(global_batch_images=BATCH, **changes)
    execution = lockstep.Execution(
        save_every_steps=SAVE_EVERY, loader_threads=launch.workers, train_only=True
    )
    lockstep.train(recipe, launch.data / "images", launch.folder / "run", execution=execution)


STATEFUL = "torchdata.stateful_dataloader"
PEERS = {
    "lockstep": Library((), ("torch", "lockstep.runs.train"), None),
    "litdata": Library(("litdata",), ("litdata",), open_litdata, prepare_litdata),
    "mosaic": Library(("mosaicml-streaming",), ("streaming",), open_mosaic, prepare_mosaic),
    "dali": Library(("nvidia-dali-cuda120",), ("torch", "nvidia.dali.plugin.pytorch"), open_dali),
    "torchdata": Library(("torchdata",), (STATEFUL,), open_torchdata),
    "datasets": Library(
        ("datasets", "torchdata"), ("datasets", STATEFUL), open_datasets, prepare_datasets
    ),
    "datasets-buffer": Library(
        ("datasets", "torchdata"), ("datasets", STATEFUL), open_shuffled_datasets, prepare_datasets
    ),
}
