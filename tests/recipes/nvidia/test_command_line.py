"""Which script of which example a command line is of, and what of it is read."""

import pytest

from lockstep.system.errors import UserError
from tests.recipes.cases import build_recipe, translate_text


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nproc_per_node=4", 4),
        ("python -m torch.distributed.launch --nproc-per-node 2 --master_port 1", 2),
        ("python multiproc.py", 1),
        ("", 1),
    ],
)
def test_a_launcher_gives_the_number_of_processes(launcher: str, ranks: int) -> None:
    translation = translate_text(f"{launcher} main.py -b32 --lr 0.4 D")
    if ranks > 1:
        assert translation.command[:4] == ("launch", "-n", str(ranks), "--")
    assert ("launch" in translation.command) == (ranks > 1)
    assert build_recipe(translation).global_batch_images == 32 * ranks


def test_words_that_the_script_does_not_know_are_kept_apart() -> None:
    translation = translate_text("python main.py --zzz 3 --amp -q /imagenet")
    assert translation.unknown == ("--zzz", "3", "-q")
    assert ("--data", "/imagenet") in zip(
        translation.command, translation.command[1:], strict=False
    )


@pytest.mark.parametrize(
    ("command", "system"),
    [
        ("python main.py -b 8 D", "pytorch"),
        ("python main.py --batch_size 8", "tensorflow"),
        ("mpirun -np 2 python main.py --batch_size 8", "tensorflow"),
        ("python train.py --amp --asp", "paddle"),
        ("python train.py --arch resnetv15 --workspace W", "mxnet"),
        ("python inference.py --tf-trt", "tensorflow"),
    ],
)
def test_the_options_tell_which_example_a_script_is_of(command: str, system: str) -> None:
    assert translate_text(command).system == system


def test_a_command_of_two_revisions_is_taken_for_the_first_with_a_note() -> None:
    assert "2022" in translate_text("runner -n 8 -b 192").notes[0]
    assert not any("2022" in note for note in translate_text("runner --ngpus 8").notes)
    older, later = (
        build_recipe(translate_text("runner -n 8 -b 192", revision=year))
        for year in ("2019", "2022")
    )
    assert (older.lr_decay, older.lr, later.lr_decay, later.lr) == ("step", 0.1, "cosine", 0.256)


@pytest.mark.parametrize(
    ("command", "how", "message"),
    [
        ("python mian.py --amp", {}, "Did you mean main.py"),
        ("ls", {}, "names no script"),
        ("python main.py --arch", {}, "expected 1 argument"),
        ("python main.py D", {"system": "jax"}, "there is no example 'jax'"),
        ("runner", {"revision": "1999"}, "Known: 2019, 2022"),
        ("torchrun --nproc_per_node gpu main.py D", {}, "'gpu'"),
        ('"python main.py \'D"', {}, "No closing quotation"),
        (
            "./runner -n 8 --data-root '<path to imagenet>'",
            {},
            "a placeholder instead of a value: <path to imagenet>",
        ),
    ],
)
def test_an_unreadable_command_says_why(command: str, how: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        translate_text(command, **how)


def test_a_variable_that_mpirun_passes_on_is_none_of_the_command() -> None:
    command = "mpirun -np 8 -x NCCL_DEBUG=INFO python main.py --mode=train --batch_size 8"
    translation = translate_text(f"HOROVOD_CYCLE_TIME=0.1 {command}")
    assert translation.command[:4] == ("launch", "-n", "8", "--")
    assert any("-x NCCL_DEBUG=INFO" in line for line in map(str, translation.not_needed))
    assert translation.unknown == ()
