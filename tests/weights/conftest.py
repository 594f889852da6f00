import pytest


@pytest.fixture
def unchecked_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open files of Keras without a process that tries HDF5's library first, which takes a
    second."""
    from lockstep.weights.formats import keras_process

    monkeypatch.setattr(keras_process, "check", lambda path: None)


@pytest.fixture
def narrow(unchecked_keras: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported here: other tests of this folder need no framework.
    from tests.weights.small_models import use_narrow_models

    use_narrow_models(monkeypatch)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the logits of certificates with the reference, in this process, which takes much less
    time."""
    from tests.weights.small_models import compute_in_this_process

    compute_in_this_process(monkeypatch)
