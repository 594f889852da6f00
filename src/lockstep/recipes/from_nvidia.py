"""The recipes that NVIDIA published. Each docstring gives source, published accuracy and cost.

They follow NVIDIA's pages. If a page does not give a value, it is taken from NVIDIA's code. If page
and code disagree, the page's value is used and the docstring names the code's. The weight decay of
shortcuts in PyTorch's recipes is an exception: it is the code's. Accuracies are top-1
in percent on ImageNet's 50,000 validation images, ± the spread that the page gives. Lockstep has
not re-run any of these recipes at full length.

Notes on all of them: throughput depends on the loader and the machine of that time. NVIDIA's resize
did not filter (`antialias: false`), while the same DALI code filters today. Evaluation has the
geometry of NVIDIA's code (docs/reference/preprocessing.md).
"""

from typing import Any

from lockstep.recipes.fields.updates import NOT_NAMED_BN
from lockstep.recipes.recipe import Recipe

_SGD_COSINE = Recipe()  # the defaults are the values that NVIDIA's pages have in common
_DALI: dict[str, Any] = {
    "eval_side_rounding": "nearest",
    "eval_offset_rounding": "up",
    "eval_sampling": "half_pixel_symmetric",
}
"""The geometry of DALI's `Resize(resize_shorter=256)` and `CropMirrorNormalize`, in the evaluation
of Paddle and MXNet."""


def resnet50_paddle_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA PaddlePaddle, 90 epochs: 76.93 ± 0.14 (mixed), 76.91 ± 0.13 (TF32).

    Source: NGC "ResNet50 v1.5 for PaddlePaddle" 22.05.1. Cost: about 2 h on 8 A100 (20,267 images/s
    in mixed precision), 13 h on one.

    The learning rate scales linearly from 256 images. The code multiplies by the number of trainers
    instead of the batch, which is the same with 256 images per GPU. Dynamic loss scaling starts
    at 128 and uses the framework's own constants: x2 after 1000 good steps, x0.8 after 2 overflows.
    The code pads images to four channels. An epoch has 625 steps here; the code fills a 626th with
    images that it trains on twice.
    """
    return _SGD_COSINE.replace(
        stem_channels=4,
        global_batch_images=2048,
        loss_scaling="dynamic",
        loss_scale_backoff=0.8,
        loss_scale_backoff_steps=2,
        **_DALI,
    )


def resnet50_paddle_50ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA PaddlePaddle, 50 epochs: 75.96 ± 0.09 (mixed), 76.17 ± 0.11 (TF32).

    Source and code: the same as `resnet50-paddle-90ep`. Cost: 50/90 of that.
    """
    return resnet50_paddle_90ep().replace(epochs=50)


def resnet50_paddle_tf32_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA PaddlePaddle, 90 epochs in TF32: 76.91 ± 0.13.

    Source and code: the same as `resnet50-paddle-90ep`. Cost: about 4 h on 8 A100 (7,955 images/s),
    40 h on one.
    """
    return resnet50_paddle_90ep().replace(precision="tf32", loss_scaling="none")


def resnet50_paddle_tf32_50ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA PaddlePaddle, 50 epochs in TF32: 76.17 ± 0.11.

    Source and code: the same as `resnet50-paddle-tf32-90ep`. Cost: 50/90 of that.
    """
    return resnet50_paddle_tf32_90ep().replace(epochs=50)


def resnet50_paddle_asp_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA PaddlePaddle, 90 more epochs with 2:4 sparsity: 76.72 (mixed), from
    76.92 dense.

    Source: NGC "ResNet50 v1.5 for PaddlePaddle" 22.05.1, "Automatic SParsity", and its script
    train_resnet50_AMP_ASP_90E. Cost: about 2 h on 8 A100, 0.6 % more than without sparsity.

    Start from the weights at the end of `resnet50-paddle-90ep` (`--weights`). mask_1d prunes them,
    except for the classifier; then training repeats with the same hyper-parameters. The stem is
    pruned too, because it has four channels in the code: 53 tensors. `--set stem_channels=3` leaves
    it dense.
    """
    return resnet50_paddle_90ep().replace(sparsity="mask_1d", sparsity_excluded=("fc.weight",))


def resnet50_paddle_qat_10ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA PaddlePaddle, 10 more epochs with quantisation: int8, no published
    accuracy.

    Source: the code at commit 38934f9, its script train_resnet50_AMP_QAT_10E and the README's
    "Quantization Aware Training". Cost: none is published; the 90 epochs without quantisation take
    about 2 h on 8 A100.

    - Start from the weights at the end of `resnet50-paddle-90ep` (`--weights`).
    - The learning rate is 0.00005 in the script, for the 256 images of a GPU. The README prints the
      command without this option, which would train at the 0.256 of the 90 epochs.
    - Warm-up (5 of the 10 epochs) and all other values are those of the 90 epochs, because the
      script sets no others.
    - The code's scales of inputs are moving averages of the largest magnitude, with a decay of 0.9.
      Here they are fixed before the first step, from a number of images that Lockstep chose.
    """
    return resnet50_paddle_90ep().replace(epochs=10, lr=5e-5, quantisation="int8")


