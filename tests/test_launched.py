from pathlib import Path

import pytest

from lockstep.launched import EXIT_CODE_FOLDER, is_leading, leave_exit_code


@pytest.mark.parametrize(("rank", "leads"), [(None, True), ("0", True), ("1", False), ("17", False)])
def test_rank_0_or_the_only_process_leads(rank: str | None, leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert is_leading() == leads


def test_a_rank_leaves_its_exit_code_where_the_launcher_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXIT_CODE_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    leave_exit_code(75)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("5", "75")]


def test_an_exit_code_is_left_nowhere_without_a_launcher_or_after_it_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "5")
    leave_exit_code(75)
    monkeypatch.setenv(EXIT_CODE_FOLDER, str(tmp_path / "gone"))
    leave_exit_code(75)
    assert list(tmp_path.iterdir()) == []
