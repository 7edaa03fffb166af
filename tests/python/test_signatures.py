"""The options of attention are one list, whichever function takes them."""

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import forge
import numpy as np
import pytest
from forge import _forge, _options, _ring_call, _split_decode
from optional import need

ROOT = Path(forge.__file__).parent
SHAPING = ("causal", "window", "softcap", "scale", "query_offset", "key_start", "key_end")
ARRAYS = ("bias", "mask", "sinks")
COUNTS = ("num_heads", "num_kv_heads")


def options_of(function):
    """Name, default and annotation of each keyword-only parameter, in order."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: (p.default, p.annotation) for p in parameters if p.kind == p.KEYWORD_ONLY}


def names_and_defaults(function):
    return [(name, default) for name, (default, _) in options_of(function).items()]


WANTED = [("causal", False)] + [
    (name, None) for name in (*SHAPING[1:], *ARRAYS, *COUNTS, "kernel", "backend", "out")
]


@pytest.mark.parametrize("function", [forge.attention, forge.attention_forward])
def test_the_options_of_forge(function):
    assert names_and_defaults(function) == WANTED
    assert options_of(function) == options_of(forge.attention)


@pytest.mark.parametrize("name", ["fwd", "bwd_dq", "bwd_dkv"])
def test_the_kernels_take_all_but_the_family_and_out(name):
    got = names_and_defaults(getattr(forge.kernels, f"attention_{name}_f32"))
    not_taken = ("kernel", "out") if name == "fwd" else ("kernel", "out", "sinks")  # p has sinks
    assert got == [(o, d) for o, d in WANTED if o not in not_taken]


@pytest.mark.parametrize(("module", "more"), [("torch", ["return_lse"]), ("jax", []), ("mlx", [])])
def test_adapters_take_all_but_out(module, more):
    need("mlx.core" if module == "mlx" else module)
    adapter = __import__(f"forge.{module}", fromlist=["attention"])
    names = [name for name, _ in names_and_defaults(adapter.attention)]
    assert names == [*(name for name, _ in WANTED if name != "out"), *more]
    defaults = dict(names_and_defaults(adapter.attention))
    assert all(defaults[name] == default for name, default in WANTED if name != "out")


def test_the_operators_of_torch_take_all_but_out():
    need("torch")
    import torch
    from forge import _torch_ops

    wanted = {name for name, _ in WANTED} - {"out"}
    assert set(_torch_ops.Options._fields) == wanted
    for name in ("attention", "attention_backward"):
        schema = getattr(torch.ops.forge, name).default._schema
        options = [argument.name for argument in schema.arguments][-len(wanted) :]
        assert options == list(_torch_ops.Options._fields)


RING = ("causal", "window", "softcap", "scale", "sinks")


def test_ring_attention_takes_its_options_by_the_same_names():
    """All but those of single rows and of pairs of rows: the positions say where rows stand."""
    fields = {field.name: field.default for field in dataclasses.fields(_ring_call.RingOptions)}
    assert list(fields) == ["layout", *RING, "positions"]
    assert all(fields[name] == default for name, default in WANTED if name in RING)
    need("torch")
    import forge.torch

    got = dict(names_and_defaults(forge.torch.ring_attention))
    assert got.pop("group") is None
    assert got == fields
    got = dict(names_and_defaults(forge.torch.ulysses_attention))
    assert list(got) == ["group", "layout", *RING]
    fields = {
        field.name: field.default for field in dataclasses.fields(_split_decode.DecodeOptions)
    }
    assert list(fields) == [*RING, "positions", "key_positions"]
    got = dict(names_and_defaults(forge.torch.decode_attention))
    assert got.pop("group") is None
    assert got == fields


def test_ring_attention_of_jax_takes_the_same():
    need("jax")
    import forge.jax

    got = names_and_defaults(forge.jax.ring_attention)
    assert [name for name, _ in got] == ["axis_name", "layout", *RING]
    fields = {field.name: field.default for field in dataclasses.fields(_ring_call.RingOptions)}
    assert all(fields[name] == default for name, default in got[1:])


def test_every_option_is_documented_where_it_is_taken():
    for name, _ in WANTED:
        assert re.search(rf"^        {name}: ", forge.attention.__doc__, re.MULTILINE), name


def test_the_record_of_the_compiled_module_is_the_one_that_the_stub_describes():
    stub = (ROOT / "_forge.pyi").read_text()
    body = stub.split("class Options(TypedDict):")[1].split("\n\n")[0]
    described = re.findall(r"^    (\w+):", body, re.MULTILINE)
    sizes = _options.Sizes(1, 2, 3, 1, 1, 4, 4)
    made = _options.compiled_options(
        _options.MaskAndScale(), sizes, np.dtype(np.float32), "fused", ""
    )
    assert list(made) == ["causal", "window", "softcap", "scale", *described[4:]]
    assert set(made) == set(described)
    q = np.zeros((1, 2, 1, 4), np.float32)
    given = [None] * len(WANTED)
    given[0], given[-2] = False, "cpu"
    plain = _forge.attention_forward(q, q, q, *given)
    assert plain is None or list(plain[4]) == list(made)


def test_the_shaping_options_are_those_of_the_record_that_python_checks():
    assert tuple(field for field in typing.get_type_hints(_options.MaskAndScale)) == SHAPING