def resnet50_mxnet_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA MXNet (2019), 90 epochs, step decay: 76.49 (fp16), 76.67 (fp32).

    Source: the README at commit 0663b67 and its tables. Cost: 3.3 h on 8 V100 (10,263 images/s in
    fp16), 22.9 h on one.

    - Weight decay applies to `*_weight` and `*_gamma`, not to biases.
    - The crop area is from 5 % and the aspect ratio to 4/3, as on the page. The code's DALI
      pipeline used 8 %, its MXNet reader 1.33.
    - Mean and std are those of the code's MXNet reader. Its DALI pipeline used 123.675, 116.28,
      103.53 and 58.395.
    - The warm-up counts updates from 1.
    - MXNet keeps the learning rate inside the velocity. Here it is outside, as in all recipes.
    - The code did not scale the loss, but its gradients were sums over the 208 images of a GPU. For
      a mean, that is a static scale of 208.
    - In fp16 the code pads images to four channels.
    - An epoch has 769 steps here. The code fills a 770th with images that it trains on twice.
    """
    return _SGD_COSINE.replace(
        stem_channels=4,
        global_batch_images=1664,
        lr=0.1,
        warmup_counts_from=1,
        lr_decay="step",
        lr_step_epochs=(30, 60, 80),
        momentum=0.9,
        weight_decay=1e-4,
        weight_decay_roles=("conv_weight", "bn_scale", "fc_weight"),
        label_smoothing=0.0,
        fc_init="as_conv",
        crop_area=(0.05, 1.0),
        mean=(123.68, 116.779, 103.939),
        std=(58.393, 57.12, 57.375),
        loss_scaling="static",
        loss_scale=208.0,
        **_DALI,
    )


def resnet50_mxnet_fp32_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA MXNet (2019), 90 epochs in fp32: 76.67.

    Source and code: the same as `resnet50-mxnet-90ep`, with 96 images on each of 8 GPUs and no
    fourth channel. Cost: 11.1 h on 8 V100 (2,957 images/s), 82 h on one.
    """
    return resnet50_mxnet_90ep().replace(
        stem_channels=3, global_batch_images=768, precision="fp32", loss_scaling="none"
    )


def resnext101_32x4d_pytorch_90ep() -> Recipe:
    """ResNeXt101-32x4d, NVIDIA PyTorch, 90 epochs: 79.47 ± 0.03 (mixed), 79.38 ± 0.07 (TF32).

    Source: NGC "ResNeXt101-32x4d for PyTorch" 21.03.1. Cost: about 5 h on 8 A100 (7,925 images/s in
    mixed precision), 28 h on one.

    - The code changes the learning rate once an epoch.
    - The code warms up for 8 epochs. The page says that it "depends on the total training length",
      from 512 images a step.
    - The code does not scale the learning rate: it takes the scaled rate from its configuration.
    - The code excluded parameters named "bn" from weight decay and so decayed the batch norms of
      shortcuts, `downsample.1`. The page excludes all batch norms: `--set
      'weight_decay_roles=[conv_weight, fc_weight, fc_bias]'`.
    - The code's "static" loss scale of 128 is dynamic: x2 after 100 good steps, x0.5 on overflow.
    - The code's configuration reads images with Pillow, which filters, as evaluation does here. The
      page recommends DALI, which did not filter; training does not here.
    """
    return _SGD_COSINE.replace(
        model="resnext101-32x4d",
        global_batch_images=1024,
        lr_unit="epoch",
        warmup_epochs=8.0,
        warmup_counts_from=1,
        warmup_from_batch_images=512,
        weight_decay=1 / 16384,
        weight_decay_roles=NOT_NAMED_BN,
        fc_bias_init="uniform",
        loss_scaling="dynamic",
        loss_scale_growth_steps=100,
        eval_antialias=True,
    )


def resnext101_32x4d_pytorch_250ep() -> Recipe:
    """ResNeXt101-32x4d, NVIDIA PyTorch, 250 epochs with MixUp: 80.19 ± 0.08 (mixed), 80.27 ± 0.10
    (TF32).

    Source and code: the same as `resnext101-32x4d-pytorch-90ep`. Cost: 250/90 of that.

    MixUp has one coefficient a step (the code draws one on every GPU). Partners are chosen by a
    random permutation within the images of a GPU.
    """
    return resnext101_32x4d_pytorch_90ep().replace(epochs=250, mixup_alpha=0.2)


