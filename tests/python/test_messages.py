"""What an error tells to write works when it is written."""

import re
import sys
from pathlib import Path

import forge
import numpy as np
import pytest
from optional import need
from oracle import random_inputs
from scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
HALF = ("float16", "bfloat16")
LIBRARIES = ("numpy", "torch", "jax", "mlx")


def library(name):
    """(names that a message may use, array of a NumPy array, cast, its own attention or None)."""
    if name == "numpy":
        return {"np": np}, np.asarray, lambda x, to: x.astype(to), None
    if name == "torch":
        torch = need("torch")
        import forge.torch as module

        def cast(x, to):
            return x.to(getattr(torch, to))

        return {"torch": torch}, torch.from_numpy, cast, module.attention
    if name == "jax":
        jax = need("jax")
        import forge.jax as module

        return {"jax": jax}, jax.numpy.asarray, lambda x, to: x.astype(to), module.attention
    mx = need("mlx.core")
    import forge.mlx as module
    import mlx

    return {"mlx": mlx}, mx.array, lambda x, to: x.astype(getattr(mx, to)), module.attention


def refused(error, function, *arguments, **options):
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


def advised(message, pattern):
    found = re.search(pattern, message)
    assert found, message
    return found[1]


def functions(name):
    """forge.attention and the library's own, each with a way to make the library's arrays."""
    names, array, cast, own = library(name)
    return names, array, cast, [forge.attention, *([own] if own else [])]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", LIBRARIES)
def test_half_precision_has_two_ways_out_of_the_materialized_family(rng, name, dtype, cpu):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 from ml_dtypes only")
    names, array, cast, every = functions(name)
    q, k, v = (cast(array(x), dtype) for x in random_inputs(rng)[:3])
    for function in every:
        message = refused(TypeError, function, q, k, v, kernel="materialized")
        assert message.startswith("q must be float32 or float64 for kernel='materialized', got ")
        assert message.endswith(f"or kernel='fused', which takes {dtype}")
        way = advised(message, r"pass (q\S+), a copy,")
        wide = [eval(way.replace("q", "x", 1), names, {"x": x}) for x in (q, k, v)]
        exact = np.asarray(function(*wide, kernel="materialized", backend=cpu))
        assert exact.dtype == np.float32
        function(q, k, v, kernel="fused", backend=cpu)


@pytest.fixture
def x64():
    jax = need("jax")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("name", LIBRARIES)
def test_float64_has_two_ways_out_and_says_what_each_costs(rng, name, request, cpu):
    if name == "jax":
        request.getfixturevalue("x64")
    names, array, _, every = functions(name)
    given = random_inputs(rng, dtype=np.float64)[:3]
    if name == "mlx":
        mx = names["mlx"].core
        q, k, v = (mx.array(x, dtype=mx.float64) for x in given)
    else:
        q, k, v = (array(x) for x in given)
    for function in every:
        message = refused(TypeError, function, q, k, v)
        assert message.startswith("q must be float32 for kernel='fused', got float64")
        assert "ten times slower" in message
        assert "O(T^2)" in message
        way = advised(message, r"pass (q\S+), a copy in single precision, and k and v likewise,")
        narrow = [eval(way.replace("q", "x", 1), names, {"x": x}) for x in (q, k, v)]
        single = np.asarray(function(*narrow))
        double = np.asarray(function(q, k, v, kernel="materialized", backend=cpu))
        assert (single.dtype, double.dtype) == (np.float32, np.float64)
        np.testing.assert_allclose(single, double, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("position", [1, 2])
def test_mixed_precision_says_how_to_unify(rng, name, position, request):
    if name == "jax":
        request.getfixturevalue("x64")
    names, array, _, every = functions(name)
    given = [array(x) for x in random_inputs(rng)[:3]]
    wrong = "qkv"[position]
    wide = np.asarray(given[position]).astype(np.float64)
    if name == "mlx":
        mx = names["mlx"].core
        given[position] = mx.array(wide, dtype=mx.float64)
    else:
        given[position] = array(wide)
    for function in every:
        message = refused(TypeError, function, *given)
        assert re.match(rf"{wrong} must be \S*float32 as q is, got \S*float64; ", message)
        way = advised(message, rf"pass ({wrong}\S+), a copy")
        right = list(given)
        right[position] = eval(way, names, {wrong: given[position]})
        assert np.isfinite(np.asarray(function(*right))).all()


def test_gradients_in_another_precision_say_how_to_convert(rng):
    q, k, v, dout = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v)
    dlse = np.ones(saved.lse.shape)
    message = refused(TypeError, forge.attention_backward, dout.astype(np.float64), saved)
    assert message.endswith("pass dout.astype(np.float32), a copy")
    message = refused(TypeError, forge.attention_backward, dout, saved, dlse=dlse)
    assert message.endswith("pass dlse.astype(np.float32), a copy")


