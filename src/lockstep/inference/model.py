"""`Model`: trained weights or an export, and everything you do with them."""

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
from lockstep.weights import Weights

if TYPE_CHECKING:
    from lockstep.inference.evaluation_result import Evaluation
    from lockstep.inference.int8 import Int8
    from lockstep.inference.label_file import Labels
    from lockstep.inference.serving import Limits
    from lockstep.runs.report import Report


class Model:
    """Trained weights or an export, and where and how they compute; a context manager.

    `lockstep.load` returns one. The first `predict` opens a runtime, which stays open for further
    images until you close the model or drop it.

    >>> import lockstep
    >>> with lockstep.load("run") as model:
    ...     prediction = model.predict("data/val/dots/00006.jpg", top=3)
    ...     [logits] = model.logits(["data/val/dots/00006.jpg"])
    >>> len(prediction.classes), logits.shape
    (3, (10,))
    """

    def __init__(self, source: ModelSource, options: SessionOptions | None = None) -> None:
        """Take an opened source; `lockstep.load` opens one."""
        self._source = source
        self._options = options or SessionOptions()
        self._predictors: dict[tuple[bool, bool], Predictor] = {}
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)
        source.about  # noqa: B018  # raises errors of the source

    @property
    def _about(self) -> Weights:
        return self._source.about

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; ImageNet's for 1000 unnamed outputs, empty if they are unknown.

        1001 outputs of NVIDIA's TensorFlow model are ImageNet's, too.
        """
        return name_classes(self._about)[0].classes

    @property
    def network(self) -> Any:
        """The name of the network, or its fields if it has no name."""
        return self._source.weights.recipe.fields()["model"]

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How images are prepared, as fields of a recipe."""
        return self._about.recipe.preprocessing()

    @property
    def origin(self) -> str:
        """The program that wrote the weights, such as "Lockstep", "timm" or "Keras"."""
        return self._about.origin

    @property
    def path(self) -> Path:
        """The checkpoint or the file that holds the weights."""
        return self._about.source

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on the weights: which checkpoint was chosen, what was assumed or left out."""
        return self._about.remarks

    @property
    def unknown_below(self) -> float:
        """The probability below which the top class is unknown; at 0 every class is known."""
        return self._about.calibration.unknown_below

    @property
    def runtime(self) -> str:
        """The name of the runtime that predicts, such as "native"."""
        return self._open_predictor(features=False, explain=False).runtime

    @property
    def features(self) -> int:
        """The number of features that enter the classifier."""
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
        """Choose where and how the model computes.

        Args:
            where: A backend or a runtime (`lockstep doctor` lists both); "native" (the backend,
                also for exports), "auto" (the fastest that is installed), or, for `evaluate`
                alone, "program" (an export in its own runtime, which can run code: use it only if
                you trust its author). By default "native"; for an ONNX export, ONNX Runtime, else
                OpenVINO.
            precision: By default the recipe's, or fp32 if this processor only emulates that.
            device: "auto", "cpu" or "cuda".
            batch: At most this many images are computed at once; 32 by default.
            execution: Everything else, such as the number of threads that decode.
            listener: A function to call with notes and progress.

        Returns:
            The same model with these settings. It keeps the present value of what you leave out.

        Raises:
            BackendError: There is no such backend or runtime.
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
        """Predict the most likely classes of one image or several.

        Probabilities are the softmax of the logits. A calibrated model first divides these by its
        temperature.

        Args:
            images: One image: a path, the bytes of an image file, a Pillow image, or an array
                or a tensor, RGB [height, width, 3] or [3, height, width], uint8 or floats from 0 to
                1. Or several: an iterable, or an array [N, ...].
            top: The number of classes to return.
            features: Whether to add the features before the classifier.
            explain: Whether to add a picture of the parts that support the most likely class.
            on_error: For several images, a function to call with the name of an unreadable one,
                and the reason. The other images are predicted.

        Returns:
            A `Prediction`, or for several images an iterator that computes as you consume it.

        Raises:
            DataError: An image cannot be read, and it is the only one or there is no `on_error`.
            DivergedError: A logit is not a finite number.
            BackendError: The backend cannot explain, or something is not installed.
        """
        every = list_images(images)
        predictor = self._open_predictor(features=features, explain=explain)
        if is_one_image(images):
            [prediction] = predictor.predict(every, top)
            return prediction
        return self._keep(predictor.predict(every, top, on_error=on_error))

    def logits(self, images: Image | Iterable[Image], *, on_error: OnError | None = None) -> Any:
        """Compute the logits of one image or several, without a temperature.

        Args:
            images: One image or several, as in `predict`.
            on_error: A function to call for an unreadable image, as in `predict`.

        Returns:
            float32 [logits], or for several images an iterator.

        Raises:
            DataError: An image cannot be read, and it is the only one or there is no `on_error`.
        """
        every = list_images(images)
        predictor = self._open_predictor(features=False, explain=False)
        if is_one_image(images):
            [logits] = predictor.logits(every)
            return logits
        return self._keep(predictor.logits(every, on_error=on_error))

    def preprocess(self, images: Image | Iterable[Image]) -> Any:
        """Prepare images as the network takes them: normalised float32 [3, size, size] for each.

        Args:
            images: One image, or several, which give an iterator.

        Raises:
            DataError: An image cannot be read.
        """
        inputs = read_inputs(images, self._about.recipe)
        return next(inputs) if is_one_image(images) else inputs

    def _keep(self, values: Iterator[Any]) -> Iterator[Any]:
        """Yield values; this reference keeps the model open meanwhile."""
        yield from values

    def _open_predictor(self, *, features: bool, explain: bool) -> Predictor:
        """Return the predictor that is open, or open it. Only the first one sends
        notes, because all send the same."""
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
        """Evaluate the model on the validation images of a data set; on all if it has none.

        With several processes (torchrun), call this in every process. Every image counts once.

        Args:
            data: A data set in any storage format; by default that of the run. For a folder of
                several, such as ImageNet-C, you get the means.
            labels: Right outputs by class or image, and the outputs to choose from: a mapping, or a
                file (docs/how-to/test-sets.md).
            split: The share to evaluate if there are no validation images, 0 for all; by default
                the share that the run held out.
            calibrate: Whether to fit a temperature and store it with the checkpoint.
            precision_at: The share of answers that must be right, such as 0.99: stores the
                threshold of unknown images that reaches it, and a temperature.
            progress: Whether to show a bar, unless there is a listener.

        Returns:
            The accuracy, the loss, and the counts of each class.

        Raises:
            DataError: Images or names of classes do not fit.
            DivergedError: A loss is not finite.
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
        """Write the weights in another format.

        The certificate compares the written weights with the source, each in its own framework if
        that is installed. Nothing is overwritten; files appear only when all are complete.

        Args:
            target: A new file, folder or prefix.
            to: "safetensors", "torchvision", "timm", "transformers", "keras", "nvidia-pytorch",
                "nvidia-tensorflow", "nvidia-paddle", "nvidia-mxnet", "flax" or "torchax".
            certificate: Whether to compare, and write `TARGET.certificate.json` (and a `proof`).

        Returns:
            The paths as `written`, the `certificate` and `remarks`, among others.

        Raises:
            CheckpointError: The format cannot hold the weights, or they differ by more than the
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
        """Write a program for a server or a phone, with softmax inside.

        A program takes `images`, photos of any size (OpenVINO, TensorRT and phones: squares), and
        returns `classes` and `probabilities` as `predict` does. The folder appears only when it is
        complete; nothing is overwritten.

        Args:
            folder: A new folder.
            to: "savedmodel", "frozen-graph", "paddle-inference", "torchscript", "torch-export",
                "onnx", "openvino", "tensorrt", "triton", "stablehlo", "executorch" or "litert"
                (docs/how-to/deploy.md); by default what the installed packages can run.
            precision: "fp32" (the default), "bf16", "fp16", "int8" for weights trained with
                quantisation, or a `lockstep.Int8` to quantise now (docs/how-to/quantisation.md).
            batch: The number of images of every batch, for Triton the largest; by default any
                (phones: 1; TensorRT and Triton: up to 32).
            bare: Whether the program takes normalised float32 NCHW images and returns logits.
            compare: Whether to compare the program with a backend, and add a `proof` if not bare.

        Returns:
            What the program `takes`, the `comparison` (`inference.comparison.Comparison`), top-1
            before and after quantisation as `int8`, the folder `proof`, and `remarks`.

        Raises:
            CheckpointError: The format has no such option, or the program differs.
            BackendError: The framework or a package is missing.
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
        mode. It maps normalised float32 images [N, 3, H, W] to logits [N, logits], without
        quantisation.

        Raises:
            BackendError: The framework is not installed.

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
        """Serve the model over HTTP until SIGTERM or Ctrl-C (docs/how-to/serve.md).

        Returns when all accepted requests are answered. A second signal ends the process at once.
        Call it in the main thread, because only that receives signals.

        Args:
            host: The address to listen on. Any other than loopback needs a token or `no_token`.
            port: The port to listen on; 0 takes a free one.
            token: At least 16 characters, which clients send as `Authorization: Bearer TOKEN`.
            no_token: Whether everyone who reaches the address may use the server.
            allow_hosts: Further host names that requests may use, such as that of a proxy.
            name: The model's name in addresses; by default the name of its architecture, or
                "model" for an ONNX export.
            limits: Sizes and times (`lockstep.inference.serving.Limits`).
            quiet: Whether to log only failed requests, on standard error.

        Raises:
            UserError: The address is in use, or the token is missing.
            BackendError: A package of the extra `serve` is missing.
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
        """Train a new run from the weights. The same call resumes it.

        Args:
            data: Training and validation images in any storage format.
            out: The folder of the run.
            recipe: A name, a file or a `Recipe`; by default `fine-tune`, which adapts to the
                images, the device and the weights (docs/how-to/fine-tune.md).
            changes: New values for fields of the recipe.
            split: The share to hold out if there are no validation images; by default 0.3.
            progress: Whether to show a bar, as in `evaluate`.

        Returns:
            The report of `lockstep.train`, which may also raise the same errors.
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
        """Free what `predict` opened. The next call opens it again."""
        self._predictors.clear()
        self._stack.close()
