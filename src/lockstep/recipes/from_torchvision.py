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
    - The code changes the learning rate once an epoch. It does not scale it; its README asks for
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
