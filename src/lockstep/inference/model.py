"""`Model`: trained weights or an export, and all that is done with them."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lockstep import backends
from lockstep.inference.images import Image, is_one_image, list_images, read_inputs
from lockstep.inference.prediction import OnError, Predictor, name_classes
from lockstep.inference.session import SessionOptions
from lockstep.inference.source import ModelSource
from lockstep.recipes import Execution, Recipe
from lockstep.runs.events import Listener
from lockstep.runs.recorder import show_progress
from lockstep.weights import Classes, Preprocessing, Weights, WeightsChoice
from lockstep.weights.hub import locate_weights

if TYPE_CHECKING:
    from lockstep.inference.evaluation_result import Evaluation
    from lockstep.inference.int8 import Int8
    from lockstep.inference.label_file import Labels
    from lockstep.inference.serving import Limits
    from lockstep.runs.report import Report


def load(
    source: str | Path,
    *,
    checkpoint: str | None = None,
    ema: bool | None = None,
    network: str | None = None,
    classes: Classes | None = None,
    preprocessing: Preprocessing | None = None,
    ignore: Iterable[str] = (),
    unknown_below: float | None = None,
    require_signature: str | Path | None = None,
) -> "Model":
    """Return the model of a run, a checkpoint, an export, a file of another program
    (docs/reference/weight-formats.md), or published weights by their name.

    Args:
        source: a path, or a name such as "torchvision/resnet50.IMAGENET1K_V2".
        checkpoint: "newest", "best" or a step's number of a run. By default the best one, or the
            newest one of a run that was never evaluated.
        ema: whether the moving average is used instead of the trained weights; by default
            whichever is better in the best checkpoint.
        network: the network of a file that fits several, such as "resnet50-v1", or its fields as
            YAML (docs/how-to/model.md).
        classes: names of the classes, class 0 first, or a file that lists them; by default those
            of the weights.
        preprocessing: how images are prepared: fields of a recipe such as `{"image_size": 160}`,
            or a recipe. It takes precedence over what a file says.
        ignore: patterns of names, such as "criterion.*": parts of a file that are left out.
        unknown_below: an image whose likeliest class is less probable than this is unknown, 0 to 1;
            by default the threshold that is stored with the weights.
        require_signature: a public key or certificates (PEM): only files that their owner signed
            are loaded (docs/how-to/sign.md).

    Raises:
        CheckpointError: there are no such weights, or they are not understood to the last part.
        DataError: `classes` does not fit the weights.

    >>> import lockstep
    >>> lockstep.load("run").origin
    'Lockstep'
    """
    path = locate_weights(source)
    ignored = tuple(ignore)
    choice = WeightsChoice(
        path, checkpoint, ema, network, preprocessing, ignored, classes, unknown_below
    )
    return Model(ModelSource(choice, require_signature))


class Model:
    """Trained weights or an export, and where and how they compute; a context manager.

    `lockstep.load` returns one. What `predict` opened stays open for further images until the
    model is closed, or nothing refers to it.

    >>> import lockstep
    >>> with lockstep.load("run") as model:
    ...     found = model.predict("data/val/dots/00006.jpg", top=3)
    ...     [logits] = model.logits(["data/val/dots/00006.jpg"])
    >>> len(found.classes), logits.shape
    (3, (10,))
    """

    def __init__(self, source: ModelSource, options: SessionOptions | None = None) -> None:
        """Take an opened source; `lockstep.load` opens one."""
        self._source = source
        self._options = options or SessionOptions()
        self._predictors: dict[tuple[bool, bool], Predictor] = {}
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)
        source.about  # noqa: B018  # what is wrong with the source is an error now

    @property
    def _about(self) -> Weights:
        return self._source.about

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; ImageNet's if the weights name none and have its 1000 outputs.
        Empty if they are unknown."""
        return name_classes(self._about)[0].classes

    @property
    def network(self) -> Any:
        """The name of the network, or its fields if it has no name."""
        return self._source.weights.recipe.fields()["model"]

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How images are prepared: fields of a recipe."""
        return self._about.recipe.preprocessing()

    @property
    def origin(self) -> str:
        """The program that wrote the weights, such as "Lockstep", "timm" or "Keras"."""
        return self._about.origin

    @property
    def path(self) -> Path:
        """The checkpoint or the file that the weights are in."""
        return self._about.source

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on the weights: the chosen checkpoint, what was assumed or left out."""
        return self._about.remarks

    @property
    def unknown_below(self) -> float:
        """An image is unknown if its likeliest class is less probable than this; 0: none is."""
        return self._about.calibration.unknown_below

    @property
    def runtime(self) -> str:
        """The name of the runtime that predicts, such as "native"."""
        return self._open_predictor(features=False, explain=False).runtime

    @property
    def features(self) -> int:
        """The number of features that the classifier gets."""
        return self._source.weights.recipe.spec.features

    def __repr__(self) -> str:
        return f"Model({', '.join(self._describe().values())})"

    def _repr_html_(self) -> str:
        rows = ""
        for name, text in self._describe().items():
            rows += f"<tr><th>{name}</th><td>{escape(text)}</td></tr>"
        return f"<table>{rows}</table>"

    def _describe(self) -> dict[str, str]:
        """Return what it is, in words."""
        return self._source.describe(len(self.classes)) | {"computes": f"on {self._options.place}"}

    def on(
        self,
        where: str | None = None,
        *,
        precision: str | None = None,
        device: str | None = None,
        batch: int | None = None,
        execution: Execution | None = None,
        listener: Listener | None = None,
    ) -> Self:
        """Return the same model where and how it is to compute. What is not named stays.

        Args:
            where: a backend or a runtime (`lockstep doctor` lists both); "native" (the backend,
                also for exports), "auto" (the fastest that is installed), or "program" (an export
                in its own runtime; it can run code, so trust who wrote it).
            precision: by default the recipe's, or fp32 if this processor only emulates that.
            device: "auto", "cpu" or "cuda".
            batch: the most images that are computed at once, 32 by default.
            execution: everything else, such as the number of threads that decode.
            listener: called with notes and progress as they happen.

        Raises:
            BackendError: there is no such backend or runtime.
            UserError: `batch` is less than 1.
        """
        options = self._options.change(
            where,
            device=device,
            execution=execution,
            precision=precision,
            batch=batch,
            listener=listener,
        )
        return type(self)(self._source, options)

    def predict(
        self,
        images: Image | Iterable[Image],
        *,
        top: int = 5,
        features: bool = False,
        explain: bool = False,
        on_error: OnError | None = None,
    ) -> Any:
        """Return the likeliest classes of an image, or an iterator over those of several.

        An image is a path, the bytes of an image file, an image of Pillow, or an array or a tensor
        of any library: RGB [height, width, 3] or [3, height, width], in uint8 or in floats from 0
        to 1. An array [N, ...] is several, and so is any iterable. Images are prepared as in the
        evaluation of the recipe. Probabilities are the softmax of logits, which are divided by the
        temperature of a calibrated model. `on` chooses the precision.

        Args:
            images: one image, or several.
            top: the number of classes.
            features: whether predictions have the features before the classifier.
            explain: whether predictions have a picture of what speaks for the likeliest class.
            on_error: called with the name of an unreadable image of several, and the reason.

        Returns:
            A `Prediction`, or an iterator that computes when its values are needed.

        Raises:
            DataError: an image cannot be read, and there is no `on_error`.
            DivergedError: a logit is not a finite number.
            BackendError: the backend cannot explain, or something is not installed.
        """
        every = list_images(images)
        predictor = self._open_predictor(features=features, explain=explain)
        if is_one_image(images):
            [prediction] = predictor.predict(every, top)
            return prediction
        return self._keep(predictor.predict(every, top, on_error=on_error))

    def logits(self, images: Image | Iterable[Image], *, on_error: OnError | None = None) -> Any:
        """Return the logits of an image, float32 [logits], or an iterator over those of several, as
        `predict` does. A temperature is not applied; the precision is that of `on`."""
        every = list_images(images)
        predictor = self._open_predictor(features=False, explain=False)
        if is_one_image(images):
            [logits] = predictor.logits(every)
            return logits
        return self._keep(predictor.logits(every, on_error=on_error))

    def preprocess(self, images: Image | Iterable[Image]) -> Any:
        """Return what the network sees of an image, normalised float32 [3, size, size] as `module`
        takes it, or an iterator over those of several. Raises `DataError` as `predict` does."""
        inputs = read_inputs(images, self._about.recipe)
        return next(inputs) if is_one_image(images) else inputs

    def _keep(self, values: Iterator[Any]) -> Iterator[Any]:
        """Yield values; meanwhile the model is referred to, and so stays open."""
        yield from values

    def _open_predictor(self, *, features: bool, explain: bool) -> Predictor:
        """Return the predictor that is open, or open it. The notes of all kinds are the same."""
        kind = features, explain
        if kind not in self._predictors:
            options = replace(self._options, listener=None) if self._predictors else self._options
            predictor = Predictor(self._source, options, features=features, explain=explain)
            self._predictors[kind] = self._stack.enter_context(predictor)
        return self._predictors[kind]

    def evaluate(
        self,
        data: str | Path | None = None,
        *,
        labels: "Labels | None" = None,
        split: float | None = None,
        calibrate: bool = False,
        precision_at: float | None = None,
        progress: bool = True,
    ) -> "Evaluation":
        """Return the accuracy, the loss and the counts of each class on the validation images of a
        data set, or on all its images if it has none. Every image counts once.

        With several processes (torchrun), every process calls this. Exports that can only compute
        run as they are (docs/how-to/runtimes.md).

        Args:
            data: a data set in any storage format; by default that of the run. Of a folder of
                several, such as ImageNet-C, the result has the means.
            labels: a mapping, or a file, that says which outputs are right for a class or an
                image, and which ones the model chooses from (docs/how-to/test-sets.md).
            split: the share of the images to evaluate if there are no validation images; by
                default the share that the run set apart. 0: all.
            calibrate: fit a temperature, and store it with the checkpoint.
            precision_at: choose the threshold of unknown images so that this share of the others
                is right, such as 0.99; store it and a temperature.
            progress: show a bar on a terminal or in a notebook, if `on` named no listener.

        Raises:
            DataError: images or names of classes do not fit.
            DivergedError: a loss is not finite.

        >>> import lockstep
        >>> result = lockstep.load("run", checkpoint="best").evaluate("data")
        >>> result.images, result.interval[0] <= result.top1 <= result.interval[1]
        (20, True)
        """
        from lockstep.inference.evaluation import evaluate

        with show_progress(self._options.listener, progress=progress) as listener:
            options = replace(self._options, listener=listener)
            chosen = {"split": split, "precision_at": precision_at}
            result = evaluate(self._source, data, options, labels, calibrate=calibrate, **chosen)
        if result.calibration:
            self._source.forget()
            self.close()
        return result

    def save(
        self, target: str | Path, *, to: str = "safetensors", certificate: bool = True
    ) -> dict[str, Any]:
        """Write the weights in another format; return what was written, with remarks and the
        certificate.

        The certificate compares what was written with the source, each in its own framework if it
        is installed. Nothing is overwritten; files appear only when all are complete.

        Args:
            target: a new file, folder or prefix.
            to: "safetensors", "torchvision", "timm", "transformers", "keras", "nvidia-pytorch",
                "nvidia-tensorflow", "nvidia-paddle", "nvidia-mxnet", "flax" or "torchax".
            certificate: whether to compare, and write `TARGET.certificate.json` (and a `proof`).

        Raises:
            CheckpointError: the format cannot hold the weights, or they differ by more than the
                bound; then nothing is written.

        >>> import lockstep
        >>> result = lockstep.load("run").save("weights.safetensors")
        >>> result["written"], result["logits"], result["certificate"]["largest_difference"]
        (['weights.safetensors', 'weights.safetensors.certificate.json'], 10, 0.0)
        """
        from lockstep.inference.card import write_card
        from lockstep.weights.conversion import convert

        choice = self._source.choice
        return convert(choice, target, to=to, certificate=certificate, complete=write_card)

    def export(
        self,
        folder: str | Path,
        *,
        to: str | None = None,
        precision: "str | Int8 | None" = None,
        batch: int | None = None,
        bare: bool = False,
        compare: bool = True,
    ) -> dict[str, Any]:
        """Write a program for a server or a phone, with softmax inside; return what was written.

        A program takes `images`, photos of any size, and answers as `predict` does: with `classes`
        and `probabilities`. The folder appears only when it is complete; nothing is overwritten.

        Args:
            folder: a new folder.
            to: "savedmodel", "frozen-graph", "paddle-inference", "torchscript", "torch-export",
                "onnx", "openvino", "tensorrt", "triton", "stablehlo", "executorch" or "litert"
                (docs/how-to/deploy.md); by default what the installed packages can run.
            precision: of the program: "fp32" (by default), "bf16", "fp16", "int8" for weights that
                were trained with quantisation, or `lockstep.Int8(DATA)` to quantise now
                (docs/how-to/quantisation.md).
            batch: the number of images of every batch; by default any.
            bare: whether it takes normalised float32 NCHW images and returns logits.
            compare: whether the program is compared with a backend, and gets a `proof` if not bare.

        Returns:
            What it takes, `comparison` (`inference.comparison.Comparison`), the top-1 before and
            after quantisation as `int8`, the folder `proof`, and remarks.

        Raises:
            CheckpointError: the format has no such option, or the program differs.
            BackendError: the framework or a package is missing.
        """
        from lockstep.inference.export import export

        return export(
            self._source.weights,
            folder,
            to=to,
            precision=precision,
            batch=batch,
            bare=bare,
            compare=compare,
            listener=self._options.listener,
        )

    def module(self) -> Any:
        """Return the framework's own module with the weights; `on` chooses the backend.

        For PyTorch this is an ordinary `torch.nn.Module` with torchvision's names, in evaluation
        mode. It maps normalised float32 images [N, 3, H, W] to logits [N, logits]. It computes
        without quantisation, also if the weights were trained with it.

        >>> import lockstep, torch
        >>> lockstep.load("run").module()(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
        """
        weights = self._source.weights
        backend = backends.load(self._options.execution.backend)
        return backend.load_module(weights.recipe, weights.tensors)

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        no_token: bool = False,
        allow_hosts: Iterable[str] = (),
        name: str | None = None,
        limits: "Limits | None" = None,
        quiet: bool = False,
    ) -> None:
        """Serve the model over HTTP, until SIGTERM or Ctrl-C (docs/how-to/serve.md).

        Returns when all accepted requests are answered. A second signal ends the process at once.
        Call it in the main thread, which is the one that gets signals.

        Args:
            host: the address to listen on. Others than loopback need a token, or `no_token`.
            port: 0 takes a free one.
            token: at least 16 characters, which clients send as `Authorization: Bearer TOKEN`.
            no_token: let everyone who reaches the address use the server.
            allow_hosts: more names for the server in requests, such as that of a proxy.
            name: that of the model in addresses; by default that of its architecture.
            limits: sizes and times (`lockstep.inference.serving.Limits`).
            quiet: leave requests that succeed out of the log on standard error.

        Raises:
            UserError: the address is in use, or the token is missing.
            BackendError: a package of the extra `serve` is missing.
        """
        from lockstep.inference.serving import serve

        serve(
            self._source,
            self._options,
            host=host,
            port=port,
            token=token,
            no_token=no_token,
            allow_hosts=allow_hosts,
            name=name,
            limits=limits,
            quiet=quiet,
        )

    def train(
        self,
        data: str | Path,
        *,
        out: str | Path,
        recipe: str | Path | Recipe | None = None,
        changes: Mapping[str, Any] | None = None,
        split: float | None = None,
        progress: bool = True,
    ) -> "Report":
        """Train a new run from the weights; return its report. The same call resumes it.

        Args:
            data: training and validation images in any storage format.
            out: the run's folder.
            recipe: a name, a file or a `Recipe`; by default `fine-tune`, whose values are chosen
                from images, device and weights (docs/how-to/fine-tune.md).
            changes: new values for fields of the recipe.
            split: the share set apart for validation without validation images; by default 0.3.
            progress: show a bar, as `evaluate` does.
        """
        from lockstep.runs.train import train

        return train(
            recipe,
            data,
            out,
            changes=changes,
            split=split,
            weights=self._source.choice,
            execution=self._options.execution,
            listener=self._options.listener,
            progress=progress,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what `predict` opened. It is opened again when it is needed."""
        self._predictors.clear()
        self._stack.close()
