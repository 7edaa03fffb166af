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
ROW_THREADS = 64  # of a threadgroup of a kernel that has a thread a row
TILE_ROWS = 32
BLOCK_ROWS = 8
SPLIT_KEYS = 512
DECODE_SIMDGROUPS = 2
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


class Grid(ctypes.Structure):
    """AttnGrid."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("tile", "head", "batch", "rep")),
        ("rep_factor", ctypes.c_int64),
        ("rep_shift", ctypes.c_int32),
        ("inverse_softcap", ctypes.c_float),
    ]


class Params(ctypes.Structure):
    """AttnParams."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "Tq", "Tk", "window_left", "window_right")),
        *((name, Strides) for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv", "rounded")),
        *((name, ctypes.c_int32) for name in ("H", "Hkv", "hd", "hv", "causal", "runs")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def grid_of(params: Params) -> Grid:
    """Return what attn_grid says: how to divide by rep, and 1 / softcap."""
    rep = params.H // params.Hkv
    shift = 31 + (rep - 1).bit_length()
    factor = -(-(1 << shift) // rep)
    most = np.finfo(np.float32).max
    inverse = min(1 / np.float32(params.softcap), most) if params.softcap > 0 else 0
    return Grid(rep=rep, rep_factor=factor, rep_shift=shift, inverse_softcap=inverse)


def stored(x: np.ndarray, element: str) -> np.ndarray:
    """Return float32 numbers as an array of another element type; bfloat16 as its 16 bits."""
    if element != "bfloat16":
        return x.astype(element)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, nearest).astype(np.uint16)


def widened(x: np.ndarray) -> np.ndarray:
    """Return the numbers of an array of any element type in float32."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


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
        self, kernel: str, groups: tuple[int, int, int], threads: int, slots: dict[str, Any]
    ) -> None:
        """Run `kernel` with threadgroups along three axes and wait for it."""
        pointers = (ctypes.c_void_p * 32)()
        for name, value in slots.items():
            address = ctypes.addressof(value) if hasattr(value, "_fields_") else value
            pointers[SLOTS[name]] = address
        given = (ctypes.c_uint * 3)(*groups)
        error = self._lib.gpu_launch(kernel.encode(), given, threads, pointers)
        self.check(error, f"launching {kernel}")
        self.check(self._lib.gpu_synchronize(), f"running {kernel}")

    def launch_rows(self, kernel: str, rows: int, slots: dict[str, Any]) -> None:
        """Run a kernel that has a thread a row, in two dispatches."""
        middle = rows // 2 // ROW_THREADS * ROW_THREADS
        for begin, end in ((0, middle), (middle, rows)):
            if begin < end:
                given = slots | {"Span": Span(begin, end)}
                groups = (-(-(end - begin) // ROW_THREADS), 1, 1)
                self.launch(kernel, groups, ROW_THREADS, given)

    def launch_tiles(
        self, kernel: str, tiles: tuple[int, int, int], threads: int, slots: dict[str, Any]
    ) -> None:
        """Run a kernel that has a threadgroup a tile, head and sequence, in two dispatches."""
        whole: Grid = slots["Grid"]
        middle = tiles[0] // 2
        for begin, end in ((0, middle), (middle, tiles[0])):
            if begin < end:
                grid = Grid.from_buffer_copy(whole)
                grid.tile = begin
                self.launch(kernel, (end - begin, *tiles[1:]), threads, slots | {"Grid": grid})

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
        size = self.host.itemsize
        batch, row, head = (step // size for step in self.host.strides[:3])
        return Strides(batch, row, head, (self.host.ctypes.data - self.low) // size)

    @property
    def is_aligned(self) -> bool:
        """Whether four channels of a row lie at a multiple of their size."""
        strides = self.strides
        numbers = (self.host.shape[3], strides.batch, strides.row, strides.head, strides.first)
        return all(number % 4 == 0 for number in numbers)


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
            hd=hd, hv=hd, causal=bool(options.get("causal")), softcap=softcap,
            scale=hd**-0.5 if scale is None else scale,
        )  # fmt: skip
        self._gpu.set_constants(
            has_softcap=softcap > 0,
            has_causal=bool(self.params.causal),
            has_window=max(self.params.window_left, self.params.window_right) >= 0,
            is_whole=self.head_dim == hd,
            is_bfloat=k.dtype == np.uint16,
            is_half_q=q.itemsize == 2,
            is_half_kv=k.itemsize == 2,
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
        self.slots: dict[str, Any] = {
            "Params": self.params, "Ranges": self.bind_raw(records), "Grid": grid_of(self.params),
        }  # fmt: skip
        self.bounds: list[Bound] = []
        self.rounded: Bound | None = None
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
        size = sum(abs(step) for step in steps) + host.itemsize
        memory = self._gpu.allocate(size)
        self._memory.callback(self._gpu.free, memory)
        self._gpu.write(memory, low, size)
        bound = Bound(host, memory, low, size)
        setattr(self.params, name, bound.strides)
        self.bounds.append(bound)
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

    @property
    def group_rows(self) -> int:
        """The query rows of the heads that share a key/value head."""
        return int(self.params.H // self.params.Hkv * self.params.Tq)

    def run_fused(
        self, kernel: str, tiles: int, *, heads: int | None = None, threads: int = AS_DECLARED
    ) -> None:
        """Run a fused kernel over `tiles` of each head, of key and value unless told."""
        p = self.params
        self._gpu.set_constants(is_aligned=all(bound.is_aligned for bound in self.bounds))
        grid = (tiles, p.Hkv if heads is None else heads, p.B)
        self._gpu.launch_tiles(kernel, grid, threads, self.slots)

    def fused_forward(
        self, out: np.ndarray, rounded: np.ndarray | None = None, decode: bool = False
    ) -> None:
        """Fill out, what it is in half precision, row_max and row_sum."""
        p, hd = self.params, self.head_dim
        self.out = self.bind("o", out)
        if rounded is not None:
            self.rounded = self.bind("rounded", rounded)
        self._gpu.set_constants(has_rounded=rounded is not None)
        self.new_rows("RowMax")
        self.new_rows("RowSum")
        if decode:
            splits = -(-p.Tk // SPLIT_KEYS)
            self.new_rows("Partial", splits, p.hd + 4)
            units = -(-self.group_rows // BLOCK_ROWS) * splits
            self.run_fused(f"attention_decode_hd{hd}", -(-units // DECODE_SIMDGROUPS))
            self.run_fused("attention_decode_combine", p.Tq, heads=p.H, threads=32)
        else:
            self.run_fused(f"attention_fused_fwd_hd{hd}", -(-self.group_rows // TILE_ROWS))

    def gradients(self, dout: np.ndarray, dlse: np.ndarray | None, **outputs: np.ndarray) -> None:
        """Bind what the backward reads and writes."""
        self.bind("dout", dout)
        self._gpu.set_constants(has_dlse=dlse is not None)
        if dlse is not None:
            self.slots["Dlse"] = self.bind_raw(np.ascontiguousarray(dlse, np.float32))
        self.new_rows("DRow")
        self.results = {name: self.bind(name, array) for name, array in outputs.items()}
        self._gpu.set_constants(
            **{f"is_half_{name}": x.itemsize == 2 for name, x in outputs.items()}
        )

    def fused_backward(self, accumulate: bool) -> None:
        """Fill dq, dk and dv."""
        p, hd = self.params, self.head_dim
        self._gpu.set_constants(accumulate=accumulate)
        self.run_fused("attention_fused_bwd_d", -(-p.Tq // TILE_ROWS), heads=p.H, threads=128)
        self.run_fused(f"attention_fused_bwd_dq_hd{hd}", -(-self.group_rows // TILE_ROWS))
        keys = 32 if hd <= 128 else 16  # fused_tiling.h
        self.run_fused(f"attention_fused_bwd_dkv_hd{hd}", -(-p.Tk // keys))

    def materialized_forward(self, out: np.ndarray) -> None:
        """Fill out, p, row_max and row_sum."""
        self.out = self.bind("o", out)
        self.new_rows("RowMax")
        self.new_rows("RowSum")
        self.new_rows("P", self.params.Tk)
        self._gpu.launch_rows("attention_fwd_f32", int(np.prod(self.rows)), self.slots)

    def materialized_backward(self) -> None:
        """Add to dq, dk and dv."""
        p, rows = self.params, int(np.prod(self.rows))
        self._gpu.launch_rows("attention_bwd_d_f32", rows, self.slots)
        self._gpu.launch_rows("attention_bwd_dq_f32", rows, self.slots)
        self._gpu.launch_rows("attention_bwd_dkv_f32", p.B * p.Hkv * p.Tk, self.slots)
