"""Arguments under old names: accepted with a warning that names the new one."""

import pytest

import lockstep
from lockstep.system.deprecation import accept_old_names


@accept_old_names(engine="runtime")
def infer(runtime: str = "native") -> str:
    return runtime


def test_an_old_name_is_accepted_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="engine is deprecated; use runtime"):
        assert infer(engine="openvino") == "openvino"  # type: ignore[call-arg]
    assert infer(runtime="openvino") == infer("openvino") == "openvino"


def test_both_names_at_once_are_an_error() -> None:
    with pytest.raises(TypeError, match="engine is its old name"):
        infer(engine="openvino", runtime="native")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["evaluate", "predict", "serve"])
def test_public_functions_accept_engine(name: str) -> None:
    with pytest.warns(DeprecationWarning, match="use runtime"), pytest.raises(TypeError):
        getattr(lockstep, name)(engine="native")
