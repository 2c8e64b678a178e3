import pytest

from dispatch import linear_checks


@pytest.fixture(autouse=True)
def _only_on_c(backend):
    if backend != "c":
        pytest.skip("about C")


@pytest.mark.parametrize("bias", [True, False])
def test_kernels_agree_with_numpy(bias):
    linear_checks.check_linear(bias)


def test_weights_of_any_layout():
    linear_checks.check_layouts_of_weights()


def test_weights_of_words():
    linear_checks.check_weights_of_words()
