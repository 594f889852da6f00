"""Fine-tuning as people do it, one contender a process: Lockstep, PyTorch's tutorial, timm, fastai
and Ultralytics. `fine_tune.py` starts this file.

Each takes the same weights (a state dict in torchvision's names), the same folders `train/<class>`
and `val/<class>` and an image size (Lockstep takes that of the weights), and has its own defaults
otherwise. After each evaluation it appends a line to `--out`: seconds since `--began` and the share
of validation images that are right.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TUTORIAL_EPOCHS = 25
"""Of PyTorch's tutorial, and for want of another number also of timm and Ultralytics, whose
defaults of 300 and 100 epochs mean a training from scratch."""
FASTAI_EPOCHS = 10
MISSING_OPERATORS = ("nms", "qnms")
"""What torchvision looks for when it is imported and its CPU-only companion does not have."""

Report = Callable[[float], None]
Job = argparse.Namespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=sorted(CONTENDERS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="A state dict of torchvision.")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, required=True, help="Image size in pixels.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="File of JSON lines.")
    parser.add_argument("--began", type=float, required=True, help="time.time() at the start.")
    job = parser.parse_args()
    torch.manual_seed(job.seed)
    if job.contender != "lockstep":
        declare_operators()
    job.classes = len([folder for folder in (job.data / "train").iterdir() if folder.is_dir()])

    def report(accuracy: float) -> None:
        line = {"seconds": round(time.time() - job.began, 2), "top1_percent": 100 * accuracy}
        with job.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    CONTENDERS[job.contender](job, report)


def declare_operators() -> None:
    """Declare what torchvision asks for, so that it can be imported beside a torch without it."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in MISSING_OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # its operators vanish with it


def load_model(job: Job, classes: int | None = None) -> torch.nn.Module:
    """Return torchvision's model with the given weights and a new classifier."""
    from torchvision import models

    state = torch.load(job.weights, weights_only=True)
    model = models.get_model(job.model, weights=None, num_classes=len(state["fc.bias"]))
    model.load_state_dict(state)
    model.fc = torch.nn.Linear(model.fc.in_features, classes or job.classes)
    return model


def fine_tune_lockstep(job: Job, report: Report) -> None:
    """Run `lockstep train --data DATA --weights FILE --out RUN`, without any option but the
    seed."""
    import lockstep

    def listener(event: dict[str, Any]) -> None:
        if event["kind"] == "evaluate":
            report(event["top1_percent"] / 100)

    lockstep.train(
        data=job.data,
        weights=job.weights,
        out=job.out.with_suffix(".run"),
        changes={"seed": job.seed},
        listener=listener,
    )


def fine_tune_tutorial(job: Job, report: Report, only_classifier: bool = False) -> None:
    """Train as PyTorch's transfer learning tutorial does: SGD with momentum 0.9 at 0.001, a tenth
    of it every 7 epochs, batches of 4 images."""
    from torchvision import datasets, transforms

    normalise = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    ways = {
        "train": [transforms.RandomResizedCrop(job.size), transforms.RandomHorizontalFlip()],
        "val": [transforms.Resize(round(job.size * 256 / 224)), transforms.CenterCrop(job.size)],
    }
    loaders = {}
    for part, steps in ways.items():
        way = transforms.Compose([*steps, transforms.ToTensor(), normalise])
        images = datasets.ImageFolder(job.data / part, way)
        loaders[part] = torch.utils.data.DataLoader(
            images, batch_size=4, shuffle=True, num_workers=2
        )
    model = load_model(job)
    if only_classifier:
        model.requires_grad_(False)
        model.fc.requires_grad_(True)
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.001, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    for _ in range(TUTORIAL_EPOCHS):
        train_epoch(model, loaders["train"], optimizer, torch.nn.CrossEntropyLoss())
        scheduler.step()
        report(evaluate(model, loaders["val"]))


def fine_tune_tutorial_classifier(job: Job, report: Report) -> None:
    """Train the classifier alone, as the second half of PyTorch's tutorial does."""
    fine_tune_tutorial(job, report, only_classifier=True)


