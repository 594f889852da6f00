"""FFCV's recipe for ImageNet with the most epochs.

Its source is https://github.com/libffcv/ffcv-imagenet: README.md at e97289f, train_imagenet.py and
rn50_configs/rn50_88_epochs.yaml. Lockstep has not re-run it at full length.
"""

from lockstep.recipes.fields.updates import NOT_NAMED_BN
from lockstep.recipes.recipe import Recipe


def resnet50_ffcv_88ep() -> Recipe:
    """ResNet-50 v1.5 with blur, FFCV, 88 epochs at 160 to 192 px: 78.4.

    Source: the README of libffcv/ffcv-imagenet at e97289f and its rn50_88_epochs.yaml. Cost: 77
    minutes on 8 A100.

    - The network blurs in front of every convolution of stride 2 but the first one.
    - The rate rises for 2 epochs and falls linearly to 0.
    - Images have 160 px until epoch 70 and 192 px from epoch 71, counted from 0: the code changes
      the size between epochs 65 and 76, in multiples of 32.
    - The code excludes parameters named "bn" from weight decay and so decays the batch norms of
      shortcuts, `downsample.1`.
    - Logits are the mean of those of the image and of its mirror image.
    - Evaluation has 256 px, as in the configuration. The README says 224.
    - FFCV reads images that were stored with a longer side of at most 500 pixels, half of them
      compressed again. It resizes by the mean over areas; the nearest filter here is Pillow's.
    """
    return Recipe(
        model="resnet50-ffcv",
        conv_init_fan="out",
        fc_bias_init="uniform",
        epochs=88,
        global_batch_images=4096,
        lr=1.7,
        lr_scaling="none",
        warmup_epochs=2.0,
        warmup_start_lr=1.7e-4,
        lr_decay="linear",
        momentum=0.9,
        weight_decay=1e-4,
        weight_decay_roles=NOT_NAMED_BN,
        loss_scaling="dynamic",
        loss_scale=65536.0,
        loss_scale_growth_steps=2000,
        crop_attempts=10,
        antialias=True,
        image_sizes=((0, 160), (71, 192)),
        eval_resize=293,
        eval_crop=256,
        eval_flips=True,
    )
