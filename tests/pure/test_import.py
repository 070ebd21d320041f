"""What `import mpitrain` costs and offers."""

import subprocess
import sys

import pytest

import mpitrain


@pytest.mark.parametrize("name", mpitrain.__all__)
def test_every_public_name_is_there(name):
    assert getattr(mpitrain, name) is not None
    assert name in dir(mpitrain)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Gpt'"):
        _ = mpitrain.Gpt


def test_importing_the_package_and_the_trainer_brings_in_neither_mpi_nor_hdf5():
    assert loaded_with("mpi4py", "h5py", "cupy", "torch") == "[]"


def test_importing_the_trainer_brings_in_no_network_and_no_mail():
    """Eight ranks on two cores import at once: whatever a start does not need is waited for four times."""
    assert loaded_with("importlib.metadata", "email", "http.client", "ssl", "urllib.request", "threadpoolctl") == "[]"


def loaded_with(*modules):
    code = f"import sys, mpitrain, mpitrain.train; print(sorted(set({modules}) & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
