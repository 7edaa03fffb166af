"""Translates a flattened Metal text to C++ for the software Metal device.

    translate.py forge.metal kernels.cpp

Pointers into address spaces become the checked classes of stdlib/softmetal/memory.h, function
constants become variables that a pipeline sets, and a table of the kernels is added. Lines stay
where they are, so messages and debuggers point into the shaders.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msl
from branches import Branches
from shader_tokens import Tokens

POINTERS = {"device": "device_ptr", "constant": "constant_ptr", "threadgroup": "threadgroup_ptr"}
REFERENCES = {"device": "device_ref", "threadgroup": "threadgroup_ref"}
BUILTINS = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "threadgroup_position_in_grid",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
)
DATA_TYPES = {  # MTLDataType
    "bool": 53, "float": 3, "int": 29, "uint": 33, "short": 37, "ushort": 41,
    "long": 81, "ulong": 85, "Int32": 29, "Int64": 81,
}  # fmt: skip

INSTANTIATION = b'template [[host_name("'

PROLOGUE = """\
// Written by translate.py.
#define __METAL_VERSION__ 310
#include <metal_stdlib>
#include "softmetal/entry.h"
#line 1 "{name}"
"""


def declared(declarator: msl.Declarator, number: int) -> str:
    """The C++ for a piece with an address space."""
    const = "const " if declarator.const else ""
    space, type_ = declarator.space, declarator.type
    if declarator.form == "*":
        end = " const" if declarator.pointer_const else ""
        if space == "thread":
            return f"{const}{type_}*{end}"
        return f"softmetal::{POINTERS[space]}<{const}{type_}>{end}"
    if declarator.form == "&":
        if space in REFERENCES and not const:
            return f"const softmetal::{REFERENCES[space]}<{type_}>&"
        if space == "threadgroup":
            raise msl.fail(declarator.at, "a const reference to threadgroup memory")
        # To device memory: what it refers to is loaded where the reference is made, and checked.
        return f"{'const ' if space == 'constant' else const}{type_}&"
    if space == "threadgroup":
        if not declarator.sizes:
            make = f'softmetal::threadgroup_scalar<{type_}>({number}, "{declarator.name}")'
            return f"auto {declarator.name} = {make}"
        sizes = ", ".join(f"({size})" for size in declarator.sizes)
        array = f"softmetal::ThreadgroupArray<{type_}, {sizes}>"
        return f'{array} {declarator.name}({number}, "{declarator.name}")'
    if space == "constant":
        return f"static const {type_} "
    return f"{const}{type_} "


def replacements(program: msl.Program) -> list[tuple[int, int, str]]:
    found = [(begin, end, "") for begin, end in program.removed]
    found += [(end, end, "f") for end in program.floats]
    found += [(begin, end, "softmetal::pointer_cast") for begin, end in program.casts]
    for number, declarator in enumerate(
        sorted(
            program.declarators, key=lambda d: (d.space != "threadgroup" or bool(d.form), d.begin)
        )
    ):
        found.append((declarator.begin, declarator.end, declared(declarator, number)))
    for begin, end in program.autos:
        found += [(begin, begin, "softmetal::value_of("), (end, end, ")")]
    for constant in program.constants:
        text = f"static SOFTMETAL_THREAD_LOCAL {constant.type} {constant.name};"
        found.append((constant.begin, constant.end, text))
    return found


def may_store(parameter: msl.Parameter) -> bool:
    declarator = parameter.declarator
    return declarator is not None and declarator.space == "device" and not declarator.const


def substituted(text: str, found: list[tuple[int, int, str]]) -> str:
    pieces, position = [], 0
    for begin, end, replacement in sorted(found, key=lambda piece: (piece[0], piece[1])):
        assert begin >= position, "two pieces overlap"
        lines = text.count("\n", begin, end) - replacement.count("\n")
        pieces += [text[position:begin], replacement, "\n" * lines]
        position = end
    return "".join([*pieces, text[position:]])


def words_used(program: msl.Program, words: frozenset[str]) -> set[str]:
    """Names that a kernel uses, through the functions it calls."""
    used: set[str] = set()
    waiting = list(words)
    while waiting:
        word = waiting.pop()
        if word not in used:
            used.add(word)
            waiting += program.functions.get(word, ())
    return used


def pascal(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def kernel_tables(
    program: msl.Program, kernel: msl.Kernel, host: str, function: str, n: int
) -> str:
    sources, arguments = [], []
    names = {constant.name for constant in program.constants}
    signature = f"softmetal::Signature<decltype({function})>"
    for i, parameter in enumerate(kernel.parameters):
        if parameter.kind in ("buffer", "threadgroup"):
            kind, index, builtin = pascal(parameter.kind), f"int({parameter.index})", "kNone"
        elif parameter.kind in BUILTINS:
            kind, index, builtin = "kBuiltin", "0", pascal(parameter.kind)
        else:
            raise msl.fail(parameter.at, f"attribute [[{parameter.kind}]] is not understood")
        enabled_by = "nullptr"
        if parameter.enabled_by:
            if parameter.enabled_by not in names:
                raise msl.fail(parameter.at, f"'{parameter.enabled_by}' is no function constant")
            enabled_by = f'"{parameter.enabled_by}"'
        sources.append(f"{{{index}, softmetal::Builtin::{builtin}}}")
        arguments.append(
            f'{{"{parameter.name}", softmetal::ArgumentKind::{kind}, {index}, {enabled_by}, '
            f"{signature}::least_bytes[{i}], {signature}::alignments[{i}], "
            f"{str(may_store(parameter)).lower()}}}"
        )
    used = words_used(program, kernel.words) | {p.enabled_by for p in kernel.parameters}
    constants = [f'"{c.name}"' for c in program.constants if c.name in used]
    lines = [
        f"// {host}",
        f"constexpr softmetal::Source sources_{n}[] = {{{', '.join([*sources, '{}'])}}};",
        f"constexpr softmetal::Argument arguments_{n}[] = {{",
        *(f"    {argument}," for argument in [*arguments, "{}"]),
        "};",
        f"constexpr const char* constants_{n}[] = {{{', '.join([*constants, 'nullptr'])}}};",
    ]
    return "\n".join(lines)


def kernel_entry(program: msl.Program, kernel: msl.Kernel, host: str, function: str, n: int) -> str:
    used = words_used(program, kernel.words) | {p.enabled_by for p in kernel.parameters}
    constants = sum(c.name in used for c in program.constants)
    return (
        f'    {{"{host}", softmetal::run_kernel<decltype({function}), {function}, sources_{n}>, '
        f"arguments_{n}, {len(kernel.parameters)}, constants_{n}, {constants}, "
        f"{max_threads_of(kernel, function)}, {str(bool(kernel.template)).lower()}}},"
    )


def max_threads_of(kernel: msl.Kernel, function: str) -> str:
    """The limit that an instantiation declares; see max_threads_templates."""
    if kernel.template and kernel.max_threads:
        return f"max_threads_of_{function}"
    return kernel.max_threads or "0"


def max_threads_templates(program: msl.Program) -> list[str]:
    """What template kernels declare, as constants with the same template arguments."""
    return [
        f"{k.template} constexpr int max_threads_of_{k.name} = {k.max_threads};"
        for k in program.kernels
        if k.template and k.max_threads
    ]


def entry_points(program: msl.Program) -> list[tuple[msl.Kernel, str, str]]:
    """(kernel, host name, function) of everything that a library of this text offers."""
    templates = {kernel.name: kernel for kernel in program.kernels if kernel.template}
    found = [(k, k.name, k.name) for k in program.kernels if not k.template]
    for instantiation in program.instantiations:
        if instantiation.kernel not in templates:
            message = f"'{instantiation.kernel}' is no template kernel"
            raise msl.fail(instantiation.at, message)
        kernel = templates[instantiation.kernel]
        found.append((kernel, instantiation.host_name, instantiation.function))
    seen: set[str] = set()
    for kernel, host, _ in found:
        if host in seen:
            raise msl.fail(kernel.at, f"two kernels are named '{host}'")
        seen.add(host)
    if not found:
        raise msl.MslError("error: the text has no kernel")
    return found


def stem_of(text: bytes) -> bytes:
    """The text with empty lines where a line makes a kernel of a template."""
    lines = text.split(b"\n")
    return b"\n".join(b"" if line.startswith(INSTANTIATION) else line for line in lines)


def constant_entry(constant: msl.FunctionConstant) -> str:
    if constant.type.split("::")[-1] not in DATA_TYPES:
        raise msl.fail(constant.at, f"a function constant of type {constant.type}")
    name, number = constant.name, DATA_TYPES[constant.type.split("::")[-1]]
    setter = f"[](const void* value) {{ __builtin_memcpy(&{name}, value, sizeof {name}); }}"
    return f'    {{"{name}", int({constant.index}), {number}, {setter}}},'


def translate(text: bytes, name: str) -> str:
    program = msl.parse(text.decode(), name)
    marks = Branches(Tokens(program.text, name)).find()
    body = substituted(program.text, replacements(program) + [(at, at, mark) for at, mark in marks])
    entries = list(enumerate(entry_points(program)))
    tables = [kernel_tables(program, k, host, f, n) for n, (k, host, f) in entries]
    kernels = [kernel_entry(program, k, host, f, n) for n, (k, host, f) in entries]
    constants = [constant_entry(constant) for constant in program.constants]
    epilogue = [
        '#line 1 "kernel table"',
        "namespace {",
        *max_threads_templates(program),
        *tables,
        "const softmetal::Kernel kernel_table[] = {",
        *kernels,
        "};",
        "const softmetal::FunctionConstant constant_table[] = {",
        *constants,
        "    {},",
        "};",
        "}  // namespace",
        f"const softmetal::Program softmetal::program = {{0x{msl.text_hash(text):016x}u, "
        f"0x{msl.text_hash(stem_of(text)):016x}u, kernel_table, {len(kernels)}, "
        f"constant_table, {len(constants)}}};",
    ]
    return PROLOGUE.format(name=name) + body + "\n" + "\n".join(epilogue) + "\n"


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        result = translate(source.read_bytes(), source.name)
    except msl.MslError as error:
        print(error, file=sys.stderr)
        return 1
    target.write_text(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
