"""The expected results of the reference engine: PyTorch's autograd in float64, with torchvision's
architecture and the formulas of the recipe's fields.

Nothing here comes from `lockstep.models` or a backend: the architecture follows from the tensors'
names and shapes. There are N images of H x W pixels and K logits.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data import Batch
from lockstep.models.state import State
from lockstep.recipes import Recipe
from tests.backends.oracle import Arrays, Trained, is_statistic, places, rate_factor, role

Tensors = dict[str, Tensor]


class Network:
    """One forward pass. In training it writes the new running statistics to `statistics`."""

    def __init__(self, tensors: Tensors, recipe: Recipe, training: bool) -> None:
        self.tensors = tensors
        self.recipe = recipe
        self.training = training
        self.statistics: Tensors = {}
        self.blur = recipe.spec.blur

    def logits(self, images_NHWC: np.ndarray) -> Tensor:
        return self.compute_logits(normalise(images_NHWC, self.recipe))

    def compute_logits(
        self,
        x: Tensor,
        kept_features: np.ndarray | None = None,
        kept_blocks: np.ndarray | None = None,
    ) -> Tensor:
        if "conv1.weight" in self.tensors:
            x = F.relu(self.batch_norm(self.convolution(x, "conv1", 2), "bn1"))
        else:
            x = F.relu(self.batch_norm(self.convolution(x, "conv1.0", 2), "conv1.1"))
            x = F.relu(self.batch_norm(self.convolution(x, "conv1.3", 1), "conv1.4"))
            x = F.relu(self.batch_norm(self.convolution(x, "conv1.6", 1), "bn1"))
        if self.blur == "after":
            x = blur_mirrored(F.max_pool2d(x, 3, stride=1, padding=1))
        elif self.recipe.padding in ("same", "flax"):
            x = F.max_pool2d(pad_as_tensorflow(x, 3, 2, -torch.inf), 3, stride=2)
        else:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        depth = 0
        for stage in range(1, 5):
            index = 0
            while f"layer{stage}.{index}.conv1.weight" in self.tensors:
                factors = torch.ones(len(x))
                if kept_blocks is not None:
                    # timm's rule, drop_path_rate * block / (blocks - 1), and its factor
                    rate = self.recipe.stochastic_depth * depth / (kept_blocks.shape[1] - 1)
                    factors = torch.from_numpy(kept_blocks[:, depth]).double() / (1 - rate)
                stride = 2 if stage > 1 and index == 0 else 1
                x = self.block(x, f"layer{stage}.{index}", stride, factors.view(-1, 1, 1, 1))
                index += 1
                depth += 1
        x = x.mean(dim=(2, 3))
        if kept_features is not None:
            x = torch.where(torch.from_numpy(kept_features), x, 0) / (1 - self.recipe.dropout)
        return F.linear(*self.factors(x, "fc"), self.tensors["fc.bias"])

    def factors(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return what a convolution or the classifier multiplies: its input and its weight."""
        return x, self.tensors[f"{name}.weight"]

    def block(self, x: Tensor, name: str, stride: int, factors: Tensor) -> Tensor:
        if f"{name}.conv3.weight" not in self.tensors:
            strides = [stride, 1]
        elif self.recipe.spec.stride_in == "1x1":
            strides = [stride, 1, 1]
        else:
            strides = [1, stride, 1]
        y = x
        for i, step in enumerate(strides, start=1):
            if step == 2 and self.blur == "before":
                y = blur_with_zeros(y)
            own_step = 1 if self.blur == "after" else step
            y = self.batch_norm(self.convolution(y, f"{name}.conv{i}", own_step), f"{name}.bn{i}")
            if i < len(strides):
                y = F.relu(y)
            if step == 2 and self.blur == "after":
                y = blur_mirrored(y)
        if f"{name}.se.fc1.weight" in self.tensors:
            y = y * self.factors_of_channels(y, f"{name}.se")
        if f"{name}.downsample.0.weight" in self.tensors:
            if stride == 2 and self.blur == "before":
                x = blur_with_zeros(x)
            x = self.batch_norm(
                self.convolution(x, f"{name}.downsample.0", stride), f"{name}.downsample.1"
            )
        elif f"{name}.downsample.1.weight" in self.tensors:
            if stride == 2:
                x = F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)
            x = self.batch_norm(
                self.convolution(x, f"{name}.downsample.1", 1), f"{name}.downsample.2"
            )
        return F.relu(factors * y + x)

    def factors_of_channels(self, x: Tensor, name: str) -> Tensor:
        weights = (self.tensors[f"{name}.{layer}.weight"].flatten(1) for layer in ("fc1", "fc2"))
        biases = (self.tensors[f"{name}.{layer}.bias"] for layer in ("fc1", "fc2"))
        (first, second), (first_bias, second_bias) = weights, biases
        hidden = F.relu(F.linear(x.mean(dim=(2, 3)), first, first_bias))
        return torch.sigmoid(F.linear(hidden, second, second_bias))[:, :, None, None]

    def convolution(self, x: Tensor, name: str, stride: int) -> Tensor:
        x, weight = self.factors(x, name)
        kernel = weight.shape[2]
        groups = x.shape[1] // weight.shape[1]
        if self.recipe.padding == "same" or (self.recipe.padding == "flax" and kernel < 7):
            return F.conv2d(
                pad_as_tensorflow(x, kernel, stride, 0.0), weight, stride=stride, groups=groups
            )
        return F.conv2d(x, weight, stride=stride, padding=(kernel - 1) // 2, groups=groups)

    def batch_norm(self, x: Tensor, name: str) -> Tensor:
        scale, bias, old_mean, old_variance = (
            self.tensors[f"{name}.{suffix}"]
            for suffix in ("weight", "bias", "running_mean", "running_var")
        )
        mean = old_mean
        variance = old_variance
        is_trained = any(rate_factor(self.recipe, f"{name}.{kind}") for kind in ("weight", "bias"))
        if self.training and is_trained:
            count = x.numel() // x.shape[1]
            mean = x.mean(dim=(0, 2, 3))
            variance = (x - mean.view(1, -1, 1, 1)).square().mean(dim=(0, 2, 3))
            new = self.recipe.bn_momentum
            unbiased = variance.detach() * count / (count - 1)
            self.statistics[f"{name}.running_mean"] = (1 - new) * old_mean + new * mean.detach()
            self.statistics[f"{name}.running_var"] = (1 - new) * old_variance + new * unbiased
        factor = scale / torch.sqrt(variance + self.recipe.bn_epsilon)
        return (x - mean.view(1, -1, 1, 1)) * factor.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


def blur_mirrored(x: Tensor) -> Tensor:
    """Return every second value of x, blurred: timm's BlurPool2d, of slices."""
    for axis in (2, 3):
        count = x.shape[axis]
        places = torch.arange(0, count, 2)
        before = (places - 1).abs()
        after = torch.where(places + 1 < count, places + 1, places - 1)
        x = (
            x.index_select(axis, before) / 4
            + x.index_select(axis, places) / 2
            + x.index_select(axis, after) / 4
        )
    return x


def blur_with_zeros(x: Tensor) -> Tensor:
    """Return x, blurred, with zeros around it: two means of neighbours, in both directions."""
    x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 2, stride=1)
    return F.avg_pool2d(x, 2, stride=1)


