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
    code = "import sys, mpitrain, mpitrain.train; print(sorted({'mpi4py', 'h5py', 'cupy', 'torch'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
