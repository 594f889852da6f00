"""Names that other programs use for Lockstep's fields and options, so that a message can name the
right one.

The names are from torchvision's and timm's training scripts, Keras, Ultralytics, fastai and
NVIDIA's examples.
"""

import difflib
import shlex
from collections.abc import Collection

_FIELDS = {
    "accumulation_steps": (
        "accum accum_iter accumulate accumulate_grad_batches grad_accum grad_accum_steps "
        "gradient_accumulation gradient_accumulation_steps"
    ),
    "antialias": "resize_antialias",
    "augmentations": (
        "aa aug augment augmentation auto_augment autoaugment color_jitter cutout data_augmentation"
        " grayscale_prob gaussian_blur_prob ra rand_augment randaugment random_erase random_erasing"
        " reprob three_augment transforms trivial_augment"
    ),
    "batch_norm": "sync_batchnorm sync_bn syncbn",
    "beta1": "adam_beta1 beta_1 betas opt_betas",
    "beta2": "adam_beta2 alpha beta_2 rho rmsprop_alpha",
    "bn_epsilon": "batchnorm_eps bn_eps eps epsilon",
    "bn_momentum": "batchnorm_mom batchnorm_momentum bn_mom",
    "clip_norm": "clip_grad clip_grad_norm global_clipnorm gradient_clip_val max_grad_norm",
    "compile": "jit torchcompile",
    "crop": "crop_mode crop_type random_crop train_crop_mode",
    "crop_area": "crop_scale min_random_area random_resized_crop_scale scale",
    "crop_aspect": "aspect aspect_ratio ratio",
    "device": "gpu_id",
    "ema_decay": "ema model_ema model_ema_decay",
    "ema_every_steps": "model_ema_steps",
    "epochs": "epoch max_epochs n_epoch n_epochs nb_epochs num_epochs total_epochs train_epochs",
    "dlll_file": "dllogger_log log_filename raport_file report_file",
    "early_stopping_epochs": (
        "early_stopping early_stopping_rounds early_stopping_patience patience"
    ),
    "eval_crop": "test_size val_crop val_crop_size val_image_size val_size",
    "eval_flips": "flip_test hflip_tta lr_tta test_flip tta",
    "eval_resize": "crop_pct data_val_resize resize resize_size val_resize val_resize_size",
    "evaluate_every_epochs": "eval_every eval_interval val_freq val_interval",
    "flip_probability": "flip fliplr hflip random_mirror",
    "frozen": "freeze freeze_backbone freeze_layers freezing unfreeze",
    "global_batch_images": (
        "b batch batch_size batchsize bs global_batch global_batch_size mini_batch_size"
        " minibatch_size per_device_train_batch_size total_batch_size train_batch_size"
    ),
    "image_size": (
        "crop_size data_image_size image_shape img_size imgsz input_shape input_size resolution"
        " size train_crop_size"
    ),
    "class_reduction": "bce_sum",
    "image_sizes": "progressive_resizing progressive_sizes resolutions train_sizes",
    "class_weights": "class_weight loss_weight loss_weights",
    "cutmix_alpha": "cutmix",
    "dropout": "classifier_dropout drop drop_rate dropout_rate head_dropout",
    "interpolation": "interp interpolation_mode resample resampling resize_interpolation",
    "keep_checkpoints": "checkpoint_hist keep_last max_to_keep save_total_limit",
    "label_smoothing": "label_smooth smoothing",
    "layout": "channels_last data_format data_layout memory_format",
    "loader": "data_backend dataloader",
    "loader_batches": "prefetch prefetch_factor",
    "loader_threads": (
        "dali_threads data_nthreads data_workers j num_threads num_workers nworkers threads workers"
    ),
    "log_every_steps": (
        "disp_batches log_every log_every_n_steps log_interval logging_steps print_freq"
        " print_interval"
    ),
    "logits": "class_count classes n_classes nb_classes nc num_class num_classes num_labels",
    "loss": "bce bce_loss criterion loss_fn",
    "loss_scale": "static_loss_scale",
    "loss_scaling": "dynamic_loss_scale",
    "lr": "base_lr eta initial_lr lr0 lr_base lrate learn_rate learning_rate learningrate max_lr",
    "lr_batch_images": "lr_base_size",
    "lr_decay": "lr_policy lr_schedule lr_scheduler sched schedule scheduler",
    "lr_depth_decay": "layer_decay layer_wise_decay layerwise_decay llrd lr_layer_decay",
    "lr_end": "end_lr eta_min final_lr lr_min lrf min_lr",
    "lr_multipliers": "discriminative_lr head_lr lr_mult lr_mults lr_multiplier param_groups",
    "lr_step_epochs": "decay_epochs decay_milestones lr_milestones lr_steps milestones",
    "lr_step_factor": "decay_rate gamma lr_factor lr_gamma",
    "lr_unit": "sched_on_updates",
    "mix_probability": "mixup_prob",
    "mix_switch_probability": "mixup_switch_prob",
    "mixup_alpha": "mixup",
    "mixup_coefficient": "mixup_mode",
    "model": "a architecture backbone arch model_name net network",
    "momentum": "mom",
    "nvidia_report_file": "report",
    "optimizer": "opt optim",
    "optimizer_epsilon": "adam_epsilon opt_eps rmsprop_eps",
    "quantisation": "int8 qat quantization quantize",
    "precision": "amp amp_dtype bf16 bfloat16 dtype float16 fp16 fp32 half mixed_precision tf32",
    "recompute": "activation_checkpointing grad_checkpointing gradient_checkpointing",
    "repeated_augmentation": "aug_repeats num_repeats ra_reps ra_sampler repeated_aug",
    "save_every_steps": (
        "checkpoint_every recovery_interval save_every save_freq save_frequency save_interval"
        " save_steps"
    ),
    "sampling": "balanced_sampler class_sampling oversample oversampling sampler weighted_sampler",
    "seed": "manual_seed random_seed rng_seed",
    "sparsity": "asp prune pruning sparse",
    "stochastic_depth": "drop_connect drop_path drop_path_rate droppath stochastic_depth_prob",
    "stop_after_epochs": "run_epochs",
    "stop_after_steps": "max_steps run_iter run_steps",
    "target_threshold": "bce_target_thresh",
    "train_only": "no_val skip_validation training_only",
    "training_interpolation": "random_interpolation train_interpolation",
    "vertical_flip_probability": "flipud random_vertical_flip vertical_flip vflip",
    "warmup_epochs": "lr_warmup lr_warmup_epochs warm_up warm_up_epochs warmup warmup_length",
    "warmup_start_lr": "lr_warmup_decay warmup_lr warmup_lr_init",
    "weight_decay": "l2 wd weightdecay",
    "zero_init_last_bn": "bn_gamma_init0 zero_gamma zero_init_last zero_init_residual",
}
_OPTIONS = {
    "--backend": "engine framework",
    "--batch": "b batch_size bs",
    "--data": "data_dir data_path data_root dataset dataset_dir imagenet input input_dir",
    "--loader": "data_backend dataloader",
    "--logger": "log_wandb report_to use_wandb wandb",
    "--out": (
        "experiment log_dir logdir model_dir o output output_dir results_dir run run_dir save_dir"
        " workspace"
    ),
    "--profile": "trace",
    "--recipe": "cfg config hyp yaml",
    "--split": "val_ratio val_share val_split validation_split",
    "--weights": (
        "checkpoint ckpt finetune fine_tune from_pretrained init_checkpoint init_from"
        " initial_checkpoint load load_weights pretrained"
    ),
}
_ADVICE = {
    "A run resumes by itself: lockstep train --out RUN": (
        "auto_resume continue load_epoch restart resume resume_from"
    ),
    "One process for each GPU: lockstep launch -n N -- train ...": (
        "devices gpus n_gpus ngpus nproc nproc_per_node num_gpus"
    ),
    "Use another command: lockstep evaluate RUN --data DATA": (
        "eval eval_only evaluate only_inference test_only validate"
    ),
}
_REMARKS = {"global_batch_images": " (images of a step, over all ranks)"}