def test_the_single_kernels_say_how_to_convert(rng):
    q, *_ = random_inputs(rng, dtype=np.float64)
    message = refused(TypeError, forge.kernels.attention_bwd_d_f32, q, q, np.zeros((1, 2, 5)))
    begin = "o must be float32, got {0}; pass o.astype(np.float32), a copy, or use forge.attention"
    assert message == begin.format("float64") + " with kernel='materialized', which takes float64"
    q = q.astype(np.float16)
    message = refused(TypeError, forge.kernels.attention_bwd_d_f32, q, q, np.zeros((1, 2, 5)))
    assert message == begin.format("float16") + " with kernel='fused', which takes float16"


def test_what_has_no_conversion_is_not_told_one():
    for dtype in ("O", "S4", "c8", "?", "M8[s]"):
        x = np.zeros((1, 2, 1, 4), dtype)
        assert "pass" not in refused(TypeError, forge.attention, x, x, x)


@pytest.mark.parametrize("name", LIBRARIES)
def test_three_axes_without_num_heads_say_how_they_are_read(rng, name):
    """One sequence [T, heads, hd] is the usual reason, and with num_heads it would be misread."""
    _, array, _, every = functions(name)
    whole = [array(x) for x in random_inputs(rng, B=1, Tq=16, H=8, hd=6)[:3]]
    q, k, v = (x[0] for x in whole)
    for function in every:
        message = refused(ValueError, function, q, k, v)
        assert message.startswith("num_heads must be given for 3-D arrays, which are read as [B, T")
        assert "heads * hd], got None with q of shape (16, 8, 6)" in message
        way = advised(message, r"one sequence \[T, heads, hd\] without a batch is q(\S+)$")
        given = [eval(f"x{way}", {}, {"x": x}) for x in (q, k, v)]
        np.testing.assert_array_equal(np.asarray(function(*given)), np.asarray(function(*whole)))


@pytest.mark.parametrize("position", range(3))
def test_a_tensor_that_requires_a_gradient_is_sent_to_forge_torch_first(rng, position):
    """Only then to detach, which loses the gradient."""
    torch = need("torch")
    import forge.torch

    given = [torch.from_numpy(x) for x in random_inputs(rng)[:3]]
    given[position] = torch.nn.Parameter(given[position])
    name = "qkv"[position]
    _, saved = forge.attention_forward(*(x.detach() for x in given))
    for function in (forge.attention, forge.attention_forward):
        message = refused(TypeError, function, *given)
        assert message.startswith(f"{name} must be without a gradient here, got a tensor that req")
        assert message.index("forge.torch.attention") < message.index(f"{name}.detach()")
    forge.torch.attention(*given).sum().backward()
    assert given[position].grad is not None
    given[position] = given[position].detach()
    assert forge.attention(*given).shape == given[0].shape
    message = refused(TypeError, forge.attention_backward, torch.ones(1, requires_grad=True), saved)
    assert message.startswith("dout must be without a gradient")


