"""The rules that are checked on the text: what the language leaves out, and kernels' signatures.

Sections are those of the Metal Shading Language Specification, version 4. "forge:" marks a rule
of ours, for something that Apple's compiler takes and that we do not write.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from msl_text import Attribute, Function, Parameter, Shader, Token


class Finding(NamedTuple):
    """Something the text must not do; `line` counts from 0."""

    line: int
    rule: str
    message: str


RESTRICTIONS = "MSL 1.5.4 Restrictions"
SCALARS = "MSL 2.1 Scalar Data Types"
FUNCTIONS = "MSL 5.1 Functions"
KERNELS = "MSL 5.1.3 Compute Functions (Kernels)"
LOCATING = "MSL 5.2.1 Locating Buffer, Texture, and Sampler Arguments"
INPUTS = "MSL 5.2.3.6 Kernel Function Input Attributes"
STORAGE = "MSL 5.3 Storage Class Specifiers"
CONSTANTS = "MSL 5.8.1 Specifying Program Scope Function Constants"
THREADGROUP = "MSL 4.4 Threadgroup Address Space"

# word -> (rule, message)
WORDS = {
    "dynamic_cast": (RESTRICTIONS, "there is no dynamic_cast"),
    "typeid": (RESTRICTIONS, "there is no type identification"),
    "new": (RESTRICTIONS, "there is no operator new"),
    "delete": (RESTRICTIONS, "there is no operator delete"),
    "noexcept": (RESTRICTIONS, "there is no noexcept operator"),
    "goto": (RESTRICTIONS, "there is no goto statement"),
    "register": (RESTRICTIONS, "there is no register storage class"),
    "thread_local": (RESTRICTIONS, "there is no thread_local storage class"),
    "virtual": (RESTRICTIONS, "there are no virtual functions"),
    "try": (RESTRICTIONS, "there is no exception handling"),
    "catch": (RESTRICTIONS, "there is no exception handling"),
    "throw": (RESTRICTIONS, "there is no exception handling"),
    "std": (RESTRICTIONS, "there is no C++ standard library; Metal's is namespace metal"),
    "double": (SCALARS, "there is no double"),
    "asm": ("MSL 1.5 (C++14)", "inline assembly is not part of the language"),
    "__asm__": ("MSL 1.5 (C++14)", "inline assembly is not part of the language"),
    "simdgroup_async_copy": (
        "MSL 6.7 SIMD-Group Matrix Functions",
        "simdgroup_async_copy is not in the specification, and newer compilers refuse it",
    ),
}
SCALAR_INPUT = re.compile(r"u(int|short)")
VECTOR_INPUT = re.compile(r"u(int|short)[23]?")
INPUT_TYPES = {
    **dict.fromkeys(
        (
            "thread_position_in_grid",
            "thread_position_in_threadgroup",
            "threadgroup_position_in_grid",
            "threadgroups_per_grid",
            "threads_per_grid",
            "threads_per_threadgroup",
            "dispatch_threads_per_threadgroup",
            "grid_origin",
            "grid_size",
        ),
        VECTOR_INPUT,
    ),
    **dict.fromkeys(
        (
            "thread_index_in_threadgroup",
            "thread_index_in_simdgroup",
            "thread_index_in_quadgroup",
            "simdgroup_index_in_threadgroup",
            "quadgroup_index_in_threadgroup",
            "simdgroups_per_threadgroup",
            "quadgroups_per_threadgroup",
            "threads_per_simdgroup",
            "thread_execution_width",
            "dispatch_simdgroups_per_threadgroup",
            "dispatch_quadgroups_per_threadgroup",
        ),
        SCALAR_INPUT,
    ),
}
OTHER_ATTRIBUTES = {
    "buffer": LOCATING,
    "threadgroup": LOCATING,
    "function_constant": CONSTANTS,
    "kernel": KERNELS,
    "host_name": "MSL 5.1.10 Host Name Attribute",
    "max_total_threads_per_threadgroup": KERNELS,
}


def check_text(shader: Shader, version: float) -> Iterator[Finding]:
    """Yield what is wrong with the text, apart from what a compiler sees."""
    for index, token in enumerate(shader.tokens):
        yield from _check_token(shader.tokens, index, token)
        if version < 3.1 and re.fullmatch(r"bfloat[234]?", token.text):
            yield Finding(token.line, SCALARS, "bfloat comes with Metal 3.1")
    for token in shader.derived_records:
        yield Finding(token.line, RESTRICTIONS, "there are no derived classes")
    for attribute in shader.attributes:
        if attribute.name not in INPUT_TYPES and attribute.name not in OTHER_ATTRIBUTES:
            yield Finding(
                attribute.line,
                "MSL 5.1 and 5.2, attributes of functions and arguments",
                f"[[{attribute.name}]] is no attribute of a kernel or of its arguments",
            )
    for variable in shader.threadgroup_variables:
        if not variable.function.is_kernel:
            yield Finding(
                variable.line,
                THREADGROUP,
                f"threadgroup variable {variable.name} is declared in {variable.function.name}, "
                "which is no kernel",
            )
        elif variable.depth:
            yield Finding(
                variable.line,
                "forge: " + THREADGROUP,
                f"threadgroup variable {variable.name} belongs into the outermost scope",
            )
        if variable.has_initialiser:
            yield Finding(
                variable.line, THREADGROUP, f"threadgroup variable {variable.name} is initialised"
            )
    kernels = [f for f in shader.functions if f.is_kernel]
    for kernel in kernels:
        yield from _check_kernel(shader, kernel)
    yield from _check_names(shader, kernels)


def _check_token(tokens: list[Token], index: int, token: Token) -> Iterator[Finding]:
    before = tokens[index - 1].text if index else ""
    after = tokens[index + 1].text if index + 1 < len(tokens) else ""
    if token.text in WORDS and not (token.text == "delete" and before == "="):
        yield Finding(token.line, *WORDS[token.text])
    if token.text == "long" and after in ("long", "double"):
        yield Finding(token.line, SCALARS, f"there is no long {after}")
    if token.text == "static" and token.scope == "function":
        yield Finding(token.line, STORAGE, "a variable in a function cannot be static")
    if token.text == "[" and (before in ("=", "(", ",", "return", "{") or tokens[:index] == []):
        yield Finding(token.line, RESTRICTIONS, "there are no lambda expressions before Metal 3.2")
    if token.text == "..." and after == ")" and before != "(":
        yield Finding(token.line, "forge: " + FUNCTIONS, "variadic functions are not written")
    if token.text == "auto" and after in ("*", "&") and not _names_space(tokens, index):
        yield Finding(
            token.line,
            "MSL 4 Address Spaces",
            f"auto{after} must have an explicit address space",
        )
    if token.kind == "number":
        yield from _check_number(token)
    if token.text.startswith('"') and not _in_static_assert(tokens, index):
        yield Finding(token.line, "forge: " + SCALARS, "string literals are not written")


def _names_space(tokens: list[Token], index: int) -> bool:
    near = {t.text for t in tokens[max(index - 2, 0) : index + 2]}
    return bool(near & {"device", "threadgroup", "constant", "thread"})


def _in_static_assert(tokens: list[Token], index: int) -> bool:
    while index and tokens[index].text not in (";", "{", "}"):
        if tokens[index].text == "static_assert":
            return True
        index -= 1
    return False


def _check_number(token: Token) -> Iterator[Finding]:
    text = token.text.lower()
    if text.endswith(("ll", "llu", "ull")):
        yield Finding(token.line, SCALARS, f"{token.text} is a long long, which does not exist")
    is_hex = text.startswith("0x")
    is_float = "p" in text if is_hex else "." in text or "e" in text
    if is_float and not text.endswith(("f", "h")):
        yield Finding(
            token.line,
            "forge: " + SCALARS,
            f"{token.text} is a float in MSL and a double in C++; write {token.text}f",
        )


def _check_kernel(shader: Shader, kernel: Function) -> Iterator[Finding]:
    if kernel.returns != ["void"]:
        yield Finding(
            kernel.line,
            KERNELS,
            f"kernel {kernel.name} must return void, not {' '.join(kernel.returns)}",
        )
    for parameter in kernel.parameters:
        arguments = {a.name: a for a in parameter.attributes}
        yield from _check_parameter(shader, kernel, parameter, arguments)


def _check_parameter(
    shader: Shader, kernel: Function, parameter: Parameter, attributes: dict[str, Attribute]
) -> Iterator[Finding]:
    who = f"{parameter.name} of kernel {kernel.name}"
    line = parameter.line
    inputs = [name for name in attributes if name in INPUT_TYPES]
    constant = attributes.get("function_constant")
    if constant and constant.argument.split()[-1] not in shader.function_constants:
        yield Finding(line, CONSTANTS, f"{who}: {constant.argument} is no function constant")
    if parameter.is_indirect:
        if inputs:
            yield Finding(line, INPUTS, f"{who}: [[{inputs[0]}]] is passed by value")
            return
        space = set(parameter.texts) & {"device", "constant", "threadgroup", "thread"}
        if not space:
            yield Finding(line, RESTRICTIONS, f"{who} must name its address space")
        elif "thread" in space:
            yield Finding(line, RESTRICTIONS, f"{who} must not be in the thread address space")
        wanted = "threadgroup" if "threadgroup" in space else "buffer"
        if wanted not in attributes:
            yield Finding(
                line, "forge: " + LOCATING, f"{who} needs [[{wanted}(n)]]; the host counts on it"
            )
    elif not inputs:
        yield Finding(line, INPUTS, f"{who} is passed by value and is none of the built-in inputs")
    else:
        names = [t for t in parameter.texts[:-1] if t not in ("const", "metal", "::")]
        if not INPUT_TYPES[inputs[0]].fullmatch("".join(names)):
            yield Finding(line, INPUTS, f"{who}: [[{inputs[0]}]] cannot be a {' '.join(names)}")


def _check_names(shader: Shader, kernels: list[Function]) -> Iterator[Finding]:
    for function in shader.functions:
        if function.name == "main":
            yield Finding(function.line, RESTRICTIONS, "a function cannot be called main")
    for name, count in Counter(k.name for k in kernels).items():
        if count > 1:
            line = [k.line for k in kernels if k.name == name][-1]
            yield Finding(line, "MSL 1.5.1 Overloading", f"kernel {name} cannot be overloaded")
    names = {k.name for k in kernels}
    for function in shader.functions:
        for token, after in zip(function.body, function.body[1:], strict=False):
            if token.text in names and after.text in ("(", "<"):
                yield Finding(token.line, FUNCTIONS, f"kernel {token.text} is called")
    host_names = {k.name: k.line for k in kernels if not k.is_template}
    for tokens, attributes in shader.instantiations:
        named = [a for a in attributes if a.name == "host_name"]
        if not named:
            continue
        name = named[0].argument.strip('"')
        if name in host_names:
            yield Finding(
                tokens[0].line,
                OTHER_ATTRIBUTES["host_name"],
                f"there is another kernel of the host name {name}",
            )
        host_names[name] = tokens[0].line


def add_asserts(shader: Shader) -> None:
    """Let the compiler check what it can evaluate: indices of buffers, ids of constants."""
    for kernel in (f for f in shader.functions if f.is_kernel and f.end):
        for kind in ("buffer", "threadgroup"):
            indices = {
                p.name: a.argument
                for p in kernel.parameters
                for a in p.attributes
                if a.name == kind
            }
            what = f"{kind} index"
            kernel.end.injected += _distinct(indices, 30, LOCATING, f"{kernel.name}: {what}")
    ids = {n: a.argument for n, a in shader.function_constants.items() if a.argument}
    if shader.tokens:
        last = shader.tokens[-1]
        last.injected += _distinct(ids, 65535, CONSTANTS, "function constant")


def _distinct(values: dict[str, str], most: int, rule: str, what: str) -> str:
    """Return assertions that the values are from 0 to `most` and that no two are equal."""
    text = ""
    for number, (name, value) in enumerate(values.items()):
        message = f"{rule} | {what} of {name} must be from 0 to {most}"
        text += f' static_assert(({value}) >= 0 && ({value}) <= {most}, "{message}");'
        for other, other_value in list(values.items())[:number]:
            message = f"{rule} | {what} of {other} and of {name} are equal"
            text += f' static_assert(({value}) != ({other_value}), "{message}");'
    return text