def _invert(table: dict[str, str]) -> dict[str, str]:
    inverse: dict[str, str] = {}
    for meaning, words in table.items():
        inverse |= dict.fromkeys(words.split(), meaning)
    return inverse


_FIELD_BY_WORD = _invert(_FIELDS)
_OPTION_BY_WORD = _invert(_OPTIONS)
_ADVICE_BY_WORD = _invert(_ADVICE)


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def suggest_fields(name: str, known: Collection[str]) -> list[str]:
    """Return the fields of `known` that a name can mean, the most likely first: at most three, or
    none.

    >>> suggest_fields("Batch-Size", ["epochs", "global_batch_images"])
    ['global_batch_images']
    >>> suggest_fields("epoch", ["epochs", "seed"])
    ['epochs']
    """
    plain = _plain(name)
    if plain in known:
        return [plain]
    if _FIELD_BY_WORD.get(plain) in known:
        return [_FIELD_BY_WORD[plain]]
    words = difflib.get_close_matches(plain, [*known, *_FIELD_BY_WORD], n=5, cutoff=0.75)
    words = words or difflib.get_close_matches(plain, list(known), n=3, cutoff=0.6)
    fields = dict.fromkeys(word if word in known else _FIELD_BY_WORD[word] for word in words)
    return [field for field in fields if field in known][:3]


def suggest_setting(name: str, value: str, known: Collection[str]) -> str:
    """Return a sentence that suggests a field instead of an unknown one; "" if none is similar."""
    suggestions = [
        f"--set {shlex.quote(f'{field}={value}')}{_REMARKS.get(field, '')}"
        for field in suggest_fields(name, known)
    ]
    return f"Did you mean {' or '.join(suggestions)}?" if suggestions else ""


def suggest_option(
    option: str, value: str, options: Collection[str], known: Collection[str]
) -> str:
    """Return a sentence that suggests what to type instead of an unknown option; "" if none is
    similar.

    `options` are the options of the command, `known` the fields that it can set.
    """
    plain = _plain(option)
    is_split = _OPTION_BY_WORD.get(plain) == "--split" and "--step" in options
    if _OPTION_BY_WORD.get(plain) in options and not is_split:  # `data show` takes train or val
        return f"Did you mean {_OPTION_BY_WORD[plain]} {value}?"
    names_weights = plain in ("run", "weights") or _OPTION_BY_WORD.get(plain) == "--weights"
    if names_weights and "--checkpoint" in options:
        return f"Give a run or a file of weights without an option: {value}"
    if plain in _ADVICE_BY_WORD and "--resume-from" in options:  # only train has this option
        return _ADVICE_BY_WORD[plain]
    # If an option of the command is similar, the parser's message names it.
    near = difflib.get_close_matches(option, list(options), n=1, cutoff=0.75)
    return "" if near else suggest_setting(plain, value, known)
