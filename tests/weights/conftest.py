import pytest

from tests.weights.small_models import compute_in_this_process, use_narrow_models


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    use_narrow_models(monkeypatch)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the logits of certificates with the reference, in this process, which takes much less
    time."""
    compute_in_this_process(monkeypatch)
