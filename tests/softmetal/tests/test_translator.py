"""The translator reads what the shaders are written in, and refuses the rest with file and line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import metallib
import msl
import translate

KERNEL = "kernel void k(device float* out [[buffer(0)]]) {\n%s\n}\n"


def body_of(text: str) -> str:
    """The translated text between the prologue and the tables."""
    result = translate.translate(text.encode(), "t.metal")
    return result.split('#line 1 "t.metal"\n')[1].split('\n#line 1 "kernel table"')[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("device float* p = out;", "softmetal::device_ptr<float> p = out;"),
        ("device const float* p = out;", "softmetal::device_ptr<const float> p = out;"),
        ("const device float* p = out;", "softmetal::device_ptr<const float> p = out;"),
        ("device float const* p = out;", "softmetal::device_ptr<const float> p = out;"),
        ("device float* const p = out;", "softmetal::device_ptr<float> const p = out;"),
        ("device metal::vec<float, 4>* p;", "softmetal::device_ptr<metal::vec<float, 4>> p;"),
        ("device unsigned int* p;", "softmetal::device_ptr<unsigned int> p;"),
        ("auto p = (device float4*)out;", "(softmetal::device_ptr<float4>)out"),
        (
            "reinterpret_cast<device const uint*>(out);",
            "softmetal::pointer_cast<softmetal::device_ptr<const uint>>(out);",
        ),
        ("thread float* p = 0;", "float* p = 0;"),
        ("thread float p = 0;", "float p = 0;"),
        ("thread const float& p = x;", "const float& p = x;"),
        ("device const float& x = *p;", "const float& x = *p;"),  # a checked load
        ("threadgroup float t[8];", 'softmetal::ThreadgroupArray<float, (8)> t(0, "t");'),
        (
            "threadgroup float t[N * 2][9];",
            'softmetal::ThreadgroupArray<float, (N * 2), (9)> t(0, "t");',
        ),
        ("threadgroup int n;", 'auto n = softmetal::threadgroup_scalar<int>(0, "n");'),
        ("auto x = out[a[0]];", "auto x = softmetal::value_of(out[a[0]]);"),
        (
            "x = 1.0 + 2. * .5 - 1e3 + 1.5e-2 + 2.0f + 3 + 0x1e3;",
            "x = 1.0f + 2.f * .5f - 1e3f + 1.5e-2f + 2.0f + 3 + 0x1e3;",
        ),
        ("threadgroup_barrier(f); // device x", "threadgroup_barrier(f); // device x"),
    ],
)
def test_declarations(source: str, expected: str) -> None:
    assert expected in body_of(KERNEL % source)


HELPERS = """
static float low(float x) { return simd_max(x); }
static float high(float x) { return low(x) + 1.0f; }
static void meet() { threadgroup_barrier(mem_flags::mem_threadgroup); }
static float plain(float x) { return x; }
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if (a) high(x); else plain(x);", "if (a) {@Branch(N, false); high(x);} else plain(x);"),
        ("if (a) { plain(x); }", "if (a) { plain(x); }"),
        ("if (a) x = 1; else { meet(); }", "if (a) x = 1; else {@Branch(N, true); meet(); }"),
        (
            "for (;;) if (a) simd_sum(x);",
            "for (;;) {@Round(N, false); if (a) {@Branch(N, false); simd_sum(x);}}",
        ),
        (
            "while (simd_any(a)) { x = 1; }",
            "while (simd_any(a)) {@Round(N, false); x = 1; }",
        ),
        ("do { meet(); } while (a);", "do {@Round(N, true); meet(); } while (a);"),
        ("y = f(a && b, simd_all(c));", "y = f(a && b, simd_all(c));"),
        ("y = simd_all(c) && a;", "y = simd_all(c) && a;"),
    ],
)
def test_marks_where_threads_may_part(source: str, expected: str) -> None:
    body = body_of(HELPERS + KERNEL % source).splitlines()
    marked = re.sub(r" softmetal::(\w+) softmetal_\d+\(\d+,", r"@\1(N,", body[-2])
    assert marked == expected
    functions = [line for line in body[:-3] if "softmetal::Round" in line]
    assert [line.split("(")[0] for line in functions] == [
        "static float low",
        "static float high",
        "static void meet",
    ]


def test_parameters_of_functions() -> None:
    text = (
        "static float f(constant S& s, threadgroup const float* t, thread float& x) { return 0; }\n"
        "template <typename T>\nvoid g(device T& to, constant T* from) {}\n"
    )
    body = body_of(text + KERNEL % "")
    assert "f(const S& s, softmetal::threadgroup_ptr<const float> t, float& x)" in body
    assert "g(const softmetal::device_ref<T>& to, softmetal::constant_ptr<T> from)" in body


def test_lines_stay() -> None:
    text = "kernel void\nk(device\nfloat*\nout [[buffer(0)\n]]) {\n  int marked;\n}\n"
    assert body_of(text).splitlines()[5] == "  int marked;"


