"""torchvision's recipes: how the weights that it distributes were trained.

Their source is the training script of torchvision's repository, `references/classification`, with
the options that its README gives. Accuracies are those that `torchvision.models.resnet` states for
the weights. Images are read, cropped and resized with Pillow, which filters. All runs were in fp32
on 8 V100. Lockstep has not re-run any of them at full length.
"""

from lockstep.recipes.recipe import Recipe

_TORCHVISION = Recipe(
    conv_init_fan="out",
    fc_bias_init="uniform",
    lr_unit="epoch",
    momentum=0.9,
    precision="fp32",
    crop_attempts=10,
    antialias=True,
)


def resnet50_torchvision_v1() -> Recipe:
    """ResNet-50 v1.5, torchvision's first weights, 90 epochs, step decay: 76.13.

    Source: `train.py --model resnet50` of references/classification with its default options, and
    ResNet50_Weights.IMAGENET1K_V1. Cost: 90 epochs at 224 px; no time is published.

    - Weight decay applies to all trained tensors, those of batch norms included.
    - The code changes the learning rate once an epoch and does not scale it; its README asks for
      linear scaling from 256 images.
    """
    return _TORCHVISION.replace(
        lr=0.1,
        warmup_epochs=0.0,
        lr_decay="step",
        lr_step_epochs=(30, 60),
        weight_decay=1e-4,
        weight_decay_roles=("conv_weight", "bn_scale", "bn_bias", "fc_weight", "fc_bias"),
        label_smoothing=0.0,
    )


def resnet50_torchvision_v2() -> Recipe:
    """ResNet-50 v1.5, torchvision's second weights, 600 epochs at 176 px: 80.858.

    Source: the command in https://github.com/pytorch/vision/issues/3995#issuecomment-1013906621,
    the defaults of train.py, and ResNet50_Weights.IMAGENET1K_V2. Cost: 600 epochs at 176 px; no
    time is published.

    - Every batch is mixed, half of the batches by CutMix. The code mixes an image with the previous
      one in the batch.
    - An epoch has a quarter of the images, each four times with other crops.
    - The published accuracy is that of the moving average.
    - The code changes the learning rate once an epoch.
    """
    return _TORCHVISION.replace(
        epochs=600,
        global_batch_images=1024,
        lr=0.5,
        lr_batch_images=1024,
        warmup_start_lr=0.005,
        weight_decay=2e-5,
        ema_decay=0.99998,
        ema_every_steps=32,
        ema_start="copy",
        ema_scaling="torchvision",
        mixup_alpha=0.2,
        cutmix_alpha=1.0,
        repeated_augmentation=4,
        augmentations=(
            {"name": "trivialaugment_wide", "interpolation": "bilinear"},
            {
                "name": "random_erasing",
                "probability": 0.1,
                "area": (0.02, 0.33),
                "aspect": (0.3, 3.3),
            },
        ),
        image_size=176,
        eval_resize=232,
        eval_crop=224,
    )


def resnet101_torchvision_v2() -> Recipe:
    """ResNet-101, torchvision's second weights, 600 epochs: 81.886.

    Source: https://github.com/pytorch/vision/issues/3995#new-recipe and
    ResNet101_Weights.IMAGENET1K_V2. Cost: 600 epochs at 224 px; no time is published.

    As `resnet50-torchvision-v2`, with larger images and without repeated augmentation.
    """
    return _second_weights("resnet101", size=224)


def resnet152_torchvision_v2() -> Recipe:
    """ResNet-152, torchvision's second weights, 600 epochs: 82.284.

    Source and code: the same as `resnet101-torchvision-v2`. Cost: 600 epochs at 224 px.
    """
    return _second_weights("resnet152", size=224)


def resnext50_32x4d_torchvision_v2() -> Recipe:
    """ResNeXt50-32x4d, torchvision's second weights, 600 epochs: 81.198.

    Source and code: the same as `resnet101-torchvision-v2`. Cost: 600 epochs at 224 px.
    """
    return _second_weights("resnext50-32x4d", size=224)


def resnext101_32x8d_torchvision_v2() -> Recipe:
    """ResNeXt101-32x8d, torchvision's second weights, 600 epochs at 176 px: 82.834.

    Source: https://github.com/pytorch/vision/issues/3995#new-recipe-with-fixres and
    ResNeXt101_32X8D_Weights.IMAGENET1K_V2. Cost: 600 epochs at 176 px; no time is published.

    As `resnet50-torchvision-v2`, without repeated augmentation.
    """
    return _second_weights("resnext101-32x8d", size=176)


def wide_resnet50_2_torchvision_v2() -> Recipe:
    """ResNet-50-2 (wide), torchvision's second weights, 600 epochs at 176 px: 81.602.

    Source and code: the same as `resnext101-32x8d-torchvision-v2`. Cost: 600 epochs at 176 px.
    """
    return _second_weights("wide_resnet50_2", size=176)


def wide_resnet101_2_torchvision_v2() -> Recipe:
    """ResNet-101-2 (wide), torchvision's second weights, 600 epochs: 82.51.

    Source and code: the same as `resnet101-torchvision-v2`. Cost: 600 epochs at 224 px.
    """
    return _second_weights("wide_resnet101_2", size=224)


def resnext101_32x4d_torchvision_v2() -> Recipe:
    """ResNeXt101-32x4d as `resnet50-torchvision-v2`, 600 epochs at 176 px: no published accuracy.

    Source: Lockstep's own; the fields are torchvision's for ResNet-50. Cost: 600 epochs at 176 px.
    """
    return resnet50_torchvision_v2().replace(model="resnext101-32x4d")


def _second_weights(model: str, size: int) -> Recipe:
    """Return the recipe of another model's second weights, trained on images of this size."""
    return resnet50_torchvision_v2().replace(
        model=model, image_size=size, eval_resize=232, eval_crop=224, repeated_augmentation=1
    )