def resnet50_tensorflow_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA TensorFlow, 90 epochs: 76.93 (mixed), 77.01 (TF32).

    Source: NGC "ResNet-50 v1.5 for TensorFlow" 20.06. Cost: about 2 h on 8 A100 (17,400 images/s
    with XLA), 18 h on one.

    - Padding is SAME. There are 1001 logits and labels 0 to 999.
    - The warm-up lasts 5 epochs, from 512 images a step, as on the page. The scripts in its code
      use 8.
    - The cosine counts from step 0, so the learning rate jumps down where the warm-up ends.
    - The crop area is from 8 %, as on the page, and the aspect ratio to 4/3. Its code uses 5 % and
      1.33.
    - The third std is 57.385 in its code (the other systems: 57.375).
    - Its code decodes JPEGs with a coarser inverse DCT and plain upsampling of colours
      (docs/reference/preprocessing.md has the difference).
    """
    return _SGD_COSINE.replace(
        logits=1001,
        padding="same",
        conv_init="truncated_normal",
        fc_init="as_conv",
        global_batch_images=2048,
        warmup_from_batch_images=512,
        lr_decay_from="start",
        mean=(123.68, 116.28, 103.53),
        std=(58.395, 57.12, 57.385),
        loss_scaling="static",
        eval_side_rounding="float32_down",
        eval_offset_rounding="down",
        eval_sampling="asymmetric",
    )


def resnet50_tensorflow_250ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA TensorFlow, 250 epochs with MixUp: 78.35 (mixed), 78.34 (FP32), on 8
    V100.

    Source and code: the same as `resnet50-tensorflow-90ep`. Cost: 250/90 of that.

    MixUp has one coefficient for every image. Partners are chosen by reversing the batch.
    """
    return resnet50_tensorflow_90ep().replace(
        epochs=250, mixup_alpha=0.2, mixup_coefficient="sample", mixup_pairing="reverse"
    )


def resnet50_tensorflow_tf32_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA TensorFlow, 90 epochs in TF32: 77.01.

    Source and code: the same as `resnet50-tensorflow-90ep`. Cost: about 5 h on 8 A100 (7,000
    images/s with XLA), 40 h on one.
    """
    return resnet50_tensorflow_90ep().replace(precision="tf32", loss_scaling="none")


def resnet50_tensorflow_fp32_90ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA TensorFlow, 90 epochs in fp32: 77.01, on 8 V100.

    Source and code: the same as `resnet50-tensorflow-90ep`, with 128 images on each GPU. Cost:
    about 10 h on 8 V100 (3,170 images/s with XLA), 77 h on one.
    """
    return resnet50_tensorflow_90ep().replace(
        global_batch_images=1024, precision="fp32", loss_scaling="none"
    )


def resnet50_tensorflow_fp32_250ep() -> Recipe:
    """ResNet-50 v1.5, NVIDIA TensorFlow, 250 epochs with MixUp in fp32: 78.34, on 8 V100.

    Source and code: the same as `resnet50-tensorflow-250ep`, with 128 images on each GPU. Cost:
    about 28 h on 8 V100 (3,170 images/s with XLA).
    """
    return resnet50_tensorflow_250ep().replace(
        global_batch_images=1024, precision="fp32", loss_scaling="none"
    )


def resnext101_32x4d_tensorflow_90ep() -> Recipe:
    """ResNeXt101-32x4d, NVIDIA TensorFlow, 90 epochs: 79.20 (mixed).

    Source: the README "ResNext101-32x4d for TensorFlow" of 20.06. In TF32 its batches have 1,024
    images, and it reached 79.38. Cost: about 4 h on 8 A100 (8,500 images/s with XLA), 28 h on one.

    Page and code differ as in `resnet50-tensorflow-90ep`. The code also draws grouped kernels by
    TensorFlow's default (glorot_uniform); here all kernels are drawn alike.
    """
    return resnet50_tensorflow_90ep().replace(model="resnext101-32x4d", weight_decay=1 / 16384)


def resnext101_32x4d_tensorflow_250ep() -> Recipe:
    """ResNeXt101-32x4d, NVIDIA TensorFlow, 250 epochs with MixUp: 80.21 (mixed), 80.21 (FP32), on 8
    V100.

    Source and code: the same as `resnext101-32x4d-tensorflow-90ep`, with 128 images on each GPU (64
    in fp32). Cost: about 21 h on 8 V100 (4,160 images/s).
    """
    return resnet50_tensorflow_250ep().replace(
        model="resnext101-32x4d", weight_decay=1 / 16384, global_batch_images=1024
    )
