"""Commands of NVIDIA's documents and scripts, and what they compute. Expected values are those of
the documents."""

import shlex
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lockstep.recipes.nvidia.commands import find_changes
from lockstep.recipes.published import NVIDIA_RECIPES, RECIPES
from lockstep.recipes.schedule import learning_rates
from tests.lines import read_table
from tests.recipes.cases import build_recipe, translate_text

RESNEXT = (
    "python ./multiproc.py --nproc_per_node 8 ./launch.py --model resnext101-32x4d --precision {}"
    " --mode convergence --platform DGXA100 /imagenet --workspace W {}"
)
TENSORFLOW = (
    "mpiexec --allow-run-as-root --bind-to socket -np 8 python3 main.py --arch=resnet50"
    " --mode=train_and_evaluate --iter_unit=epoch --num_iter={} --batch_size=256 --warmup_steps=100"
    " --cosine_lr --label_smoothing 0.1 --lr_init=0.256 --lr_warmup_epochs={} --momentum=0.875"
    " --weight_decay=3.0517578125e-05 --weight_init=fan_in --amp --static_loss_scale 128"
    " --data_dir=D --results_dir=R"
)
PADDLE = "python -m paddle.distributed.launch --gpus=0,1,2,3,4,5,6,7 train.py --epochs {} {}"
PADDLE_AMP = "--amp --scale-loss 128.0 --use-dynamic-loss-scaling --data-layout NHWC"

DALI: dict[str, Any] = {
    "eval_antialias": False,
    "eval_side_rounding": "nearest",
    "eval_offset_rounding": "up",
}
DALI |= {"eval_sampling": "half_pixel_symmetric"}

PUBLISHED: list[tuple[str, str, dict[str, Any]]] = [
    (
        RESNEXT.format("AMP", "--epochs 90 --mixup 0.0 --data-backend dali-cpu"),
        "resnext101-32x4d-pytorch-90ep",
        DALI,  # the recipe evaluates with Pillow, as the code's configuration does
    ),
    # Its configuration uses the loader of PyTorch: Pillow, and ten attempts to draw a crop.
    (
        RESNEXT.format("AMP", ""),
        "resnext101-32x4d-pytorch-250ep",
        {"antialias": True, "crop_attempts": 10},
    ),
    (
        RESNEXT.format("TF32", "--epochs=90 --mixup=0 --data-backend=dali-gpu"),
        "resnext101-32x4d-pytorch-90ep",
        {"precision": "tf32"} | DALI,
    ),
    (TENSORFLOW.format(90, 5), "resnet50-tensorflow-90ep", {}),
    (TENSORFLOW.format("250 --mixup=0.2", 5), "resnet50-tensorflow-250ep", {}),
    (
        "bash training/AMP/DGXA100_RN50_AMP_90E.sh R D",
        "resnet50-tensorflow-90ep",
        {"warmup_epochs": 8},
    ),
    (
        "bash DGX2_RN50_AMP_90E.sh R D",
        "resnet50-tensorflow-90ep",
        {"warmup_epochs": 8, "global_batch_images": 4096},
    ),
    (
        "bash DGX1_RN50_FP32_250E.sh R D",
        "resnet50-tensorflow-fp32-250ep",
        {"warmup_epochs": 8, "precision": "tf32"},
    ),
    (
        "bash DGXA100_RNxt101-32x4d_AMP_90E.sh R D",
        "resnext101-32x4d-tensorflow-90ep",
        {"warmup_epochs": 8},
    ),
    (
        "bash DGX1_RNxt101-32x4d_AMP_250E.sh R D",
        "resnext101-32x4d-tensorflow-250ep",
        {"warmup_epochs": 8},
    ),
    (PADDLE.format(90, PADDLE_AMP), "resnet50-paddle-90ep", {}),
    (PADDLE.format(50, PADDLE_AMP), "resnet50-paddle-50ep", {}),
    (PADDLE.format(90, ""), "resnet50-paddle-90ep", {"precision": "tf32"}),
    (
        PADDLE.format(
            90, f"{PADDLE_AMP} --from-pretrained-params P --asp --prune-model --mask-algo mask_1d"
        ),
        "resnet50-paddle-asp-90ep",
        {},
    ),
    ("./runner -n 8 -b 208 --model-prefix model", "resnet50-mxnet-90ep", {}),
    ("bash examples/RN50_FP32_8GPU.sh", "resnet50-mxnet-fp32-90ep", {}),
]


