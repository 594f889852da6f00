"""`ModelSource`: what a choice of weights names, opened when it is needed."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.inference.runtimes import AUTO, NATIVE, PROGRAM
from lockstep.inference.session import SessionOptions, list_export_runtimes
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import BackendError, CheckpointError, UserError
from lockstep.system.text import format_count
from lockstep.weights import Weights, WeightsChoice, open_weights
from lockstep.weights.formats.lockstep_files import is_checkpoint

if TYPE_CHECKING:
    from lockstep.inference.programs import ExportedProgram
    from lockstep.inference.runtimes.exported import ExportedModel


class ModelSource:
    """Weights, or an export that may be run as it is."""

    def __init__(self, choice: WeightsChoice, require_signature: str | Path | None = None) -> None:
        """Take a choice. If a signature is required, what is opened is a verified copy."""
        self.is_copy = require_signature is not None
        self._named = str(choice.source)
        if require_signature is not None:
            from lockstep.weights.signature import copy_verified

            folder = Path(tempfile.mkdtemp(prefix="lockstep-verified-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            copy = copy_verified(Path(choice.source), require_signature, folder)
            choice = replace(choice, source=copy)
        self.choice = choice
        self.path = Path(choice.source)

    @contextmanager
    def _naming_source(self) -> Iterator[None]:
        """Let errors name what the user named, and not its verified copy."""
        try:
            yield
        except UserError as error:
            error.args = (self.replace_path(str(error)),)
            raise

    def replace_path(self, text: str) -> str:
        """Return a text that names what the user named, and not its verified copy."""
        return text.replace(str(self.path), self._named) if self.is_copy else text

    @cached_property
    def weights(self) -> Weights:
        """The weights. For an export whose weights cannot be read, the error names what runs it."""
        with self._naming_source():
            try:
                return open_weights(self.choice)
            except CheckpointError as error:
                program = self._program
                if program is None or self.choice.ignore or self.choice.model:
                    raise
                trust = ""
                if program.target.can_run_code:
                    trust = ", if you trust its author, because it can run code"
                raise CheckpointError(
                    f"{self.path} is a program ({program.target.name}), whose weights cannot be"
                    f" read; `lockstep evaluate` and `check` run it with --runtime {PROGRAM}{trust}"
                    f". For other commands, name the run, or its export to onnx ({error})"
                ) from error

    @cached_property
    def _may_be_export(self) -> bool:
        """Whether it is not a run or a checkpoint."""
        return not (is_checkpoint(self.path) or (self.path / "checkpoints").is_dir())

    @cached_property
    def _exported(self) -> "ExportedModel | None":
        """The ONNX model of an export."""
        if not self._may_be_export:
            return None
        from lockstep.inference.runtimes.exported import open_exported

        with self._naming_source():
            return open_exported(self.path)

    @cached_property
    def _program(self) -> "ExportedProgram | None":
        """The program of an export."""
        if not self._may_be_export:
            return None
        from lockstep.inference.programs import find_program

        with self._naming_source():
            return find_program(self.path)

    @cached_property
    def about(self) -> Weights:
        """What is known of the model before it computes: what an exported ONNX model says of
        itself, else the weights, else what a program says whose weights cannot be read."""
        if not self.choice.is_default:
            return self.weights
        refusal = None
        try:
            if self._exported is not None:
                return self._exported.about.apply_choice(self.choice)
        except CheckpointError as error:  # its weights may be readable all the same
            refusal = error
        try:
            return self.weights
        except CheckpointError as error:
            if self._program is None:
                raise (refusal or error) from None
            return self._program.about.apply_choice(self.choice)

    def describe(self, classes: int) -> dict[str, str]:
        """Return what it is, in words."""
        recipe = self.about.recipe
        network = recipe.model if isinstance(recipe.model, str) else "a network without a name"
        if not self.about.tensors:
            network = "an export"
        return {
            "weights": self._named,
            "network": network,
            "classes": format_count(classes or recipe.logits, "class"),
            "images": f"{recipe.eval_crop} x {recipe.eval_crop} pixels",
            "origin": f"from {self.about.origin}",
        }

    def forget(self) -> None:
        """Forget the weights, so that they are read again: something was stored with them."""
        for name in ("weights", "about"):
            self.__dict__.pop(name, None)

    def find_exported_model(self, options: SessionOptions) -> "ExportedModel | None":
        """Return the exported ONNX model to run as it is; None if there is none, or if the native
        runtime computes with its weights."""
        if not self.choice.is_default or options.runtime == NATIVE:
            return None
        is_native = options.execution.backend != DEFAULT_BACKEND or not list_export_runtimes()
        if options.runtime is None and is_native:
            return None
        return self._exported

    def find_export(self, options: SessionOptions) -> "ExportedModel | ExportedProgram | None":
        """Return what to run of an export as it is; None if weights are evaluated.

        Raises `BackendError` if a program is to run with options that change the model.
        """
        runtime = options.runtime
        if not self.choice.is_default:
            if runtime == PROGRAM:
                raise BackendError(
                    f"an exported program cannot be changed; leave out --runtime {PROGRAM}, or the"
                    " options that change the model"
                )
            return None
        model = None if runtime == PROGRAM else self.find_exported_model(options)
        return model or self._find_program_to_run(options)

    def _find_program_to_run(self, options: SessionOptions) -> "ExportedProgram | None":
        """Return the program to run; None if there is none, or if another runtime computes with its
        weights.

        Programs that can run code are run only if the runtime is `PROGRAM`. Raises
        `CheckpointError` if it is, but there is no export.
        """
        program = self._program
        if options.runtime == PROGRAM:
            if program is None:
                raise CheckpointError(
                    f"{self.path!s:.200} is not an export; leave out --runtime {PROGRAM}"
                )
            return program
        is_other = options.runtime not in (None, AUTO)
        if program is None or is_other or options.execution.backend != DEFAULT_BACKEND:
            return None
        is_ready = program.target.runtime() is not None and not program.target.can_run_code
        return program if is_ready else None

    def remark_on_program(self, runtime: str | None) -> list[str]:
        """Return a remark if no runtime was chosen, and the weights of an export are evaluated
        instead of its program."""
        if runtime is not None or self._program is None:
            return []
        return [
            f"evaluating the export's weights; --runtime {PROGRAM} runs its program, if you trust"
            " its author"
        ]

    def choose_weights(self, export: "ExportedModel | ExportedProgram | None") -> Weights:
        """Return the weights, or what an export says of itself, with the names and the threshold
        that are chosen."""
        return self.weights if export is None else export.about.apply_choice(self.choice)
