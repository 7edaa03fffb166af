"""onnxruntime: GroupQueryAttention where there is a causal mask, else MultiHeadAttention."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner, Unsupported
from forge._check.plain import Inputs

DOMAIN = "com.microsoft"


def _session(node: Any, inputs: list[Any], outputs: list[Any], threads: int) -> Any:
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    )
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _info(name: str, shape: list[Any] | None, dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def _element(case: Case) -> int:
    return int(TensorProto.FLOAT16 if case.dtype == "float16" else TensorProto.FLOAT)


def _packed(x: Array, case: Case) -> Array:
    return x.astype(case.dtype, copy=False).reshape(x.shape[0], x.shape[1], -1)


def _from_packed(x: Array, case: Case) -> Array:
    return x.astype(np.float32, copy=False).reshape(case.B, case.Tq, case.H, case.hd)


def _multi_head(case: Case, inputs: Inputs, threads: int) -> Runner:
    if case.Hkv != case.H:
        raise Unsupported("no operator for grouped heads without a causal mask")
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["o"], domain=DOMAIN, num_heads=case.H,
        scale=case.scale,
    )  # fmt: skip
    element = _element(case)
    shapes = [_info(name, ["B", f"T{name}", f"W{name}"], element) for name in "qkv"]
    session = _session(node, shapes, [_info("o", None, element)], threads)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    feeds = {name: _packed(x, case) for name, x in arrays.items()}
    return Runner(
        forward=lambda: session.run(["o"], feeds)[0],
        as_output=lambda out: _from_packed(out, case),
        note="MultiHeadAttention",
    )


def _group_query(case: Case, inputs: Inputs, threads: int) -> Runner:
    attributes: dict[str, Any] = {
        "num_heads": case.H, "kv_num_heads": case.Hkv, "scale": case.scale,
    }  # fmt: skip
    if case.window:
        attributes["local_window_size"] = case.window
    if case.softcap:
        attributes["softcap"] = case.softcap
    names = ["q", "k", "v", "past_k", "past_v", "last", "total"]
    if case.sinks:
        names += ["", "", "", "", "sinks"]
    node = helper.make_node(
        "GroupQueryAttention", names, ["o", "present_k", "present_v"], domain=DOMAIN, **attributes
    )
    cache = ["B", case.Hkv, "cache", case.hd]
    element = _element(case)
    shapes = [_info(name, ["B", "T", f"W{name}"], element) for name in "qkv"]
    shapes += [_info("past_k", cache, element), _info("past_v", cache, element)]
    shapes += [_info("last", ["B"], TensorProto.INT32), _info("total", [1], TensorProto.INT32)]
    shapes += [_info("sinks", [case.H], element)] if case.sinks else []
    results = [_info("o", None, element)]
    results += [_info("present_k", cache, element), _info("present_v", cache, element)]
    session = _session(node, shapes, results, threads)
    binding, out, bound = _bind(session, case, inputs)

    def forward(_keeps: Any = bound) -> Any:  # which the binding refers to and does not own
        session.run_with_iobinding(binding)
        return out

    return Runner(
        forward=forward,
        as_output=lambda value: _from_packed(value.numpy(), case),
        note="GroupQueryAttention, key/value cache in place",
    )


def _bind(session: Any, case: Case, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Past and present keys share one buffer; the call stores the newest Tq of them again."""
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    binding = session.io_binding()
    newest = {
        "q": _packed(inputs.q, case),
        "k": np.ascontiguousarray(_packed(inputs.k, case)[:, -case.Tq :]),
        "v": np.ascontiguousarray(_packed(inputs.v, case)[:, -case.Tq :]),
        "last": np.full(case.B, case.Tk - 1, np.int32),
        "total": np.array([case.Tk], np.int32),
    }
    if case.sinks:
        newest["sinks"] = inputs.options["sinks"].astype(case.dtype)
    for name, array in newest.items():
        binding.bind_cpu_input(name, array)
    for name, array in (("k", inputs.k), ("v", inputs.v)):
        cache = value(np.ascontiguousarray(array.transpose(0, 2, 1, 3), case.dtype))
        binding.bind_ortvalue_input(f"past_{name}", cache)
        binding.bind_ortvalue_output(f"present_{name}", cache)
    out = value(np.empty_like(newest["q"]))
    binding.bind_ortvalue_output("o", out)
    return binding, out, newest


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    if case.is_shaped and not case.sinks:
        raise Unsupported(
            "GroupQueryAttention takes sinks, no mask or bias and no other head dim of v"
        )
    if case.causal:
        return _group_query(case, inputs, threads)
    return _multi_head(case, inputs, threads)