@pytest.mark.parametrize(("command", "name", "expected"), PUBLISHED)
def test_published_commands_are_recipes(command: str, name: str, expected: dict[str, Any]) -> None:
    translation = translate_text(command)
    assert (translation.not_carried, translation.unknown) == ((), ())
    if expected:
        assert find_changes(build_recipe(translation), RECIPES[name]().replace(**expected)) == {}
    else:
        assert (translation.recipe, translation.changes) == (name, {})


def test_options_that_are_left_out_have_the_defaults_of_the_script() -> None:
    recipe = build_recipe(translate_text("python main.py /imagenet"))
    rates = learning_rates(recipe, steps_per_epoch=1)
    np.testing.assert_allclose(rates, np.repeat([0.1, 0.01, 0.001, 1e-4], [30, 30, 20, 10]))
    assert (recipe.model, recipe.global_batch_images, recipe.precision) == ("resnet50", 256, "tf32")
    assert (recipe.momentum, recipe.weight_decay, recipe.label_smoothing) == (0.9, 1e-4, 0)


def test_the_later_runner_of_mxnet_has_its_own_schedule() -> None:
    options = "--arch resnetv1 --mixup 0.2 --lr-schedule multistep --lr-steps 30,60 -e 90"
    recipe = build_recipe(translate_text(f"runner --ngpus 4 -b 128 {options}"))
    rates = learning_rates(recipe, steps_per_epoch=1)
    np.testing.assert_allclose(rates[:5], 0.512 * np.arange(5) / 5)  # 0.256 at 256 images
    np.testing.assert_allclose(rates[5:], 0.512 * np.repeat([1, 0.256, 0.256**2], [25, 30, 30]))
    assert (recipe.model, recipe.mixup_pairing, recipe.zero_init_last_bn) == (
        "resnet50-v1",
        "reverse",
        True,
    )


@pytest.mark.parametrize(
    ("command", "channels"),
    [
        ("runner -n 8 -b 208", 4),
        ("runner -n 8 -b 208 --no-dali", 3),
        ("runner -n 8 -b 96 --dtype float32", 3),
        ("runner --ngpus 8 -b 192", 4),
        ("runner --ngpus 8 -b 192 --data-backend mxnet", 3),
        ("python train.py --network resnet-v1b-fl --dtype float16", 3),
        ("python train.py --asp", 4),
        ("python train.py --asp --image-shape 3,224,224", 3),
    ],
)
def test_the_stem_has_the_channels_of_the_images(command: str, channels: int) -> None:
    assert build_recipe(translate_text(command)).stem_channels == channels


@pytest.mark.parametrize(
    "command", ["python main.py --batch_size 8 --dali", "runner --ngpus 8 -b 192"]
)
def test_images_that_dali_evaluates_have_its_geometry(command: str) -> None:
    recipe = build_recipe(translate_text(command))
    assert {name: getattr(recipe, name) for name in DALI} == DALI


def test_a_number_of_batches_is_a_part_of_ninety_epochs() -> None:
    command = (
        "python main.py --mode=train --iter_unit=batch --num_iter=1000 --batch_size=256"
        " --data_dir=D"
    )
    translation = translate_text(command)
    assert (translation.not_carried, build_recipe(translation).epochs) == ((), 90)
    assert "stop_after_steps=1000" in translation.command
    words = shlex.join(translate_text(f"{command} --run_iter 300").command)
    assert "stop_after_steps=300" in words
    assert "stop_after_epochs" not in words
    (dropped,) = translate_text(command.replace("train", "evaluate")).not_carried
    assert (dropped.words, dropped.reason) == ("--iter_unit batch", "all images are evaluated")


ANSWERED = """
python main.py --raport-file R D | --raport-file R | dlll_file=R
python main.py --evaluate --raport-file R D | --raport-file R | `lockstep evaluate --json`
python main.py --prof 20 --raport-file R D | --raport-file R | `lockstep benchmark convert
python main.py --prof 20 D | --prof 20 | benchmark steps 20
python main.py --batch_size 8 --log_filename R | --log_filename R | dlll_file=R
python main.py --batch_size 8 --mode evaluate --log_filename R
  | --log_filename R | `lockstep evaluate --json`
python main.py --batch_size 8 --warmup_steps 9 | --warmup_steps 9 | training does not use it
train.py --report-file R --asp | --report-file R | dlll_file=R
train.py --run-scope eval_only --report-file R --asp | --report-file R | `lockstep evaluate --json`
runner -n 8 -b 208 --report R | --report R | nvidia_report_file=R
runner -n 1 -b 8 --only-inference --report R | --report R | `lockstep evaluate --json`
mpiexec --bind-to socket -np 8 python3 main.py --batch_size 8 | --bind-to socket | the system places
python main.py --batch_size 8 --mode training_benchmark --xla | --xla | --compile on
python main.py --batch_size 8 --mode predict --xla | --xla | --compile on
torchrun --nnodes 2 --nproc-per-node 4 main.py --prof 9 D
  | --nnodes 2 | a benchmark runs on one machine
python main.py --lr 0.1 --lr 0.2 D | --lr 0.1 | it is overridden later
python main.py --topk 5 D | --topk 5 |
"""


