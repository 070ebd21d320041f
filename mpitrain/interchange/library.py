"""The safetensors library, imported when files of it are read or written."""

from __future__ import annotations

from typing import Any

from mpitrain.errors import ConfigError


def safetensors() -> Any:
    """The module.

    Raises:
        ConfigError: it is not installed, or too old to know bfloat16.
    """
    try:
        import ml_dtypes  # noqa: F401  # NumPy's bfloat16, which the library gives and takes
        import safetensors as found
    except ImportError as error:
        raise ConfigError(
            "weights of transformers are read and written by the library safetensors, which is missing here"
            f' ({error}).\nInstall it: pip install "mpitrain[hf]".'
        ) from None
    if not hasattr(found, "TensorSpec"):
        raise ConfigError(
            f"safetensors {getattr(found, '__version__', '')} is too old; 0.8 is the first one that serves.\n"
            'Install it: pip install --upgrade "safetensors>=0.8".'
        )
    return found
