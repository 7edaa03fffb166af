"""The text of one Metal kernel for frameworks that compile shaders themselves.

The compiled module brings the shaders as one text, written for a host that sets function constants
and binds arguments by slots with gaps. A framework does neither: here switches become plain
constants, and a kernel's arguments are numbered as they come. Everything else is that very text.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from forge import _forge

Switches = tuple[tuple[int, bool], ...]
"""Values of the function constants, by their index."""

_INSTANTIATION = re.compile(
    r'^template \[\[host_name\("(\w+)"\)\]\].*decltype\((\w+)<([^>]*)>\).*$', re.M
)
_CONSTANT_INDEX = re.compile(r"\b(kConstant\w+) = (\d+)")
_FUNCTION_CONSTANT = re.compile(
    r"^constant bool (\w+) \[\[function_constant\(forge::(\w+)\)\]\];", re.M
)
_ENABLED_BY = re.compile(r", function_constant\((\w+)\)")
_PARAMETER = re.compile(r"([\w\s]+?[*&]?\s\w+)\s*\[\[(.*?)\]\]", re.S)
_TEMPLATE_PARAMETER = re.compile(r"(\w+) (\w+)(?: = ([^,<]+(?:<[^>]*>[^,]*)?))?")
_RECORD = re.compile(r"\b(?:device const|constant) (Attn\w+[*&])")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel."""

    declaration: str
    """Such as ``device const float* q``."""
    attribute: str
    """What is passed: ``buffer(kBufferQ)``, or a position: ``thread_index_in_simdgroup``."""
    enabled_by: str
    """The switch without which the kernel does not touch it; empty: none."""

    @property
    def name(self) -> str:
        return re.split(r"\W", self.declaration)[-1]

    @property
    def array(self) -> str:
        """The name that the plan has for it."""
        return self.name.removesuffix("_o")

    @property
    def is_buffer(self) -> bool:
        return self.attribute.startswith("buffer(")

    @property
    def is_written(self) -> bool:
        return self.declaration.startswith("device ") and " const " not in self.declaration


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel in the text, with its switches set and its records in one address space."""

    name: str
    text: str
    """Without the lines that make kernels of templates, but for this one's."""
    begin: int
    """Where its parameters begin in the text."""
    end: int
    """Where they end."""
    body: str
    constants: str
    """Declarations of what stands for the template's parameters."""
    parameters: tuple[Parameter, ...]
    enabled: frozenset[str]
    """The switches that are on."""

    def uses(self, parameter: Parameter) -> bool:
        return not parameter.enabled_by or parameter.enabled_by in self.enabled


@functools.cache
def kernel_text(kernel: str, switches: Switches, space: str) -> KernelText:
    """Return the kernel with these switches; ``space`` is where its records lie.

    Records are what the host makes: parameters, grid, key ranges. ``space`` is ``"constant"`` or
    ``"device const"``.
    """
    text = _forge.shader_text()
    made = {
        name: (function, arguments) for name, function, arguments in _INSTANTIATION.findall(text)
    }
    function, arguments = made.get(kernel, (kernel, ""))
    text = _INSTANTIATION.sub(lambda line: line[0] if line[1] == kernel else "", text)
    indices = {name: int(index) for name, index in _CONSTANT_INDEX.findall(text)}
    values = {name: dict(switches)[indices[key]] for name, key in _FUNCTION_CONSTANT.findall(text)}
    text = _FUNCTION_CONSTANT.sub(
        lambda line: f"constant bool {line[1]} = {str(values[line[1]]).lower()};", text
    )
    text = _RECORD.sub(rf"{space} \1", text)
    head = re.search(rf"(?:template <([^\n]*)>\n)?[^\n]*\bvoid {function}\(", text)
    if head is None:
        raise RuntimeError(f"the shaders must have a kernel {kernel}, got a text without one")
    end = text.index(") {", head.end())
    body = text[end + 3 : text.index("\n}\n", end)]
    parameters = tuple(
        Parameter(" ".join(declaration.split()), *_split(attributes))
        for declaration, attributes in _PARAMETER.findall(text[head.end() : end])
    )
    enabled = frozenset(name for name, value in values.items() if value)
    return KernelText(
        kernel,
        text,
        head.end(),
        end,
        body,
        _constants(head[1] or "", arguments, body),
        parameters,
        enabled,
    )