@pytest.mark.parametrize("name", ["jit", "grad", "vmap"])
def test_a_tracer_is_sent_to_forge_jax(rng, name):
    jax = need("jax")
    import forge.jax

    q, k, v = (jax.numpy.asarray(x) for x in random_inputs(rng)[:3])
    mapped = q[None] if name == "vmap" else q
    transform = getattr(jax, name)
    message = refused(TypeError, transform(lambda q: forge.attention(q, k, v).sum()), mapped)
    assert re.match(r"q must have values here, got a \w+Tracer; use forge\.jax\.attention", message)
    transform(lambda q: forge.jax.attention(q, k, v).sum())(mapped)


def flags():
    """(name of a bool argument, a call with it) of every entry point that has one."""
    q = np.zeros((1, 3, 2, 4), np.float32)
    out = {"dq": q.copy(), "dk": q.copy(), "dv": q.copy()}
    p, rows = np.zeros((1, 2, 3, 3), np.float32), np.zeros((1, 2, 3), np.float32)

    def kernel(name, *arrays):
        return lambda **flag: getattr(forge.kernels, name)(*arrays, **flag)

    yield "causal", lambda **flag: forge.attention(q, q, q, **flag)
    yield "causal", lambda **flag: forge.attention_forward(q, q, q, **flag)
    yield (
        "accumulate",
        lambda **flag: forge.attention_backward(
            q, forge.attention_forward(q, q, q)[1], **out, **flag
        ),
    )
    yield "causal", kernel("attention_fwd_f32", q, q, q, q.copy(), p, rows, rows.copy())
    yield "causal", kernel("attention_bwd_dq_f32", q, q, q, p, q, rows, q.copy())
    yield "causal", kernel("attention_bwd_dkv_f32", q, q, q, p, q, rows, q.copy(), q.copy())


def adapter_flags(name):
    _, array, _, own = library(name)
    q = array(np.ones((1, 3, 2, 4), np.float32))
    yield "causal", lambda **flag: own(q, q, q, **flag)
    if name == "torch":
        from forge.torch import scaled_dot_product_attention as drop_in

        yield "return_lse", lambda **flag: own(q, q, q, **flag)
        yield "is_causal", lambda **flag: drop_in(q, q, q, **flag)
        yield "enable_gqa", lambda **flag: drop_in(q, q, q, **flag)


@pytest.mark.parametrize("source", LIBRARIES)
def test_one_rule_for_bools_everywhere(source):
    """Python's and NumPy's scalars, nothing that is merely true or false."""
    for name, call in flags() if source == "numpy" else adapter_flags(source):
        for value in (True, False, np.True_, np.False_):
            call(**{name: value})
        for value, kind in (
            (1, "int"), (0.0, "float"), (None, "NoneType"), ("yes", "str"),
            (np.array(True), "ndarray"), (np.int8(1), "int8"),
        ):  # fmt: skip
            message = refused(TypeError, call, **{name: value})
            assert message == f"{name} must be a bool, got {kind}"


def hints():
    """Every hint at pip in what users read."""
    files = [*(ROOT / "python").rglob("*.py"), *(ROOT / "examples").rglob("*.py"),
             *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]  # fmt: skip
    for path in files:
        for found in re.finditer(r"pip install ([^\n]*)", path.read_text()):
            yield str(path.relative_to(ROOT)), found[1]


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the source tree is not here")
def test_no_hint_names_a_package_that_no_index_has():
    found = list(hints())
    assert len(found) > 10
    wrong = [(path, hint) for path, hint in found if "forge" in hint.split("in a checkout")[0]]
    assert not wrong
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for path, hint in found:
        for group in re.findall(r"\.\[([\w,]+)\]", hint):
            assert set(group.split(",")) <= set(extras), (path, hint)


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("torch", "torch", "torch"),
        ("jax", "jax", "jax"),
        ("mlx.core", "mlx", "mlx"),
        ("transformers", "transformers", "transformers"),
    ],
)
def test_an_import_without_its_library_says_what_to_install(package, module, extra):
    done = run_script(f"sys.modules[{package!r}] = None; import forge.{module}", check=False)
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith(f"ImportError: forge.{module} needs ")
    assert error.endswith(f"or pip install '.[{extra}]' in a checkout of forge")
    assert sys.modules["forge"] is forge
