"""Operations and bytes of an image: published counts, PyTorch's own shapes, and sums computed by
hand."""

import math

import pytest

from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.models.operations import Work, forward_macs, layers, limit_images_per_sec, work

# torchvision's documentation, "GFLOPS" of its weights at 224 px (multiply-adds, in 1e9).
PUBLISHED_GMACS = {
    "resnet18": 1.81,
    "resnet34": 3.66,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "resnext50-32x4d": 4.23,
    "resnext101-32x8d": 16.41,
    "resnext101-64x4d": 15.46,
    "wide_resnet50_2": 11.40,
    "wide_resnet101_2": 22.75,
}


@pytest.mark.parametrize("name", PUBLISHED_GMACS)
def test_multiply_adds_are_those_that_torchvision_publishes(name: str) -> None:
    result = forward_macs(MODELS[name], 224, 1000) / 1e9
    assert result == pytest.approx(PUBLISHED_GMACS[name], abs=0.005)


def test_multiply_adds_of_v1_and_of_resnext_are_those_of_their_papers() -> None:
    # arXiv:1512.03385, table 1.
    assert forward_macs(MODELS["resnet50-v1"], 224, 1000) / 1e9 == pytest.approx(3.8, abs=0.07)
    # ResNeXt-101 32x4d: 8.03 GMAC with batch norm and pooling (timm: 8.01).
    assert forward_macs(MODELS["resnext101-32x4d"], 224, 1000) / 1e9 == pytest.approx(8.0, abs=0.04)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet50", 224),
        ("resnet50-v1", 97),
        ("resnet34", 32),
        ("resnext101-32x4d", 97),
        ("seresnext26t-32x4d", 97),
        ("resnetblur50", 32),
        ("resnetblur50", 97),
    ],
)
def test_layers_are_those_that_pytorch_computes(name: str, size: int) -> None:
    torch = pytest.importorskip("torch")
    from lockstep.backends.torch.model import Model
    from lockstep.recipes import Recipe

    seen: list[tuple[int, int, int, int]] = []

    def note(module: object, inputs: tuple[object], output: object) -> None:
        entering = inputs[0]
        weight = module.weight
        pixels = math.prod(output.shape[2:])
        seen.append((weight.numel() * pixels, entering.numel(), output.numel(), weight.numel()))

    with torch.device("meta"):
        model = Model(MODELS[name], Recipe(model=name)).eval()
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.register_forward_hook(note)
        model(torch.empty(1, 3, size, size))
    sizes = [
        (layer.macs, layer.inputs, layer.outputs, layer.weights)
        for layer in layers(MODELS[name], size, 1000)
    ]
    assert sorted(sizes) == sorted(seen)


TINY = ModelSpec(block="basic", layers=(1, 1, 1, 1), stem_width=2, widths=(2, 2, 2, 2), expansion=1)


def test_a_small_model_by_hand() -> None:
    # 32 px: the stem gives 16 x 16 pixels, the pool 8 x 8, the stages 8, 4, 2 and 1. A stem pixel
    # is 7*7*3*2 multiply-adds.
    stem = 7 * 7 * 3 * 2 * 16**2
    first = 2 * (9 * 4 * 8**2)
    others = sum(2 * (9 * 4 * side**2) + 4 * side**2 for side in (4, 2, 1))
    classifier = 2 * 10
    assert forward_macs(TINY, 32, 10) == stem + first + others + classifier
    forward = work(TINY, 32, 10, precision="fp32", batch=1, training=False)
    assert forward.flops == 2 * (stem + first + others + classifier)
    training = work(TINY, 32, 10, precision="fp32", batch=1, training=True)
    assert training.flops == 3 * forward.flops - 2 * stem


def test_bytes_of_a_small_models_inference_by_hand() -> None:
    values = 3 * 32**2 + 2 * 16**2  # the stem's input and output
    values += (
        4 * (2 * 8**2) + 2 * 8**2
    )  # two convolutions of the first block, each in and out; the other side of its addition
    for side in (4, 2, 1):
        before = 2 * (2 * side) ** 2
        after = 2 * side**2
        values += (
            (before + after) + 2 * after + (before + after) + after
        )  # two convolutions, the shortcut, the addition
    values += 2 + 10
    weights = sum(
        math.prod(t.shape) for t in TINY.list_tensors(10) if t.role in ("conv_weight", "fc_weight")
    )
    for batch in (1, 8):
        least = work(TINY, 32, 10, precision="bf16", batch=batch, training=False)
        assert least.bytes == 2 * values + 2 * weights / batch


def test_training_moves_the_bytes_of_its_kernels() -> None:
    convolutions = list(layers(TINY, 32, 10))[:-1]
    inputs = sum(layer.inputs for layer in convolutions)
    outputs = sum(layer.outputs for layer in convolutions)
    added = 2 * (8**2 + 4**2 + 2**2 + 1)
    # In order: forward; its batch norm; back through batch norm; the gradient of the input, except
    # that of the images; the gradient of the kernel.
    values = (
        (inputs + outputs)
        + 3 * outputs
        + 5 * outputs
        + (outputs + inputs)
        - (3 * 32**2 + 2 * 16**2)
        + (outputs + inputs)
    )
    values += 3 * (2 + 10) + 2 * added
    weights = sum(layer.weights for layer in layers(TINY, 32, 10))
    parameters = sum(math.prod(t.shape) for t in TINY.list_tensors(10) if t.is_trained)
    least = work(TINY, 32, 10, precision="fp32", batch=4, training=True)
    assert least.bytes == 4 * values + (3 * weights * 4 + 20 * parameters) / 4


def test_half_precision_halves_the_bytes_of_activations_alone() -> None:
    single, half = (
        work(MODELS["resnet50"], 224, 1000, precision=p, batch=10**9, training=True)
        for p in ("fp32", "bf16")
    )
    assert single.flops == half.flops
    assert single.bytes / half.bytes == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize(("gemm", "copy", "limit"), [(100, 1000, 50.0), (1000, 10, 100.0)])
def test_the_limit_is_the_lower_of_the_two(gemm: float, copy: float, limit: float) -> None:
    assert limit_images_per_sec(Work(flops=2e9, bytes=1e8), gemm, copy) == pytest.approx(limit)
