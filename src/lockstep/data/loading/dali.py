"""The DALI loader: NVIDIA's pipeline, which gets the bytes, windows and flips of a plan.

It makes no decisions: order, crops, sharding and exact resume are those of the host loader. Decoded
pixels are the same too; resized pixels differ by rounding (docs/reference/data.md has the measured
bounds).
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, groupby
from typing import Any

import cv2
import numpy as np

from lockstep.data import Batch
from lockstep.data.decoding.decode import decode, is_plain_jpeg
from lockstep.data.decoding.orientation import replace_orientation, turn_image
from lockstep.data.decoding.sampling import stretches
from lockstep.data.decoding.size_limits import check_ratio
from lockstep.data.index import Index
from lockstep.data.loading.dali_augmentations import (
    augment_images,
    count_inputs,
    encode_parameters,
    refuse_other_pixels,
)
from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.order import BatchPlan
from lockstep.system.errors import BackendError, DataError, RecipeError
from lockstep.system.machine import share_of_cores

DISTRIBUTIONS = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")
INSTALL = "pip install nvidia-dali-cuda120==2.4.0"


class DaliLoader(AbstractContextManager["DaliLoader"]):
    """Turns plans into batches; a context manager."""

    def __init__(
        self,
        index: Index,
        *,
        antialias: bool,
        interpolation: str = "bilinear",
        sampling: str = "half_pixel",
        exif_orientation: bool = False,
        augmentations: Sequence[Augmentation] = (),
        on_gpu: bool = False,
        lends: bool = False,
        threads: int = 0,
        ahead: int = 2,
    ) -> None:
        """Raise `BackendError` if DALI is not installed, `RecipeError` if it has no such resize or
        augmentation.

        With `lends`, images stay where DALI made them (`lockstep.data.LentImages`), except those of
        batches with padding.
        """
        if interpolation != "bilinear" and not antialias:
            raise RecipeError(
                "DALI's bicubic resize without antialiasing weighs pixels differently (a = -0.5)"
                " than the host loader's (a = -0.75), and pixels would differ by up to 23 levels;"
                " set antialias: true, or use the host loader (for evaluation alone:"
                " eval_antialias: true)"
            )
        refuse_other_pixels(augmentations)
        self._index = index
        self._ahead = ahead
        self._antialias = antialias
        self._interpolation = interpolation
        self._sampling = sampling
        self._threads = threads or share_of_cores()
        self._gpu = int(os.environ.get("LOCAL_RANK", "0")) if on_gpu else None
        self._lends = lends
        self._augmentations = augmentations
        self._turns = exif_orientation
        import_dali()

    def __exit__(self, *error: object) -> None:
        pass

    def batches(self, plans: Iterable[BatchPlan]) -> Iterator[Batch]:
        """Yield the batch of every plan, in order, decoding ahead as long as they have one size.

        Raises `DataError` naming the file that cannot be read.
        """
        for _, plans_of_a_size in groupby(plans, key=lambda plan: plan.size):
            yield from self._batches_of_a_size(plans_of_a_size)

    def _batches_of_a_size(self, plans: Iterator[BatchPlan]) -> Iterator[Batch]:
        first = next(plans)
        started: deque[BatchPlan] = deque()

        def inputs() -> Iterator[tuple[list[np.ndarray], ...]]:
            for plan in chain([first], plans):
                started.append(plan)
                # DALI accepts no empty batch; empty batches come last.
                if (plan.samples >= 0).any():
                    yield self._inputs(plan)

        pipeline = self._pipeline(inputs(), len(first.samples), first.size)
        # Other execution models reuse the memory of an output as soon as the next one is requested.
        lends = self._lends and pipeline.exec_dynamic
        while True:
            try:
                (output,) = pipeline.run()
            except StopIteration:
                break
            except RuntimeError as error:
                raise self._find_broken_image(started[0], error) from None
            yield self._batch(started.popleft(), output, lends)
        for plan in started:
            yield self._batch(plan, None, lends)

    def _pipeline(
        self, inputs: Iterator[tuple[list[np.ndarray], ...]], most_images: int, side: int
    ) -> Any:
        fn, types, pipeline_def = import_dali()
        size = [side, side]

        @pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=most_images,
            num_threads=self._threads,
            device_id=self._gpu,
            prefetch_queue_depth=self._ahead,
        )
        def build_graph() -> Any:
            encoded, start, extent, flip, vertical_flip, kernel, *others = fn.external_source(
                source=inputs, num_outputs=8 + count_inputs(self._augmentations), batch=True
            )
            square = others[:2]
            how = {
                "interp_type": fn.reinterpret(kernel, dtype=types.INTERP_TYPE),
                "antialias": self._antialias,
            }
            window = fn.decoders.image_slice(
                encoded,
                start=start,
                shape=extent,
                axis_names="HW",
                device="cpu" if self._gpu is None else "mixed",
                output_type=types.RGB,
                # windows refer to the turned image then, else to the stored one
                adjust_orientation=self._turns,
                jpeg_fancy_upsampling=True,  # as libjpeg does; on a GPU too
            )
            if self._sampling == "half_pixel":
                resized, offset = square
                images = fn.resize(window, size=resized, **how)
                images = fn.slice(images, start=offset, shape=size, axis_names="HW")
            else:
                first, end = square
                images = fn.resize(window, size=size, roi_start=first, roi_end=end, **how)
            images = fn.flip(images, horizontal=flip, vertical=vertical_flip)
            return augment_images(self._augmentations, images, others[2:])

        pipeline = build_graph()
        pipeline.build()
        return pipeline

    def _inputs(self, plan: BatchPlan) -> tuple[list[np.ndarray], ...]:
        """Return the inputs of DALI for every image that is not padding."""
        used = np.flatnonzero(plan.samples >= 0).tolist()
        encoded = []
        windows = []
        for i in used:
            sample = int(plan.samples[i])
            window = plan.windows[i]
            data = self._index.read(sample)
            try:
                height, width = plan.resized[i].tolist()
                check_ratio(height, width, window[2:].tolist())
            except ValueError as error:
                raise self._index.explain_change(sample, str(error)) from None
            if not is_plain_jpeg(data):
                data, window = self._make_bitmap(sample, data, window)
            elif self._turns:
                data = replace_orientation(data, int(self._index.orientations[sample]))
            encoded.append(np.frombuffer(data, np.uint8))
            windows.append(window)
        return (
            encoded,
            [window[:2].astype(np.int32) for window in windows],
            [window[2:].astype(np.int32) for window in windows],
            *self._choices(plan, used),
            *self._squares(plan, used),
            *self._parameters(plan, used),
        )

    def _choices(self, plan: BatchPlan, used: list[int]) -> Iterator[list[np.ndarray]]:
        """Yield whether every image is mirrored left to right, whether it is upside down, and its
        kernel."""
        _, types, _ = import_dali()
        vertical_flips = plan.vertical_flips
        if vertical_flips is None:
            vertical_flips = np.zeros(len(plan.samples), bool)
        is_bicubic = plan.is_bicubic
        if is_bicubic is None:
            is_bicubic = np.full(len(plan.samples), self._interpolation == "bicubic")
        kernels = np.where(is_bicubic, int(types.INTERP_CUBIC), int(types.INTERP_LINEAR))
        for values in (plan.flips, vertical_flips, kernels):
            yield [np.array(values[i], np.int32) for i in used]

    def _squares(
        self, plan: BatchPlan, used: list[int]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return size and offset in the resized window of every image, or first and last place that
        its square shows."""
        if self._sampling == "half_pixel":
            resized = plan.resized[used].astype(np.float32)
            offsets = plan.offsets[used].astype(np.int32)
            return list(resized), list(offsets)
        starts = []
        ends = []
        for i in used:
            source = plan.windows[i, 2:].tolist()
            place = (plan.resized[i].tolist(), plan.offsets[i].tolist())
            square = np.array(stretches(source, *place, plan.size, self._sampling))
            starts.append(square[:, 0].astype(np.float32))
            ends.append(square.sum(axis=1).astype(np.float32))
        return starts, ends

    def _parameters(self, plan: BatchPlan, used: list[int]) -> list[list[np.ndarray]]:
        """Return what DALI's operators need to augment every image, input by input."""
        if plan.augmentations is None:
            return []
        rows = [
            encode_parameters(self._augmentations, plan.augmentations[i], plan.size) for i in used
        ]
        return list(map(list, zip(*rows, strict=True)))

    def _make_bitmap(
        self, sample: int, data: bytes, window: np.ndarray
    ) -> tuple[bytes, np.ndarray]:
        """Return a bitmap of an image's window, and the window in it, for an image that DALI must
        not decode.

        The pixels are those of the host loader.
        """
        try:
            image = decode(data)
            if self._turns:
                image = turn_image(image, int(self._index.orientations[sample]))
        except ValueError as error:
            raise self._index.explain_change(sample, str(error)) from None
        top, left, height, width = window.tolist()
        part = np.ascontiguousarray(image[top : top + height, left : left + width, ::-1])
        return cv2.imencode(".bmp", part)[1].tobytes(), np.array([0, 0, height, width], np.int32)

    def _batch(self, plan: BatchPlan, output: Any, lends: bool) -> Batch:
        labels = self._index.labels(plan.samples)
        padded = plan.samples < 0
        columns = plan.batch_columns()
        if lends and not padded.any():
            return Batch(Lent(output.as_tensor()), labels, **columns)
        images = np.zeros((len(plan.samples), plan.size, plan.size, 3), np.uint8)
        if output is not None:
            on_cpu = output if self._gpu is None else output.as_cpu()
            images[~padded] = np.asarray(on_cpu.as_tensor())
        return Batch(images, labels, **columns)

    def _find_broken_image(self, plan: BatchPlan, error: RuntimeError) -> DataError:
        """Return the error that names the image DALI could not decode."""
        samples = plan.samples[plan.samples >= 0].tolist()
        for sample in samples:
            try:
                decode(self._index.read(sample))
            except ValueError as reason:
                return self._index.explain_change(sample, str(reason))
        places = ", ".join(self._index.place(sample) for sample in samples[:4])
        return DataError(
            f"DALI could not make the batch of {places} ..., although libjpeg-turbo decodes these:"
            f" {error}"
        )


class Lent:
    """An output of DALI's pipeline, as images that are lent (`lockstep.data.LentImages`)."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, size, size, 3]."""
        return tuple(self._tensor.shape())

    def __len__(self) -> int:
        return self.shape[0]

    def __dlpack__(self, **how: Any) -> Any:
        """Return a capsule, which keeps the images' memory."""
        return self._tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type of the device, and the device's number."""
        kind, number = self._tensor.__dlpack_device__()
        return int(kind), int(number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a copy in main memory."""
        return np.array(self._tensor.as_cpu(), dtype)


def import_dali() -> tuple[Any, Any, Any]:
    """Return DALI's functions, types and `pipeline_def`. Raises `BackendError` if it is not
    installed."""
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import pipeline_def
    except ImportError as error:
        raise BackendError(f"DALI cannot be imported ({error}); install it: {INSTALL}") from None
    return fn, types, pipeline_def