def fine_tune_timm(job: Job, report: Report) -> None:
    """Train with timm's loaders, optimizer, schedule and loss at the defaults of its training
    script: batches of 128, SGD at 0.1 for 256 images, 5 epochs of warm-up, cosine."""
    import timm
    from timm.data import create_dataset, create_loader
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    batch = 128
    model = timm.create_model(job.model, num_classes=job.classes)
    state = torch.load(job.weights, weights_only=True)
    body = {name: value for name, value in state.items() if not name.startswith("fc.")}
    model.load_state_dict(body, strict=False)
    loaders = {
        part: create_loader(
            create_dataset("", job.data / part),
            input_size=(3, job.size, job.size),
            batch_size=batch,
            is_training=part == "train",
            use_prefetcher=False,
            color_jitter=0.4,
            interpolation="random" if part == "train" else "bilinear",
            num_workers=2,
            device=torch.device("cpu"),
        )
        for part in ("train", "val")
    }
    rate = 0.1 * batch / 256
    optimizer = create_optimizer_v2(model, opt="sgd", lr=rate, weight_decay=2e-5, momentum=0.9)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=TUTORIAL_EPOCHS, warmup_t=5, warmup_lr_init=1e-5
    )
    for epoch in range(TUTORIAL_EPOCHS):
        train_epoch(model, loaders["train"], optimizer, LabelSmoothingCrossEntropy(0.1))
        scheduler.step(epoch + 1)
        report(evaluate(model, loaders["val"]))


def train_epoch(
    model: torch.nn.Module, batches: Any, optimizer: torch.optim.Optimizer, loss: Any
) -> None:
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()


def evaluate(model: torch.nn.Module, batches: Any) -> float:
    """Return the share of images whose largest logit is their label's."""
    model.eval()
    hits = 0
    count = 0
    with torch.inference_mode():
        for images, labels in batches:
            hits += int((model(images).argmax(1) == labels).sum())
            count += len(labels)
    return hits / count


def fine_tune_fastai(job: Job, report: Report) -> None:
    """Train with fastai's `vision_learner(...).fine_tune(...)`, its transforms and its rates."""
    from fastai.vision import all as fastai
    from fastai.vision import learner as learners
    from torchvision import models

    def architecture(**options: Any) -> torch.nn.Module:
        return load_model(job)

    learners.model_meta[architecture] = learners.model_meta[getattr(models, job.model)]
    images = fastai.ImageDataLoaders.from_folder(
        job.data,
        train="train",
        valid="val",
        item_tfms=fastai.Resize(round(job.size * 256 / 224)),
        batch_tfms=fastai.aug_transforms(size=job.size),
        num_workers=2,
    )
    learner = fastai.vision_learner(images, architecture, metrics=fastai.accuracy)

    class Reporter(fastai.Callback):
        order = fastai.Recorder.order + 1

        def after_epoch(self) -> None:
            report(float(self.learn.recorder.values[-1][-1]))

    with learner.no_bar():
        learner.fine_tune(FASTAI_EPOCHS, cbs=Reporter())


def fine_tune_ultralytics(job: Job, report: Report) -> None:
    """Train with `yolo classify train` at its defaults, on torchvision's network as its
    backbone."""
    from ultralytics import YOLO
    from ultralytics.models.yolo.classify import ClassificationTrainer

    class Trainer(ClassificationTrainer):
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
            network = super().get_model(cfg, weights, verbose)
            body = load_model(job)
            network.model[0].m.load_state_dict(
                torch.nn.Sequential(*list(body.children())[:-2]).state_dict()
            )
            return network

    description = job.out.with_suffix(".yaml")
    channels = load_model(job).fc.in_features
    description.write_text(
        f"nc: {job.classes}\n"
        "backbone:\n"
        f"  - [-1, 1, TorchVision, [{channels}, {job.model}, null, True, 2]]\n"
        "head:\n"
        "  - [-1, 1, Classify, [nc]]\n"
    )
    model = YOLO(str(description), task="classify")
    model.add_callback(
        "on_fit_epoch_end", lambda trainer: report(trainer.metrics["metrics/accuracy_top1"])
    )
    model.train(
        trainer=Trainer,
        data=str(job.data),
        imgsz=job.size,
        epochs=TUTORIAL_EPOCHS,
        seed=job.seed,
        workers=2,
        device="cpu",
        project=str(job.out.parent),
        name=job.out.stem + "-ultralytics",
        verbose=False,
        plots=False,
    )


CONTENDERS: dict[str, Callable[[Job, Report], None]] = {
    "lockstep": fine_tune_lockstep,
    "tutorial": fine_tune_tutorial,
    "tutorial-classifier": fine_tune_tutorial_classifier,
    "timm": fine_tune_timm,
    "fastai": fine_tune_fastai,
    "ultralytics": fine_tune_ultralytics,
}
"""Names on the command line, and what each runs."""

if __name__ == "__main__":
    main()
