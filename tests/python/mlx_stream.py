"""A stand-in for MLX's GPU, which takes mx.fast.metal_kernel's calls where there is no Metal.

The kernels go through MLX's own function all the same, as far as it goes without a GPU: MLX can
export a function that calls it. It checks the call and writes the signature round the source; what
it made is run here, on the software Metal device. MLX is asked what a graph holds, never told.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "softmetal"))
import live

# What MLX puts before a kernel's text, as far as a text can tell.
PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
real_metal_kernel = mx.fast.metal_kernel


class Call:
    """One dispatch: the kernel's name and whole text, its sizes, and its inputs."""

    def __init__(self, arguments, inputs):
        self.kernel, text = arguments[:2]
        self.text = PRELUDE + text
        self.threads, self.group = tuple(arguments[2:5]), tuple(arguments[5:8])
        assert self.group == tuple(map(min, self.group, self.threads))
        self.inputs = inputs

    def run(self, shapes, seed):
        """Compute outputs of these shapes. MLX binds inputs, then outputs; they start undefined."""
        made = [np.full(shape, np.nan, np.float32) for shape in shapes]
        bound = [live.Memory(x.ctypes.data, x.nbytes) for x in [*self.inputs, *made]]
        live.library(self.text).run(self.kernel, bound, self.threads, self.group, seed)
        return made


class Gpu:
    """What was dispatched to MLX's GPU."""

    def __init__(self):
        self.calls, self.traced, self.seed = [], 0, 0

    def metal_kernel(self, **definition):
        """In the place of mx.fast.metal_kernel: a kernel that computes at once, if it can."""
        kernel = real_metal_kernel(**definition)

        def call(*, inputs, output_shapes, output_dtypes, **sizes):
            def alone(*arrays):
                return kernel(
                    inputs=list(arrays),
                    output_shapes=output_shapes,
                    output_dtypes=output_dtypes,
                    **sizes,
                )

            (node,) = [
                node for node in graph_of(alone, *map(mx.zeros_like, inputs)) if is_kernel(node)
            ]
            try:
                mx.eval(*inputs)
            except ValueError:  # within mx.compile: something of the right shapes goes on
                self.traced += 1
                used = sum(x.sum().astype(mx.float32) for x in inputs)
                return [mx.zeros(shape) + 0 * used for shape in output_shapes]
            self.calls.append(Call(node["arguments"], [in_order(x) for x in inputs]))
            return [mx.array(x) for x in self.calls[-1].run(output_shapes, self.seed)]

        return call


def in_order(x):
    """The array as MLX hands it over: in C order, here at an address of the least alignment."""
    x = np.asarray(x)
    memory = np.empty(x.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + x.itemsize
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def is_kernel(node):
    return node["type"] == "primitive" and node["name"] == "CustomKernel"


def graph_of(function, *arrays):
    """What the function is to MLX: a list of records."""
    nodes = []
    mx.export_function(nodes.append, function, *arrays)
    return nodes


def run_graph(nodes, *arrays, seed=0):
    """Run a graph of kernels and plain arithmetic; return its outputs and the calls of kernels."""
    parts = {node["type"]: node for node in nodes if node["type"] != "primitive"}
    values = {name: np.asarray(x) for name, x in parts["constants"]["constants"]}
    values |= {
        entry[0]: np.asarray(x) for entry, x in zip(parts["inputs"]["inputs"], arrays, strict=True)
    }
    plain = {"Multiply": np.multiply, "Add": np.add}
    calls = []
    for node in (node for node in nodes if node["type"] == "primitive"):
        inputs = [values[name] for name, *_ in node["inputs"]]
        shapes = [shape for _, shape, _ in node["outputs"]]
        if is_kernel(node):
            calls.append(Call(node["arguments"], [in_order(x) for x in inputs]))
            made = calls[-1].run(shapes, seed)
        elif node["name"] == "Broadcast":
            made = [np.broadcast_to(inputs[0], shapes[0])]
        else:
            made = [plain[node["name"]](*inputs)]
        values |= {entry[0]: x for entry, x in zip(node["outputs"], made, strict=True)}
    return [values[name] for name, *_ in parts["outputs"]["outputs"]], calls
