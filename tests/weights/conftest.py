import pytest


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported here: other tests of this folder need no framework.
    from tests.weights.small_models import use_narrow_models

    use_narrow_models(monkeypatch)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the logits of certificates with the reference, in this process, which takes much less
    time."""
    from tests.weights.small_models import compute_in_this_process

    compute_in_this_process(monkeypatch)