@pytest.mark.parametrize(("command", "words", "reason"), read_table(ANSWERED))
def test_no_option_vanishes(command: str, words: str, reason: str) -> None:
    translation = translate_text(command)
    answers = {
        remark.words: remark.reason
        for remark in (*translation.not_carried, *translation.not_needed)
    }
    answers |= {carried.words: " ".join(carried.becomes) for carried in translation.carried}
    assert answers[words].startswith(reason)


def test_several_machines_are_carried() -> None:
    translation = translate_text(
        "torchrun --nnodes 2 --node_rank 1 --nproc_per_node 8 --master_addr node0 main.py -b 32 D"
    )
    result = shlex.join(translation.command[:9])
    assert result == "launch --nodes 2 --node-rank 1 --rendezvous node0:29500 -n 8"
    assert build_recipe(translation).global_batch_images == 2 * 8 * 32
    assert any("--secret-file" in note for note in translation.notes)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python main.py --arch resnext101-32x4d D", "resnext101-32x4d-pytorch-90ep"),
        (
            "python main.py --arch resnet50 D",
            "resnext101-32x4d-pytorch-90ep",
        ),  # the example has no other model's recipe
        (
            "python main.py --batch_size 32 --arch resnext101-32x4d",
            "resnext101-32x4d-tensorflow-90ep",
        ),
        ("train.py --asp --lr 0.1 --momentum 0.9", "resnet50-paddle-tf32-90ep"),
        ("runner --ngpus 8 -b 192", "resnet50-mxnet-90ep"),
    ],
)
def test_a_command_becomes_a_recipe_of_its_own_example(command: str, name: str) -> None:
    assert translate_text(command).recipe == name


def test_quantisation_is_carried_to_the_pytorch_backend() -> None:
    translation = translate_text("bash scripts/training/train_resnet50_AMP_QAT_10E_DGXA100.sh W P")
    assert (translation.recipe, translation.changes) == ("resnet50-paddle-qat-10ep", {})
    assert shlex.join(translation.command).endswith(
        "train --recipe resnet50-paddle-qat-10ep --data DATA --out RUN --weights W"
    )
    result = [remark.words for remark in translation.not_carried]
    assert result == ["--inference-dir ./inference_qat"]
    translation = translate_text("bash GPU1_RN50_QAT.sh W D R")
    recipe = build_recipe(translation)
    assert (recipe.quantisation, recipe.epochs, recipe.logits, recipe.global_batch_images) == (
        "int8",
        10,
        1001,
        32,
    )
    # The default backend is PyTorch.
    assert (translation.not_carried, "--backend" in translation.command) == ((), False)
    assert "only the PyTorch backend quantises: the command uses it" in translation.notes


def test_a_command_without_quantisation_has_no_quantised_recipe() -> None:
    translation = translate_text("python train.py --epochs 10 --lr 0.00005 --amp --asp")
    assert translation.recipe != "resnet50-paddle-qat-10ep"  # the one with the fewest fields to set
    assert build_recipe(translation).quantisation == "none"


def test_a_batch_is_that_of_a_gpu_and_larger_steps_are_accumulated() -> None:
    translation = translate_text(
        "python launch.py --model resnet50 --precision AMP --mode convergence --platform DGXA100 D"
    )
    assert build_recipe(translation).global_batch_images == 2048
    assert "accumulation_steps=8" in translation.command  # 2048 images on one GPU that takes 256
    assert translation.command[0] == "train"


