"""The procedures A1, A2 and A3 of "ResNet strikes back" (arXiv:2110.00476), trained with timm.

Their source is the paper's table of ingredients and hyper-parameters. The rest is what timm 0.5.4
does, and the defaults of its train.py. Lockstep has not re-run any of them at full length.

Notes on all of them:

- The rates of a step are those of timm's cosine, which changes once an epoch and counts from epoch
  0 on, so the rate jumps down where the warm-up ends. train.py adds 10 epochs at the lowest rate,
  which the paper's 600, 300 and 100 epochs do not have.
- timm's LAMB limits the norm of all gradients to 1.
- Every batch is mixed, half of the batches by CutMix, and the first image with the last one.
- A CutMix box has an even side before it is cut off at the edge. In timm 1.0.31 it may be odd.
- MixUp's pixels are not rounded. The default loader of timm, also of 1.0.31, rounds to uint8.
- Training images are resized by a bilinear or bicubic filter, drawn for each image, as train.py
  does by default; the paper names none.
"""

from typing import Any

from lockstep.recipes.recipe import Recipe


def _rand_augment(magnitude: int) -> dict[str, Any]:
    """Return timm's rand-m<magnitude>-mstd0.5-inc1."""
    return {
        "name": "randaugment",
        "dialect": "timm",
        "magnitude": magnitude,
        "magnitude_std": 0.5,
        "increasing": True,
    }


def resnet50_rsb_a1() -> Recipe:
    """ResNet-50 v1.5, "ResNet strikes back" A1, 600 epochs: 80.4.

    Source: arXiv:2110.00476, procedure A1, and timm 0.5.4. Cost: 4.6 days on 4 V100, at 224 px.

    The paper smooths labels by 0.1 in this procedure alone. The threshold of `resnet50-rsb-a2`
    would remove the smoothing, so this recipe has none: targets stay as they are after smoothing
    and mixing.
    """
    return resnet50_rsb_a2().replace(
        epochs=600,
        label_smoothing=0.1,
        target_threshold=0.0,
        mixup_alpha=0.2,
        weight_decay=0.01,
    )


def resnet50_rsb_a2() -> Recipe:
    """ResNet-50 v1.5, "ResNet strikes back" A2, 300 epochs: 79.8.

    Source: arXiv:2110.00476, procedure A2, and timm 0.5.4. Cost: half of `resnet50-rsb-a1`.

    A class is a target of 1 if its share of the mixed image is above 0.2. The paper does not give
    this number; timm's commands for A2 have `--bce-target-thresh 0.2`.
    """
    return Recipe(
        conv_init_fan="out",
        fc_bias_init="uniform",
        zero_init_last_bn=True,
        epochs=300,
        global_batch_images=2048,
        lr=5e-3,
        lr_scaling="none",
        lr_unit="epoch",
        warmup_start_lr=1e-4,
        lr_decay_from="start",
        lr_end=1e-6,
        label_smoothing=0.0,
        loss="binary_cross_entropy",
        target_threshold=0.2,
        stochastic_depth=0.05,
        mixup_alpha=0.1,
        cutmix_alpha=1.0,
        mixup_pairing="reverse",
        optimizer="lamb",
        optimizer_epsilon=1e-6,
        clip_norm=1.0,
        weight_decay=0.02,
        weight_decay_roles=("conv_weight", "fc_weight"),
        loss_scaling="dynamic",
        loss_scale=65536.0,
        loss_scale_growth_steps=2000,
        crop_attempts=10,
        repeated_augmentation=3,
        interpolation="bicubic",
        training_interpolation="random",
        antialias=True,
        eval_resize=235,  # a crop ratio of 0.95
        eval_crop=224,
    ).replace(augmentations=[_rand_augment(magnitude=7)])


def resnet50_rsb_a3() -> Recipe:
    """ResNet-50 v1.5, "ResNet strikes back" A3, 100 epochs at 160 px: 78.1.

    Source: arXiv:2110.00476, procedure A3, and timm 0.5.4. Cost: 15 h on 4 V100, at 160 px.

    A3 has no stochastic depth and no repeated augmentation, and a weaker RandAugment.
    """
    return resnet50_rsb_a2().replace(
        epochs=100,
        lr=8e-3,
        stochastic_depth=0.0,
        repeated_augmentation=1,
        augmentations=[_rand_augment(magnitude=6)],
        image_size=160,
        eval_resize=235,
        eval_crop=224,
    )


def resnext101_32x4d_rsb_a1() -> Recipe:
    """ResNeXt101-32x4d as `resnet50-rsb-a1`, 600 epochs: no published accuracy.

    Source: Lockstep's own; the fields are those of procedure A1. Cost: 600 epochs at 224 px.
    """
    return resnet50_rsb_a1().replace(model="resnext101-32x4d")


def resnext101_32x4d_rsb_a2() -> Recipe:
    """ResNeXt101-32x4d as `resnet50-rsb-a2`, 300 epochs: no published accuracy.

    Source: Lockstep's own; the fields are those of procedure A2. Cost: 300 epochs at 224 px.
    """
    return resnet50_rsb_a2().replace(model="resnext101-32x4d")


def resnext101_32x4d_rsb_a3() -> Recipe:
    """ResNeXt101-32x4d as `resnet50-rsb-a3`, 100 epochs at 160 px: no published accuracy.

    Source: Lockstep's own; the fields are those of procedure A3. Cost: 100 epochs at 160 px.
    """
    return resnet50_rsb_a3().replace(model="resnext101-32x4d")
