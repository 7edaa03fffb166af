"""A stand-in for what PyTorch's shader interface is on a Mac; CPU tensors stand for MPS tensors.

It takes the place of what the compiled part of PyTorch has there and lacks elsewhere, beneath
torch.mps: _mps_compileShader and events. It refuses what that refuses, keeps a record of the calls,
and runs the very text it was given on the software Metal device.
"""

import struct
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "softmetal"))
import live

MOST_BYTES = 4096  # that Metal takes by value
MOST_ARGUMENTS = 31


class Call:
    """One call of a kernel."""

    def __init__(self, kernel, arguments, threads, group):
        self.kernel, self.arguments, self.threads, self.group = kernel, arguments, threads, group


class Stream:
    """What was asked of PyTorch's stream: texts compiled, kernels called, buffers committed."""

    def __init__(self):
        self.texts, self.events = [], []
        self.runs = True  # else calls are only recorded
        self.seed = 0

    @property
    def calls(self):
        return [event for event in self.events if isinstance(event, Call)]

    def compile_shader(self, source):
        assert isinstance(source, str)
        self.texts.append(source)
        return ShaderLibrary(self, source)

    def record_event(self, _):
        self.events.append("commit")

    def patches(self):
        """Names of torch._C and what stands for them."""
        return {
            "_mps_compileShader": self.compile_shader,
            "_mps_acquireEvent": lambda timed: 1,
            "_mps_releaseEvent": lambda event: None,
            "_mps_recordEvent": self.record_event,
        }


class ShaderLibrary:
    """torch._C._mps_ShaderLibrary: kernels are its attributes."""

    def __init__(self, stream, source):
        self._stream, self._source = stream, source
        self._library = live.library(source) if stream.runs else None

    def __getattr__(self, name):
        if f" {name}(" not in self._source and f'host_name("{name}")' not in self._source:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        return lambda *args, **options: self._call(name, args, **options)

    def _call(self, name, args, *, threads=None, group_size=None, arg_casts=None):
        threads, group_size = _sizes(threads), _sizes(group_size)
        assert arg_casts is None, "not used here, so not checked here"
        arguments = [_argument(x) for x in args]
        if len(arguments) > MOST_ARGUMENTS:
            raise RuntimeError(f"{len(arguments)} arguments, Metal takes {MOST_ARGUMENTS}")
        if threads is None:
            threads = next((x.numel(),) for x in args if isinstance(x, torch.Tensor))
        if group_size is None or len(threads) != len(group_size):
            raise RuntimeError("threads->size() == group_size->size()")
        ones = (1,) * (3 - len(threads))
        call = Call(name, args, threads + ones, group_size + ones)
        self._stream.events.append(call)
        if self._stream.runs:
            self._library.run(name, arguments, call.threads, call.group, self._stream.seed)


def _sizes(given):
    if given is None:
        return None
    sizes = (given,) if isinstance(given, int) else tuple(given)
    if not 0 < len(sizes) < 4 or not all(type(x) is int and 0 < x < 2**32 for x in sizes):
        raise RuntimeError(f"one to three positive sizes, got {given}")
    return sizes


def _argument(value):
    """What is bound: a tensor's memory from its own offset on, or bytes."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":  # which stands for mps
            raise RuntimeError(f"a tensor on {value.device}")
        if not value.numel():
            raise RuntimeError("a tensor without memory")
        reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        return live.Memory(value.data_ptr(), (reach + 1) * value.element_size())
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
    # pybind11 casts the whole list to the type of its first element.
    if all(type(x) is int for x in values):
        data = struct.pack(f"{len(values)}q", *values)
    elif all(type(x) in (int, float) for x in values) and type(values[0]) is float:
        data = struct.pack(f"{len(values)}f", *values)
    else:
        raise RuntimeError(f"Unexpected argument types: {value!r}")
    if len(data) > MOST_BYTES:
        raise RuntimeError(f"{len(data)} bytes by value, Metal takes {MOST_BYTES}")
    return data
