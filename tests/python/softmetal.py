"""The software Metal device inside the module: told to fail, and asked what it did.

The names are listed in tests/softmetal; every one is a number.
"""

import ctypes
import functools

import forge
import numpy as np
import pytest


@functools.cache
def _library():
    library = ctypes.CDLL(forge._forge.__file__)
    library.softmetal_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.softmetal_set.restype = ctypes.c_int
    library.softmetal_get.argtypes = [ctypes.c_char_p]
    library.softmetal_get.restype = ctypes.c_int64
    return library


def set(name, value=1):
    assert _library().softmetal_set(name.encode(), value) == 0, name


def get(name):
    value = _library().softmetal_get(name.encode())
    assert value >= 0, name
    return value


def lose_device():
    """Makes a call lose the device: the next one makes context, library and pipelines anew."""
    reset()
    set("device_lost")
    x = np.zeros((1, 1, 1, 1), np.float32)
    with pytest.raises(RuntimeError, match="device is lost"):
        forge.attention(x, x, x, backend="metal", kernel="materialized")
    reset()


def reset():
    """Ends every fault and sets the counters to zero."""
    _library().softmetal_reset()