def _split(attributes: str) -> tuple[str, str]:
    enabled_by = _ENABLED_BY.search(attributes)
    return _ENABLED_BY.sub("", attributes), enabled_by[1] if enabled_by else ""


def _constants(parameters: str, arguments: str, body: str) -> str:
    """Declare the template's parameters that the body reads."""
    given = [argument.strip() for argument in arguments.split(",")] if arguments else []
    lines = []
    for number, (type_, name, default) in enumerate(_TEMPLATE_PARAMETER.findall(parameters)):
        value = given[number] if number < len(given) else default
        if re.search(rf"(?<!::)\b{name}\b", body):
            lines.append(f"constexpr {type_} {name} = {value};\n")
    return "".join(lines)


@dataclass(frozen=True, slots=True)
class Library:
    """A text with one kernel to call; its arguments in order, by the names of the plan."""

    text: str
    arguments: tuple[str, ...]


@functools.cache
def library_text(kernel: str, switches: Switches) -> Library:
    """Return a whole text whose kernel takes its arguments at the slots 0, 1, 2 and so on.

    An argument that its switch turns off has the name of the first one: something must be bound.
    """
    of = kernel_text(kernel, switches, "constant")
    buffers = [parameter for parameter in of.parameters if parameter.is_buffer]
    numbers = {parameter: f"buffer({slot})" for slot, parameter in enumerate(buffers)}
    signature = ", ".join(
        f"{parameter.declaration} [[{numbers.get(parameter, parameter.attribute)}]]"
        for parameter in of.parameters
    )
    text = of.text[: of.begin] + signature + of.text[of.end :]
    names = [parameter.array if of.uses(parameter) else buffers[0].array for parameter in buffers]
    return Library(_ENABLED_BY.sub("", text), tuple(names))


@dataclass(frozen=True, slots=True)
class Body:
    """A kernel for a framework that writes the signature itself."""

    header: str
    source: str
    inputs: tuple[str, ...]
    """Arrays that it reads, by the names of the plan; the source calls them ``given_<name>``."""
    outputs: tuple[str, ...]
    """Arrays that it writes, which the source calls ``made_<name>``."""


# The records come as one array of 64-bit words: parameters, grid, key ranges.
WORDS = "words"
_WORDS_BEFORE = {
    "params": "",
    "grid": " + sizeof(AttnParams) / 8",
    "ranges": " + (sizeof(AttnParams) + sizeof(AttnGrid)) / 8",
}


@functools.cache
def body_text(kernel: str, switches: Switches) -> Body:
    """Return a kernel's body, with its parameters made of what the framework hands over.

    That is: ``given_<name>`` and ``made_<name>`` of the arrays, ``words``, and the positions under
    their own names in the language.
    """
    of = kernel_text(kernel, switches, "device const")
    header = _ENABLED_BY.sub("", _INSTANTIATION.sub("", of.text))
    buffers = [x for x in of.parameters if x.is_buffer and x.name not in _WORDS_BEFORE]
    used = [parameter for parameter in buffers if of.uses(parameter)]
    inputs = tuple(parameter.array for parameter in used if not parameter.is_written)
    outputs = tuple(parameter.array for parameter in used if parameter.is_written)
    lines = [of.constants]
    for parameter in of.parameters:
        name, type_ = parameter.name, parameter.declaration[: -len(parameter.name)].strip()
        if not parameter.is_buffer:
            lines.append(f"{type_} {name} = {parameter.attribute};\n")
        elif name in _WORDS_BEFORE:
            pointer = f"reinterpret_cast<{type_[:-1]}*>({WORDS}{_WORDS_BEFORE[name]})"
            lines.append(f"{type_} {name} = {'*' if type_.endswith('&') else ''}{pointer};\n")
        else:
            given = f"{'made' if parameter.is_written else 'given'}_{parameter.array}"
            if parameter not in used:  # nobody touches it
                given = f"made_{outputs[0]}"
            lines.append(f"{type_} {name} = reinterpret_cast<{type_}>({given});\n")
    return Body(header, "".join(lines) + of.body, inputs, outputs)