OTHERS = """
python classify.py --arch resnet50 --pretrained-from-file W --precision AMP --image photo.jpg
  | predict W photo.jpg --set precision=fp16
python main.py --evaluate -b 64 --amp --resume C D
  | evaluate C --data D --batch 64 --set precision=fp16
python checkpoint2model.py --checkpoint-path C --weight-path w.pth
  | convert C w.pth --to torchvision
python model2onnx.py --pretrained-from-file W --output O -b 4 | export W O --to onnx
python export_frozen_graph.py --checkpoint C --output_file O | export C O --to frozen-graph
python export_model.py --from-checkpoint C --trt-inference-dir O | export C O --to paddle-inference
bash infer_resnet50_TF32.sh
  | benchmark inference --backend paddle --model resnet50 --recipe resnet50-paddle-tf32-90ep -n 1 -b
  256 --dtype tf32 --data synthetic -i 16 -e 64 -w 1
bash export_resnet50_AMP.sh C | export C inference --to paddle-inference
./SCORE_FP16.sh model 90
  | evaluate model-0090.params --data DATA --backend mxnet --batch 128 --set precision=fp16
python main.py --mode=training_benchmark --warmup_steps 200 --num_iter 500 --iter_unit batch
  --batch_size 256 --amp
  | benchmark train --backend tensorflow --model resnet50 --recipe resnet50-tensorflow-90ep -n 1 -b
  256 --dtype fp16 --data synthetic -i 100 -e 3 -w 2
python benchmark.py -n 1,4,8 -b 208 --dtype float16 -o R --data-root D -i 100 -e 12 -w 4
  --num-examples 25600
  | benchmark all --backend mxnet --model resnet50 --recipe resnet50-mxnet-90ep -n 1,4,8 -b 208
  --dtype fp16 --data D -i 100 -e 8 -w 4 --num-examples 25600 -o R
./runner --image-shape 3,64,64 --only-inference --model-prefix m --load-epoch 90
  | launch -n 8 -- evaluate m-0090.params --data DATA --backend mxnet --batch 208 --set
  precision=fp16 --set image_size=64
./runner -n 1 --mode val --data-backend mxnet --data-val-resize 250
  | evaluate SOURCE --data DATA --backend mxnet --batch 192 --set precision=fp16 --set
  eval_resize=250 --set eval_side_rounding=down --set eval_offset_rounding=down --set
  eval_sampling=half_pixel --set loader=host
train.py --run-scope eval_only --benchmark --benchmark-steps 100 --benchmark-warmup-steps 300
  --batch-size 8 --amp --image-root D
  | benchmark inference --backend paddle --model resnet50 --recipe resnet50-paddle-90ep -n 1 -b 8
  --dtype fp16 --data D -i 100 -e 1 -w 3
"""


@pytest.mark.parametrize(("command", "expected"), read_table(OTHERS))
def test_other_scripts_have_other_commands(command: str, expected: str) -> None:
    assert shlex.join(translate_text(command).command) == expected


def test_what_has_no_equivalent_is_named_with_its_reason() -> None:
    options = "--optimizer rmsprop --arch efficientnet-b0 --topk 5 --local_rank 0"
    translation = translate_text(f"FLAGS_a=1 FOO=2 python main.py {options} D")
    dropped = ["--arch efficientnet-b0", "--optimizer rmsprop", "FLAGS_a=1", "FOO=2"]
    assert [remark.words for remark in translation.not_carried] == dropped
    assert all(remark.reason for remark in translation.not_carried)
    assert [remark.words for remark in translation.not_needed] == ["--local_rank 0"]


@pytest.mark.parametrize(
    ("command", "ignored"),
    [
        (
            "python train.py --image-root D --prune-model --mask-algo mask_2d_best",
            ["--prune-model", "--mask-algo mask_2d_best"],
        ),
        ("python main.py --static-loss-scale 128 D", ["--static-loss-scale 128"]),
    ],
)
def test_an_option_without_its_other_is_named(command: str, ignored: list[str]) -> None:
    translation = translate_text(command)
    assert [remark.words for remark in translation.not_needed] == ignored
    assert all(
        remark.reason.startswith("NVIDIA's code ignores it without --")
        for remark in translation.not_needed
    )
    assert (build_recipe(translation).sparsity, "loss_scale" in translation.changes) == (
        "none",
        False,
    )


def test_a_value_that_a_field_does_not_take_is_not_carried() -> None:
    (refused,) = translate_text("python main.py --momentum 1.5 D").not_carried
    assert refused.words == "--momentum 1.5"
    assert "momentum" in refused.reason
    for words in (
        "--batch-size many",
        "--batch-size 1e400",
        "--lr nan",
        "--benchmark --benchmark-steps 1.5",
    ):
        (refused,) = translate_text(f"train.py --image-root D {words}").not_carried
        assert words.endswith(refused.words)


def test_the_fields_to_set_make_one_recipe_of_the_other() -> None:
    recipes = [RECIPES[name]() for name in NVIDIA_RECIPES]
    for base, wanted in pairwise([*recipes, recipes[0]]):
        made = base.replace(**find_changes(base, wanted))
        np.testing.assert_allclose(learning_rates(made, 7), learning_rates(wanted, 7), rtol=1e-12)
        assert find_changes(made, wanted) == {}
        assert (made.model, made.precision, made.mean) == (
            wanted.model,
            wanted.precision,
            wanted.mean,
        )
