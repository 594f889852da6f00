import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Execution, Recipe, difference, load_recipe
from lockstep.recipes.published import RECIPES
from lockstep.system.errors import RecipeError
from tests.lines import read_table

SMALL_SPEC = {"block": "basic", "layers": [1, 1, 1, 1], "widths": [8, 8, 8, 8], "expansion": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epoch": 3}, "'epoch'. Did you mean epochs"),
        ({"weight_decay_role": []}, "'weight_decay_role'. Did you mean weight_decay_roles"),
        ({"ModelSpec": 1}, "'ModelSpec'"),
        ({1: 2}, "1"),
        ({"model": SMALL_SPEC | {"group": 2}}, "'model.group'. Did you mean groups"),
    ],
)
def test_an_unknown_field_has_the_nearest_name(fields: dict[Any, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"there is no field {message}"):
        Recipe.of(fields)


NAN = float("nan")
INF = float("inf")
WRONG = {
    "epochs": (0, 1.5, "many", None),
    "global_batch_images": (0,),
    "logits": (0,),
    "lr": (0, -0.1, NAN, INF),
    "lr_batch_images": (0,),
    "lr_step_factor": (0,),
    "lr_step_epochs": ([30, -1],),
    "warmup_epochs": (-1, INF),
    "warmup_counts_from": (2,),
    "warmup_from_batch_images": (-1,),
    "bn_momentum": (1.1, NAN),
    "bn_epsilon": (0,),
    "momentum": (-0.1,),
    "weight_decay": (-1e-4,),
    "weight_decay_roles": (["bn"],),
    "stem_channels": (1,),
    "label_smoothing": (1.5,),
    "mixup_alpha": (-0.1, 5),
    "cutmix_alpha": (5,),
    "mix_probability": (1.1,),
    "target_threshold": (1,),
    "repeated_augmentation": (0,),
    "loss": ("bce",),
    "dropout": (1, -0.1),
    "ema_decay": (2,),
    "precision": ("fp61",),
    "sparsity": ("mask_3d",),
    "sparsity_excluded": (["fc.weigth"],),
    "padding": ("valid",),
    "loss_scaling": ("automatic",),
    "loss_scale": (0,),
    "loss_scale_growth": (1,),
    "loss_scale_backoff": (1,),
    "image_size": (31,),
    "crop_area": ([0.0, 1.0], [0.5]),
    "crop_aspect": ([0.75, INF],),
    "crop_attempts": (0,),
    "flip_probability": (1.01,),
    "mean": ([1, 2], [1, 2, math.inf]),
    "std": ([1, 2, 0], [58.395, 0, 57.375]),
    "seed": (-1, 2**63),
    "model": (5,),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_is_an_error_that_names_its_field(field: str) -> None:
    for value in WRONG[field]:
        with pytest.raises(RecipeError, match=rf"^{field}[.:]"):
            Recipe.of({field: value})


UNFIT = r"""
{model: resnet51} | no model 'resnet51'. Did you mean resnet50
{model: {SMALL, groups: 2}} | basic block has no grouped convolution
{model: {SMALL, block: basik}} | ^model.block: Input should be 'basic' or 'bottleneck', not 'basik'$
{image_sizes: [32, 64]} | ^image_sizes.0: Input should be a list, not 32
{crop_area: [0.5, 0.4]} | crop_area must be a rising range
{crop_area: [0.5, 1.1]} | crop_area must be a rising range within 0 to 1
{crop_aspect: [1.4, 1.3]} | crop_aspect must be a rising range
{eval_resize: 200} | eval_crop \(224\) must fit into eval_resize \(200\)
{lr_decay: step} | needs lr_step_epochs
{lr_decay: exponential} | lr_decay "exponential" needs an lr_end above 0
{mixup_alpha: 1.0e-9} | mixup_alpha must be 0 or at least 0.01
{cutmix_alpha: 1.0e-9} | cutmix_alpha must be 0 or at least 0.01
{target_threshold: 0.2} | work only with binary_cross_entropy
{class_reduction: sum} | work only with binary_cross_entropy
{loss: binary_cross_entropy, class_weights: [1, 2], logits: 2}
  | class_weights work only with cross_entropy: .* use sampling=balanced
{repeated_augmentation: 9, global_batch_images: 8}
  | repeated_augmentation \(9\) fills a step of 8 images with copies of one
{sparsity_excluded: [fc.weigth]} | no tensor 'fc.weigth'. Did you mean fc.weight
{model: resnet18, sparsity_excluded: [layer1.0.conv3.weight]} | no tensor 'layer1.0.conv3.weight'
"""


@pytest.mark.parametrize(("fields", "message"), read_table(UNFIT))
def test_fields_that_do_not_fit_together_are_refused(fields: str, message: str) -> None:
    small = "block: basic, layers: [1, 1, 1, 1], widths: [8, 8, 8, 8], expansion: 1"
    with pytest.raises(RecipeError, match=message):
        Recipe.of(yaml.safe_load(fields.replace("SMALL", small)))


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(RecipeError) as raised:
        Recipe.of({"epoch": 3, "lr": -1, "mean": [1, 2, math.nan]})

    result = [line.split(":")[0].split(".")[0] for line in str(raised.value).splitlines()]
    assert result == ["lr", "mean", "there is no field 'epoch'"]


BEYOND: dict[str, tuple[Any, str]] = {
    "epochs": (
        10**11 - 1,
        r"1,000,000 \(the learning rate of every step is held in memory\), not 9{11}",
    ),
    "image_size": (10**6, r"4,096 \(the first activations of one image of that size are 1 GB\)"),
    "eval_resize": (10**6, "4,096"),
    "eval_crop": (10**6, "4,096"),
    "logits": (10**11, r"1,048,576 \(the most classes that a data set may have\)"),
    "global_batch_images": (10**9, r"1,048,576 \(that many images of 224 px need 150 GB\)"),
    "lr_batch_images": (10**400, "1,048,576"),
    "warmup_epochs": (1e300, "1,000,000"),
    "lr_step_epochs": ([30, 1e300], "1,000,000"),
    "crop_attempts": (10**9, "10,000"),
    "loss_scale_growth_steps": (2**31, "2,147,483,647"),
    "loader_threads": (10**9, "1,024"),
    "loader_batches": (10**9, "1,024"),
    "accumulation_steps": (10**12, "1,048,576"),
    "all_reduce_mb": (10**12, "4,000"),
    "profile_steps": (10**12, "10,000"),
    "log_every_steps": (10**12, "50,000,000"),
}


@pytest.mark.parametrize("field", BEYOND)
def test_a_number_beyond_memory_is_refused(field: str) -> None:
    value, most = BEYOND[field]
    settings = Recipe if field in Recipe.model_fields else Execution
    with pytest.raises(RecipeError, match=rf"^{field}.*: expected at most {most}"):
        settings.of({field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"model": SMALL_SPEC | {"layers": [10**9, 1, 1, 1]}},
        {"model": SMALL_SPEC | {"widths": [8, 8, 8, 10**9]}},
        {"model": SMALL_SPEC | {"widths": [8, 8, 2**16, 2**16]}},
        {"model": "resnet50", "logits": 2**20},
    ],
    ids=["layers", "widths", "parameters", "classifier"],
)
def test_a_model_beyond_memory_is_refused_before_it_is_listed(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="at most"):
        Recipe.of(fields)


def test_every_whole_number_has_an_upper_bound() -> None:
    names = [
        (settings, name)
        for settings in (Recipe, Execution)
        for name, value in settings().fields().items()
        if type(value) is int
    ]
    assert len(names) > 15
    for settings, name in names:
        with pytest.raises(RecipeError, match=f"^{name}"):
            settings.of({name: 10**20})


def test_of_many_problems_the_first_are_named_and_the_rest_counted() -> None:
    with pytest.raises(RecipeError) as raised:
        Recipe.of({f"strange{i}": i for i in range(1000)})
    lines = str(raised.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "... and 990 more"


@pytest.mark.parametrize("value", [10**5000, [1] * 10**5], ids=["integer", "list"])
def test_a_wrong_value_that_is_long_is_not_shown_in_full(value: object) -> None:
    with pytest.raises(RecipeError) as raised:
        Recipe.of({"mixup_pairing": value})
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("build", [Recipe, Recipe.of, Recipe().replace, Execution])
def test_a_wrong_value_is_a_recipe_error_however_it_is_given(build: Any) -> None:
    wrong = {"log_every_steps": 0} if build is Execution else {"epochs": 0}

    with pytest.raises(RecipeError, match="greater than or equal to 1, not 0"):
        build(wrong) if build == Recipe.of else build(**wrong)


@pytest.mark.parametrize(
    ("field", "edges"),
    [
        ("label_smoothing", (0, 1)),
        ("mixup_alpha", (0, 0.01, 4)),
        ("crop_area", ([1.0, 1.0], [1e-6, 1])),
        ("crop_aspect", ([1, 1],)),
        ("seed", (0, 2**63 - 1)),
        ("weight_decay_roles", ([],)),
        ("image_size", (32,)),
        ("eval_resize", (224,)),
    ],
)
def test_values_at_the_edge_of_a_range_are_taken(field: str, edges: tuple[Any, ...]) -> None:
    for value in edges:
        assert Recipe.of({field: value}).fields()[field] == value


def test_replace_changes_what_is_named_and_nothing_else() -> None:
    changed = Recipe().replace(epochs=50, mean=[1, 2, 3])

    result = difference(Recipe(), changed)
    assert result == {"epochs": (90, 50), "mean": ([123.675, 116.28, 103.53], [1, 2, 3])}
    assert Recipe().epochs == 90


@pytest.mark.parametrize("settings", [Recipe(), Execution()])
def test_settings_cannot_be_changed_in_place(settings: Any) -> None:
    name = next(iter(settings.fields()))

    with pytest.raises(Exception, match="frozen"):
        setattr(settings, name, "other")


@pytest.mark.parametrize("name", RECIPES)
def test_yaml_gives_back_exactly_the_recipe_it_was_made_from(name: str) -> None:
    recipe = RECIPES[name]()

    assert Recipe.of(yaml.safe_load(recipe.format_yaml())) == recipe


def test_yaml_keeps_every_bit_of_a_number_and_a_models_own_fields(tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(
        lr=0.1 + 0.2, weight_decay=1 / 3 * 1e-7, seed=2**63 - 1, lr_step_epochs=[1.5, 2]
    )

    again = Recipe.of(yaml.safe_load(recipe.format_yaml()))

    assert again == recipe
    assert isinstance(again.model, ModelSpec)


def test_yaml_lists_every_field_in_the_order_of_the_class() -> None:
    assert list(yaml.safe_load(Recipe().format_yaml())) == list(Recipe.model_fields)


def test_a_recipe_stands_for_itself(tiny_recipe: Recipe) -> None:
    assert load_recipe(tiny_recipe) is tiny_recipe


def test_a_difference_names_both_values_in_the_order_of_the_fields() -> None:
    changed = difference(
        load_recipe("resnet50-tensorflow-90ep"), load_recipe("resnet50-tensorflow-250ep")
    )

    assert list(changed.items()) == [
        ("epochs", (90, 250)),
        ("mixup_alpha", (0.0, 0.2)),
        ("mixup_coefficient", ("batch", "sample")),
        ("mixup_pairing", ("permutation", "reverse")),
    ]


# The name of the recipe that a recipe is based on


def test_a_recipe_knows_the_name_it_was_loaded_by_through_changes(tmp_path: Path) -> None:
    (tmp_path / "my pets.yaml").write_text("base: demo\nepochs: 3\n")
    assert load_recipe("demo").replace(epochs=1).based_on == "demo"
    assert load_recipe(tmp_path / "my pets.yaml").based_on == "my pets"
    assert Recipe(epochs=1).based_on == ""


def test_recipes_of_other_names_are_equal_if_their_fields_are() -> None:
    demo = load_recipe("demo")
    assert demo == demo.rename("another")
    assert hash(demo) == hash(demo.rename("another"))
    assert demo != demo.replace(seed=1)
    assert "based_on" not in demo.fields()


@pytest.mark.parametrize(
    ("size", "resize"), [(32, 37), (64, 73), (128, 146), (160, 183), (224, 256), (448, 512)]
)
def test_evaluation_follows_the_size_of_training(size: int, resize: int, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(f"base: resnet50-paddle-90ep\nimage_size: {size}\n")
    made = [
        Recipe(image_size=size),
        load_recipe("demo").replace(image_size=size),
        load_recipe(file),
    ]
    result = [(settings.image_size, settings.eval_resize, settings.eval_crop) for settings in made]
    assert result == [(size, resize, size)] * 3


def test_evaluation_keeps_the_sizes_that_are_set_and_those_of_another_change() -> None:
    assert Recipe(image_size=128, eval_resize=300).eval_crop == 224
    demo = load_recipe("demo")
    assert demo.replace(image_size=160, eval_crop=40).eval_resize == demo.eval_resize
    sizes = {name: demo.fields()[name] for name in ("image_size", "eval_resize", "eval_crop")}
    assert demo.replace(epochs=1) == demo.replace(**sizes | {"epochs": 1})


def test_a_wrong_size_is_complained_of_once() -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("demo").replace(image_size=5)
    assert str(error.value).startswith("image_size: ")
    assert "eval" not in str(error.value)


def test_a_run_of_a_recipe_without_an_interpolation_is_bilinear(tmp_path: Path) -> None:
    fields = Recipe(epochs=2).fields()
    del fields["interpolation"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    assert load_recipe(tmp_path) == Recipe(epochs=2, interpolation="bilinear")


def test_an_interpolation_that_lockstep_does_not_have_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"'bilinear' or 'bicubic', not 'lanczos'"):
        Recipe.of({"interpolation": "lanczos"})


def test_images_may_be_normalised_without_a_mean() -> None:
    recipe = Recipe(mean=(0, 0, 0), std=(255, 255, 255))
    assert Recipe.of(recipe.fields()) == recipe