def pad_as_tensorflow(x: Tensor, kernel: int, stride: int, value: float) -> Tensor:
    """Pad for TensorFlow's SAME:
    https://www.tensorflow.org/api_docs/python/tf/nn#notes_on_padding_2"""

    def before_and_after(length: int) -> list[int]:
        total = (
            max(kernel - stride, 0) if length % stride == 0 else max(kernel - length % stride, 0)
        )
        return [total // 2, total - total // 2]

    return F.pad(x, before_and_after(x.shape[3]) + before_and_after(x.shape[2]), value=value)


def normalise(images_NHWC: np.ndarray, recipe: Recipe) -> Tensor:
    x = (images_NHWC.astype(np.float64) - np.array(recipe.mean)) / np.array(recipe.std)
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


def logits(recipe: Recipe, tensors: Arrays, images_NHWC: np.ndarray) -> np.ndarray:
    """Return the logits in evaluation: float64 [N, K]."""
    with torch.no_grad():
        return Network(float64(tensors), recipe, training=False).logits(images_NHWC).numpy()


def train(
    recipe: Recipe, state: State, batches: Sequence[Batch], rates: Sequence[float], parts: int = 1
) -> Trained:
    """Return the expected results of training steps from `state.step` on, one for every batch,
    each
    computed in `parts`."""
    tensors = float64(state.tensors)
    velocity = float64(state.momentum)
    average = float64(state.ema)
    step = state.step
    losses = []
    standing = []
    for batch in batches:
        loss, gradients, places_of_step = _gradients(recipe, tensors, batch, parts)
        for name, gradient in gradients.items():
            factor = rate_factor(recipe, name)
            if not factor:
                continue
            if role(name) in recipe.weight_decay_roles:
                gradient = gradient + recipe.weight_decay * tensors[name]
            velocity[name] = recipe.momentum * velocity[name] + gradient
            move = (
                gradient + recipe.momentum * velocity[name] if recipe.nesterov else velocity[name]
            )
            tensors[name] = tensors[name] - rates[step] * factor * move
        keep = min(recipe.ema_decay, (1 + step) / (10 + step))
        for name, value in average.items():
            norm = name.rpartition(".")[0]
            names = [f"{norm}.weight", f"{norm}.bias"] if is_statistic(name) else [name]
            if any(rate_factor(recipe, other) for other in names):
                average[name] = keep * value + (1 - keep) * tensors[name]
        losses.append(loss)
        standing.append(places_of_step)
        step += 1
    where = np.concatenate(standing)
    end = State(step, _arrays(tensors), _arrays(velocity), _arrays(average))
    return Trained(end, np.array(losses), int((where < 1).sum()), int((where < 5).sum()))


def _gradients(
    recipe: Recipe, tensors: Tensors, batch: Batch, parts: int
) -> tuple[float, Tensors, np.ndarray]:
    """Return the mean loss, its gradients and the labels' ranks, and update the running statistics
    in `tensors`."""
    total = 0.0
    weight = None
    if recipe.class_weights != "none":
        weight = torch.tensor(recipe.class_weights, dtype=torch.float64)
    standing = []
    sums = {
        name: torch.zeros_like(tensor) for name, tensor in tensors.items() if not is_statistic(name)
    }
    for rows in np.split(np.arange(len(batch.labels)), parts):
        leaves = {name: tensors[name].clone().requires_grad_() for name in sums}
        network = Network(tensors | leaves, recipe, training=True)
        x, targets = _inputs_and_targets(recipe, batch, rows)
        kept_features = None if batch.kept_features is None else batch.kept_features[rows]
        kept_blocks = None if batch.kept_blocks is None else batch.kept_blocks[rows]
        logits_NK = network.compute_logits(x, kept_features, kept_blocks)
        loss = _loss(recipe, logits_NK, targets, weight) / parts
        for name, gradient in zip(
            sums, torch.autograd.grad(loss, list(leaves.values())), strict=True
        ):
            sums[name] += gradient
        total += loss.item()
        standing.append(places(logits_NK.detach().numpy(), batch.labels[rows]))
        tensors.update(network.statistics)
    return total, sums, np.concatenate(standing)


def _inputs_and_targets(recipe: Recipe, batch: Batch, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return [n, 3, H, W] and [n, K]: MixUp mixes images and targets (smoothed one-hot vectors) in
    the same way. CutMix pastes boxes, and mixes targets as the batch says."""
    x = normalise(batch.images[rows], recipe)
    one_hot = torch.eye(recipe.logits, dtype=torch.float64)[batch.labels[rows]]
    targets = (1 - recipe.label_smoothing) * one_hot + recipe.label_smoothing / recipe.logits
    if batch.coefficients is None or batch.partners is None:
        return x, targets
    own = torch.from_numpy(batch.coefficients[rows].astype(np.float64))
    partners = torch.from_numpy(batch.partners[rows])
    mixed = own.view(-1, 1, 1, 1) * x + (1 - own.view(-1, 1, 1, 1)) * x[partners]
    if batch.boxes is not None and batch.target_coefficients is not None:
        for i, (top, left, tall, wide) in enumerate(batch.boxes[rows].tolist()):
            box = np.s_[:, top : top + tall, left : left + wide]
            mixed[i][box] = x[partners[i]][box]
        own = torch.from_numpy(batch.target_coefficients[rows].astype(np.float64))
    return mixed, own.view(-1, 1) * targets + (1 - own.view(-1, 1)) * targets[partners]


def _loss(recipe: Recipe, logits_NK: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    if recipe.loss == "cross_entropy":
        return torch.nn.CrossEntropyLoss(weight)(logits_NK, targets)
    if recipe.target_threshold:
        targets = (targets > recipe.target_threshold).double()
    mean = torch.nn.BCEWithLogitsLoss()(logits_NK, targets)
    return mean * recipe.logits if recipe.class_reduction == "sum" else mean


def float64(arrays: Arrays) -> Tensors:
    return {name: torch.from_numpy(np.array(array, np.float64)) for name, array in arrays.items()}


def _arrays(tensors: Tensors) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
