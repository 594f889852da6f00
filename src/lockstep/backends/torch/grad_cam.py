"""Grad-CAM with PyTorch: where a stage's features support a class."""

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.backends.shared.explained_stage import choose_stage
from lockstep.backends.torch.engine import canonical_tensors, copy_into
from lockstep.backends.torch.model import Model
from lockstep.backends.torch.world import TorchWorld
from lockstep.recipes import Recipe


class Explainer:
    """Weights in float32, without quantisation, whose stages can be differentiated."""

    def __init__(self, recipe: Recipe, tensors: dict[str, np.ndarray], world: TorchWorld) -> None:
        self._device = world.torch_device
        self._model = Model(recipe.spec, recipe)
        copy_into(canonical_tensors(self._model), tensors, "weights")
        self._model.to(self._device).eval().requires_grad_(False)
        self._kept = torch.zeros(0)
        self._mean, self._std = (
            torch.tensor(values, device=self._device)[:, None, None]
            for values in (recipe.mean, recipe.std)
        )

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self._kept = output.detach().requires_grad_()
        return self._kept

    def heat(self, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return Grad-CAM (arXiv:1610.02391) of the last stage that is large enough: float32
        [N, height, width] of its output, at least 0.

        `images` are uint8 [N, size, size, 3], `classes` int64 [N]: the output of each image to
        explain.
        """
        stage = self._model.stage(choose_stage(min(images.shape[1:3])))
        pixels = torch.from_numpy(images).to(self._device).permute(0, 3, 1, 2).float()
        with (
            stage.register_forward_hook(self._keep),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            logits = self._model((pixels - self._mean) / self._std)
            chosen = logits.gather(1, torch.from_numpy(classes).to(self._device)[:, None]).sum()
        (gradient,) = torch.autograd.grad(chosen, self._kept)
        weights = gradient.mean(dim=(2, 3), keepdim=True)
        return (weights * self._kept.detach()).sum(dim=1).relu().cpu().numpy()