def test_program_scope_constants() -> None:
    text = (
        "constant bool on [[function_constant(ns::kOn)]];\n"
        "constant float table[2] = {1, 2};\n"
        "static bool helper() { return on; }\n"
        "kernel void uses(device float* o [[buffer(0)]]) { helper(); }\n"
        "kernel void lacks(device float* o [[buffer(0)]]) {}\n"
    )
    result = translate.translate(text.encode(), "t.metal")
    assert "static const float table[2] = {1, 2};" in result
    assert "static SOFTMETAL_THREAD_LOCAL bool on;" in result
    assert '{"on", int(ns::kOn), 53,' in result
    assert 'constants_0[] = {"on", nullptr}' in result  # through the function it calls
    assert "constants_1[] = {nullptr}" in result


def test_instantiations() -> None:
    text = (
        "template <int N> [[kernel]] void f(device float* o [[buffer(kO)]],\n"
        "  uint i [[thread_position_in_grid]]) {}\n"
        'template [[host_name("f_64")]] [[kernel]] decltype(f<64>) f<64>;\n'
    )
    result = translate.translate(text.encode(), "t.metal")
    assert '{"f_64", softmetal::run_kernel<decltype(f<64>), f<64>, sources_0>' in result
    assert "host_name" not in result
    assert "{int(kO), softmetal::Builtin::kNone}" in result
    assert "{0, softmetal::Builtin::kThreadPositionInGrid}" in result


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (KERNEL % "device float** p;", "pointers to pointers"),
        (KERNEL % "device float* thread* p;", "pointers to pointers"),
        (KERNEL % "volatile device float* p;", "volatile"),
        (KERNEL % "device float x;", "device address space"),
        (KERNEL % "threadgroup float t[2][3][4];", "one or two dimensions"),
        (KERNEL % "threadgroup float t[2], u[2];", "one threadgroup variable"),
        (KERNEL % "auto [a, b] = f();", "auto is understood"),
        ("\nint x = (1;\n", "unmatched"),
        (KERNEL % "[[clang::noinline]] int x;", "is not understood"),
        ("void f() {\nthreadgroup float t[2];\n}\n" + KERNEL % "", "in kernels only"),
        ("\nconstant float x;\n", "without a value"),
        (
            "constant bool a [[function_constant(0)]];\nconstant bool b = !a;\n",
            "made of function constants",
        ),
        ("\nkernel void k(device float* o) {}", "needs one attribute"),
        ("\nkernel void k(float x [[buffer(0)]]) {}", "address space"),
        ("\nkernel void k(device float* o [[texture(0)]]) {}", "address space"),
        ("\nkernel void k(uint i [[thread_position]]) {}", "is not understood"),
        ("\nkernel float k(device float* o [[buffer(0)]]) {}", "kernel void"),
        (
            '\ntemplate [[host_name("x")]] [[kernel]] decltype(f<1>) f<2>;',
            "should be the same",
        ),
        (KERNEL % "y = a && simd_any(b);", "'simd_any' after '&&'"),
        (KERNEL % "y = a ? 1 : simd_sum(b);", "'simd_sum' after '\\?'"),
        (KERNEL % "do x = 1; while (simd_any(b));", "in `do while"),
        (KERNEL % "switch (a) { case 1: simd_sum(b); }", "please use if"),
        ("\n#define HALF 0.5\n", "needs the suffix f"),
        ("\nvertex void v() {}", "not supported"),
        (
            "\nkernel void k(device float* o [[buffer(0), function_constant(no)]]) {}",
            "no function constant",
        ),
    ],
)
def test_refusals(source: str, message: str) -> None:
    with pytest.raises(msl.MslError, match=message) as caught:
        translate.translate(source.encode(), "t.metal")
    assert str(caught.value).startswith("t.metal:2: error: ")


def test_thread_limits() -> None:
    text = (
        "template <int N> [[kernel, max_total_threads_per_threadgroup(N * 2)]]\n"
        "void f(device float* o [[buffer(0)]]) {}\n"
        'template [[host_name("f_8")]] [[kernel]] decltype(f<8>) f<8>;\n'
        "[[max_total_threads_per_threadgroup(64)]] kernel void g(device float* o [[buffer(0)]]) {}"
    )
    result = translate.translate(text.encode(), "t.metal")
    assert "template <int N> constexpr int max_threads_of_f = N * 2;" in result
    assert "constants_1, 0, max_threads_of_f<8>, true}," in result
    assert "constants_0, 0, 64, false}," in result


def test_errors_follow_line_marks() -> None:
    text = '#line 40 "shaders/a.h"\n\ndevice float x;\n'
    with pytest.raises(msl.MslError, match=r"shaders/a\.h:41: error"):
        msl.parse(text, "forge.metal")


def test_no_kernel() -> None:
    with pytest.raises(msl.MslError, match="no kernel"):
        translate.translate(b"int x;\n", "t.metal")


def test_twice_the_same_name() -> None:
    with pytest.raises(msl.MslError, match="two kernels are named 'k'"):
        translate.translate((KERNEL % "").encode() * 2, "t.metal")


def test_metallib(tmp_path: Path) -> None:
    text, target = tmp_path / "a.metal", tmp_path / "a.metallib"
    text.write_bytes(b"a")
    metallib.write_metallib(text, target)
    # FNV-1a of "a", from its published test vectors
    assert target.read_text() == "softmetal library 1\naf63dc4c8601ec8c\n"
