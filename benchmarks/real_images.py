"""Train a published recipe for some epochs on real images at 64 px; record the loss and accuracy of
every epoch."""

import tempfile
from pathlib import Path

import lockstep
from lockstep.cli.console import Reporter
from lockstep.system.event_log import read_log
from measuring import make_parser, record


def main() -> None:
    parser = make_parser(__doc__, "Training and validation images of ten classes.")
    parser.add_argument("--recipe", default="resnet50-paddle-90ep")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    published = lockstep.load_recipe(arguments.recipe)
    changes = {
        "logits": 10 if published.logits == 1000 else published.logits,
        "epochs": arguments.epochs,
        "global_batch_images": 32,
        "lr": 0.05,
        "lr_scaling": "none",
        "warmup_epochs": 1,
        "zero_init_last_bn": True,
        "precision": "bf16",
        "image_size": 64,
        "crop_area": [0.35, 1.0],
        "eval_resize": 72,
        "eval_crop": 64,
    }
    execution = lockstep.Execution(backend=arguments.backend)
    with tempfile.TemporaryDirectory() as folder, Reporter() as reporter:
        run = Path(folder) / "run"
        report = lockstep.train(
            published.replace(**changes),
            arguments.data,
            run,
            execution=execution,
            listener=reporter,
        )
        entries = read_log(run / "log.jsonl")
    record(
        "real_images"
        if arguments.backend == "torch"
        else f"real_images_{arguments.backend}_{published.epochs}ep",
        {
            "recipe": arguments.recipe,
            "changes": changes,
            "evaluations": [
                {key: entry[key] for key in ("step", "loss", "top1_percent", "images")}
                for entry in entries
                if entry["kind"] == "evaluate"
            ],
            "training_loss_of_last_interval": [
                entry["loss"] for entry in entries if entry["kind"] == "train"
            ][-1],
            "images_per_sec": round(report["images_per_sec"], 1),
        },
        arguments.backend,
    )


if __name__ == "__main__":
    main()
