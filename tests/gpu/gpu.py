"""The shaders' kernels on a GPU, called with NumPy arrays: the Metal host's part, in ctypes."""

import contextlib
import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
AS_DECLARED = 0  # threads: as many as the kernel declares
TILE_ROWS = 32
SLOT_NAME = re.compile(r"kBuffer(\w+) = (\d+)")
SLOTS = {
    name: int(number)
    for name, number in SLOT_NAME.findall((ROOT / "csrc/shared/buffer_indices.h").read_text())
}


class Strides(ctypes.Structure):
    """AttnStrides."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "head", "first")]


class Range(ctypes.Structure):
    """AttnRange."""

    _fields_ = [(name, ctypes.c_int64) for name in ("query_offset", "key_start", "key_end")]


class Span(ctypes.Structure):
    """AttnSpan."""

    _fields_ = [("begin", ctypes.c_int64), ("end", ctypes.c_int64)]


class Params(ctypes.Structure):
    """AttnParams."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "Tq", "Tk", "window_left", "window_right")),
        *((name, Strides) for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_int32) for name in ("H", "Hkv", "hd", "causal")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def reach(window: int) -> int:
    """Return one side of a window as int64; a wider one is no limit."""
    return -1 if window >= 2**63 else window


class Gpu:
    """The library that was built from the shaders."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.gpu_error_text.restype = ctypes.c_char_p
        self._lib.gpu_device_name.restype = ctypes.c_char_p
        for name in ("gpu_write", "gpu_read"):
            getattr(self._lib, name).argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._lib.gpu_free.argtypes = (ctypes.c_void_p,)

    @property
    def name(self) -> str:
        """The device."""
        return str(self._lib.gpu_device_name().decode())

    def check(self, error: int, what: str) -> None:
        """Raise what CUDA says."""
        if error:
            text = self._lib.gpu_error_text(error).decode() if error > 0 else "not known"
            raise RuntimeError(f"{what}: {text}")

    def allocate(self, size: int) -> int:
        """Return device memory of exactly `size` bytes."""
        memory = ctypes.c_void_p()
        error = self._lib.gpu_allocate(ctypes.byref(memory), ctypes.c_size_t(max(size, 1)))
        self.check(error, f"allocating {size} bytes")
        return int(memory.value or 0)

    def free(self, memory: int) -> None:
        """Give memory back."""
        self.check(self._lib.gpu_free(memory), "freeing")

    def write(self, memory: int, host: int, size: int) -> None:
        """Copy to the device."""
        self.check(self._lib.gpu_write(memory, host, size), "copying to the device")

    def read(self, host: int, memory: int, size: int) -> None:
        """Copy from the device."""
        self.check(self._lib.gpu_read(host, memory, size), "copying from the device")

    def launch(
        self, kernel: str, span: tuple[int, int], per: int, threads: int, slots: dict[str, Any]
    ) -> None:
        """Run `kernel` over the span, `per` of its units to a threadgroup, in two dispatches."""
        begin, end = span
        middle = begin + (end - begin) // 2 // per * per
        for part in ((begin, middle), (middle, end)):
            if part[0] == part[1]:
                continue
            given = Span(*part)
            pointers = (ctypes.c_void_p * 32)()
            for name, value in (slots | {"Span": given}).items():
                address = ctypes.addressof(value) if hasattr(value, "_fields_") else value
                pointers[SLOTS[name]] = address
            groups = -(-(part[1] - part[0]) // per)
            self.check(
                self._lib.gpu_launch(kernel.encode(), groups, threads, pointers),
                f"launching {kernel}",
            )
            self.check(self._lib.gpu_synchronize(), f"running {kernel}")

    def set_constants(self, **constants: bool) -> None:
        """Set the function constants, by their names in shaders/constants.h."""
        for name, value in constants.items():
            error = self._lib.gpu_set_constant(name.encode(), ctypes.c_bool(value))
            self.check(error, f"setting {name}")


@dataclass
class Bound:
    """An array on the device: the bytes between its lowest and highest element, no more."""

    host: np.ndarray
    memory: int
    low: int  # address of the lowest element on the host
    size: int

    @property
    def strides(self) -> Strides:
        """Element strides, and where the first element lies."""
        batch, row, head = (step // 4 for step in self.host.strides[:3])
        return Strides(batch, row, head, (self.host.ctypes.data - self.low) // 4)


class Call:
    """One attention problem on the device; the memory is freed at the end of the `with`."""

    def __init__(
        self, gpu: Gpu, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
    ) -> None:
        self._gpu, self._memory = gpu, contextlib.ExitStack()
        self.q, self.k, self.v = q, k, v
        B, Tq, H, hd = q.shape
        Tk, Hkv = k.shape[1:3]
        window = options.get("window")
        left, right = (
            (-1, -1)
            if window is None
            else (window if isinstance(window, tuple) else (window - 1, -1))
        )
        scale, softcap = options.get("scale"), options.get("softcap") or 0.0
        self.params = Params(
            B=B, Tq=Tq, Tk=Tk, window_left=reach(left), window_right=reach(right), H=H, Hkv=Hkv,
            hd=hd, causal=bool(options.get("causal")), softcap=softcap,
            scale=hd**-0.5 if scale is None else scale,
        )  # fmt: skip
        self._gpu.set_constants(
            has_softcap=softcap > 0,
            has_causal=bool(self.params.causal),
            has_window=max(self.params.window_left, self.params.window_right) >= 0,
        )
        columns = [
            np.broadcast_to(np.asarray(default if given is None else given, dtype=object), (B,))
            for given, default in (
                (options.get("query_offset"), Tk - Tq),
                (options.get("key_start"), 0),
                (options.get("key_end"), Tk),
            )
        ]
        records = np.array([[int(x) for x in column] for column in columns], np.int64).T.copy()
        self.slots: dict[str, Any] = {"Params": self.params, "Ranges": self.bind_raw(records)}
        for name, array in (("q", q), ("k", k), ("v", v)):
            self.bind(name, array)

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()

    def bind_raw(self, host: np.ndarray) -> int:
        """Copy a contiguous array to memory of its own."""
        memory = self._gpu.allocate(host.nbytes)
        self._memory.callback(self._gpu.free, memory)
        self._gpu.write(memory, host.ctypes.data, host.nbytes)
        return memory

    def bind(self, name: str, host: np.ndarray) -> Bound:
        """Bind a strided [B, T, heads, hd] array under a name of AttnParams."""
        steps = [
            (step * (length - 1)) for step, length in zip(host.strides, host.shape, strict=True)
        ]
        low = host.ctypes.data + sum(min(step, 0) for step in steps)
        size = sum(abs(step) for step in steps) + 4
        memory = self._gpu.allocate(size)
        self._memory.callback(self._gpu.free, memory)
        self._gpu.write(memory, low, size)
        bound = Bound(host, memory, low, size)
        setattr(self.params, name, bound.strides)
        self.slots[name.capitalize()] = memory
        return bound

    def fetch(self, bound: Bound) -> np.ndarray:
        """Copy an output back to where it lay and return it."""
        self._gpu.read(bound.low, bound.memory, bound.size)
        return bound.host

    def fetch_raw(self, slot: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a contiguous output."""
        host = np.empty(shape, np.float32)
        self._gpu.read(host.ctypes.data, self.slots[slot], host.nbytes)
        return host

    @property
    def rows(self) -> tuple[int, int, int]:
        """The shape of what each query row has one of."""
        return (self.params.B, self.params.H, self.params.Tq)

    def new_rows(self, slot: str, *more: int) -> None:
        """Bind an output of one number, or of `more`, to a query row, full of NaN."""
        self.slots[slot] = self.bind_raw(np.full((*self.rows, *more), np.nan, np.float32))

    @property
    def head_dim(self) -> int:
        """The instantiation that serves this problem."""
        return next(dim for dim in HEAD_DIMS if dim >= self.params.hd)

    def row_tiles(self) -> int:
        """Tiles of query rows."""
        p = self.params
        return int(p.B * p.Hkv * -(-(p.H // p.Hkv * p.Tq) // TILE_ROWS))

    def fused_forward(self, out: np.ndarray, decode: bool = False) -> None:
        """Fill out, row_max and row_sum."""
        p, hd = self.params, self.head_dim
        self.out = self.bind("o", out)
        self.new_rows("RowMax")
        self.new_rows("RowSum")
        if decode:
            splits = max(1, min(64, -(-p.Tk // 256)))
            self.new_rows("Partial", splits, p.hd + 2)
            tiles = (0, self.row_tiles() * splits)
            self._gpu.launch(f"attention_decode_hd{hd}", tiles, 1, AS_DECLARED, self.slots)
            rows = (0, p.B * p.H * p.Tq)
            self._gpu.launch("attention_decode_combine", rows, 1, 32, self.slots)
        else:
            tiles = (0, self.row_tiles())
            self._gpu.launch(f"attention_fused_fwd_hd{hd}", tiles, 1, AS_DECLARED, self.slots)

    def gradients(self, dout: np.ndarray, dlse: np.ndarray | None, **outputs: np.ndarray) -> None:
        """Bind what the backward reads and writes."""
        self.bind("dout", dout)
        self._gpu.set_constants(has_dlse=dlse is not None)
        if dlse is not None:
            self.slots["Dlse"] = self.bind_raw(np.ascontiguousarray(dlse, np.float32))
        self.new_rows("DRow")
        self.results = {name: self.bind(name, array) for name, array in outputs.items()}

    def fused_backward(self, accumulate: bool) -> None:
        """Fill dq, dk and dv."""
        p, hd = self.params, self.head_dim
        self._gpu.set_constants(accumulate=accumulate)
        row_tiles = (0, -(-p.B * p.H * p.Tq // TILE_ROWS))
        self._gpu.launch("attention_fused_bwd_d", row_tiles, 1, 128, self.slots)
        tiles = (0, self.row_tiles())
        self._gpu.launch(f"attention_fused_bwd_dq_hd{hd}", tiles, 1, AS_DECLARED, self.slots)
        key_tiles = (0, p.B * p.Hkv * -(-p.Tk // TILE_ROWS))
        self._gpu.launch(f"attention_fused_bwd_dkv_hd{hd}", key_tiles, 1, AS_DECLARED, self.slots)

    def materialized_forward(self, out: np.ndarray) -> None:
        """Fill out, p, row_max and row_sum."""
        self.out = self.bind("o", out)
        self.new_rows("RowMax")
        self.new_rows("RowSum")
        self.new_rows("P", self.params.Tk)
        self._gpu.launch("attention_fwd_f32", (0, int(np.prod(self.rows))), 64, 64, self.slots)

    def materialized_backward(self) -> None:
        """Add to dq, dk and dv."""
        p, rows = self.params, (0, int(np.prod(self.rows)))
        self._gpu.launch("attention_bwd_d_f32", rows, 64, 64, self.slots)
        self._gpu.launch("attention_bwd_dq_f32", rows, 64, 64, self.slots)
        self._gpu.launch("attention_bwd_dkv_f32", (0, p.B * p.Hkv * p.Tk), 64, 64, self.slots)
