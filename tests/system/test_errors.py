import pytest

from lockstep.system import errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UserError("x"), 2),
        (errors.RecipeError("x"), 2),
        (errors.DataError("x"), 2),
        (errors.CheckpointError("x"), 2),
        (errors.BackendError("x"), 2),
        (errors.DivergedError("x"), 3),
        (errors.Interrupted("x", 75), 75),
        (errors.Interrupted("x", 130), 130),
    ],
    ids=repr,
)
def test_every_error_has_its_exit_code(error: errors.LockstepError, code: int) -> None:
    assert isinstance(error, errors.LockstepError)
    assert error.exit_code == code
    assert str(error) == "x"


@pytest.mark.parametrize(
    ("name", "known", "sentence"),
    [
        ("resnet5", ["resnet50", "demo"], "Did you mean resnet50?"),
        ("wieght", ["weight", "weighty", "bias"], "Did you mean weight or weighty?"),
        ("zzz", ["epochs", "seed"], "Known: epochs, seed."),
        ("", ["epochs"], "Known: epochs."),
    ],
)
def test_the_nearest_names_or_all_are_told(name: str, known: list[str], sentence: str) -> None:
    assert errors.nearest(name, known) == sentence


def test_the_nearest_name_is_found_among_names_that_can_be_read_once() -> None:
    assert errors.nearest("zzz", iter(["epochs", "seed"])) == "Known: epochs, seed."
