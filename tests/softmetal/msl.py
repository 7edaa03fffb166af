"""Reads a flattened Metal shading language text: address spaces, kernels, function constants.

Only what differs from C++ is understood; everything else is C++ as it stands, and the writers
leave it alone. What looks like one of the differences but is not understood is an `MslError` with
file and line, never a guess. Writers for a target language (translate.py: C++ on the software
device) replace the pieces found here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shader_tokens import OPENING, MslError, Token, Tokens, fail, text_hash

__all__ = ["MslError", "Program", "fail", "parse", "text_hash"]

ADDRESS_SPACES = ("device", "constant", "threadgroup", "thread")
UNSUFFIXED = re.compile(r"(\d[\d']*\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
UNSUPPORTED = ("ray_data", "object_data", "threadgroup_imageblock", "vertex", "fragment")


@dataclass
class Declarator:
    """`<space> <type> <* or & or nothing> <name>`, anywhere in the text."""

    space: str
    type: str  # without const
    const: bool
    form: str  # "*", "&" or "" for a variable
    pointer_const: bool  # `* const`
    begin: int
    end: int  # after `*`, `&`, or the type; a variable's ends after its sizes
    at: Token
    name: str = ""  # of a variable
    sizes: list[str] = field(default_factory=list)  # of a variable
    in_kernel: bool = False


@dataclass
class Parameter:
    name: str
    kind: str  # "buffer", "threadgroup", or the name of a built-in value
    index: str  # the text of a buffer's or threadgroup argument's index
    enabled_by: str  # a function constant, or ""
    declarator: Declarator | None
    at: Token


@dataclass
class Kernel:
    name: str
    template: str  # `template <...>`, or ""
    parameters: list[Parameter]
    max_threads: str  # in terms of the template's parameters
    words: frozenset[str]  # every name that its body and parameters use
    at: Token


@dataclass
class Instantiation:
    host_name: str
    function: str  # with template arguments
    kernel: str
    at: Token


@dataclass
class FunctionConstant:
    type: str
    name: str
    index: str
    begin: int
    end: int
    at: Token


@dataclass
class Program:
    text: str
    declarators: list[Declarator]
    kernels: list[Kernel]
    instantiations: list[Instantiation]
    constants: list[FunctionConstant]
    autos: list[tuple[int, int]]  # initializers of `auto x = ...`
    casts: list[tuple[int, int]]  # `reinterpret_cast` words before an address-space pointer
    removed: list[tuple[int, int]]  # words and attributes that C++ does not know
    floats: list[int]  # ends of literals such as 1.0, which C++ takes for doubles
    functions: dict[str, set[str]]  # names that each function of the text uses


class Parser(Tokens):
    """Walks over the tokens once; each method handles one construct and returns where to go on."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.program = Program(text, [], [], [], [], [], [], [], [], {})
        self.kernel_end = -1  # the token that closes the kernel we are in

    def parse(self) -> Program:
        i = 0
        while i < len(self.tokens):
            i = self.step(i)
        return self.program

    def step(self, i: int) -> int:
        """Handles what starts at token i; returns where to go on."""
        token = self.tokens[i]
        if token.kind == "number" and UNSUFFIXED.fullmatch(token.text):
            self.program.floats.append(token.end)
        if token.kind != "name":
            return self.attribute(i) if token.text == "[[" else i + 1
        if token.text in ADDRESS_SPACES:
            return self.address_space(i)
        if token.text == "kernel":
            return self.kernel(i)
        if token.text in UNSUPPORTED and self.tokens[i + 1].kind == "name":
            raise fail(token, f"'{token.text}' is not supported")
        if token.text == "template" and self.text(i + 1) == "[[":
            return self.instantiation(i)
        if token.text == "auto":
            return self.auto(i)
        if token.text == "reinterpret_cast" and self.text(i + 2) in (*ADDRESS_SPACES, "const"):
            space = next(t for t in (self.text(i + 2), self.text(i + 3)) if t != "const")
            if space in ADDRESS_SPACES and space != "thread":
                self.program.casts.append((token.begin, token.end))
        statement = token.text in ("if", "for", "while", "switch")
        if not statement and self.text(i + 1) == "(" and self.text(self.closing[i + 1] + 1) == "{":
            self.function(i, i + 1)
        return i + 1

    def function(self, i: int, parenthesis: int) -> frozenset[str]:
        """Notes which names a function with a body uses."""
        body = self.closing[parenthesis] + 1
        end = self.closing[body]
        words = {t.text for t in self.tokens[parenthesis:end] if t.kind == "name"}
        self.program.functions.setdefault(self.text(i), set()).update(words)
        return frozenset(words)

    def attribute(self, i: int) -> int:
        end = self.closing[i]
        known = ("kernel", "unroll", "maybe_unused", "nodiscard", "fallthrough")
        if self.text(i + 1) in ("kernel", "max_total_threads_per_threadgroup"):
            return self.kernel(i)
        if self.text(i + 1) not in known:
            raise fail(self.tokens[i], f"attribute [[{self.source(i + 1, end)}]] is not understood")
        return end + 1

    def auto(self, i: int) -> int:
        """`auto x = e;` takes the value, where C++ would take our reference class."""
        if self.text(i + 1) in ("&", "*"):
            return i + 1
        if self.text(i + 2) != "=" or self.tokens[i + 1].kind != "name":
            raise fail(self.tokens[i], "auto is understood as `auto name = value;` only")
        end = i + 3
        while self.text(end) not in (";", ","):
            end = self.closing[end] + 1 if self.text(end) in OPENING else end + 1
            if end >= len(self.tokens):
                raise fail(self.tokens[i], "a declaration that does not end")
        if self.text(end) == ",":
            raise fail(self.tokens[i], "one auto variable a declaration, please")
        self.program.autos.append((self.tokens[i + 3].begin, self.tokens[end - 1].end))
        return i + 3

    def address_space(self, i: int) -> int:
        first = i
        token = self.tokens[i]
        while self.text(first - 1) in ("const", "volatile"):
            first -= 1
        words = [self.text(j) for j in range(first, i)]
        j = i + 1
        while self.text(j) in ("const", "volatile", *ADDRESS_SPACES):
            words.append(self.text(j))
            j += 1
        type_end = self.type_end(j)
        type_text = self.source(j, type_end)
        j = type_end
        # `T device*` is legal too; nobody writes it, so it is not read.
        while self.text(j) in ("const", "volatile"):
            words.append(self.text(j))
            j += 1
        if "volatile" in words or any(space in words for space in ADDRESS_SPACES):
            raise fail(token, "volatile, or a second address space in one type, is not understood")
        form = self.text(j) if self.text(j) in ("*", "&", "&&") else ""
        if form == "&&":
            raise fail(token, "references to temporaries are not understood")
        begin = self.tokens[first].begin
        declarator = Declarator(
            token.text, type_text, "const" in words, form, False, begin, 0, token
        )
        declarator.in_kernel = i < self.kernel_end
        if form == "":
            return self.variable(declarator, j)
        j += 1
        if self.text(j) == "const":
            declarator.pointer_const = True
            j += 1
        if self.text(j) in ("*", "&", *ADDRESS_SPACES):
            raise fail(token, "pointers to pointers are not understood")
        declarator.end = self.tokens[j - 1].end
        self.program.declarators.append(declarator)
        return j

    def variable(self, declarator: Declarator, j: int) -> int:
        token = declarator.at
        if declarator.space == "device":
            raise fail(token, "a variable in the device address space")
        declarator.name = self.name(j)
        name_end = j + 1
        j = name_end
        while self.text(j) == "[":
            declarator.sizes.append(self.source(j + 1, self.closing[j]))
            j = self.closing[j] + 1
        if self.text(j) == "[[" and self.text(j + 1) == "function_constant":
            return self.function_constant(declarator, j)
        if declarator.space == "threadgroup":
            if not declarator.in_kernel:
                raise fail(token, "threadgroup variables are declared in kernels only")
            if self.text(j) != ";":
                raise fail(token, "one threadgroup variable a declaration, without a value, please")
            if len(declarator.sizes) > 2:
                raise fail(token, "threadgroup arrays have one or two dimensions here")
            declarator.end = self.tokens[j - 1].end
        else:
            if declarator.space == "constant" and self.text(j) not in ("=", "{"):
                raise fail(token, "a constant without a value")
            declarator.end = self.tokens[name_end - 1].begin
            if declarator.space == "constant":
                self.check_constant_value(j, token)
        self.program.declarators.append(declarator)
        return name_end if declarator.space != "threadgroup" else j

    def check_constant_value(self, j: int, token: Token) -> None:
        """A value made of function constants would be frozen before a pipeline sets them."""
        names = {constant.name for constant in self.program.constants}
        while self.text(j) != ";":
            if self.text(j) in names or self.text(j) == "is_function_constant_defined":
                raise fail(token, "a constant made of function constants is not understood")
            j += 1

    def function_constant(self, declarator: Declarator, j: int) -> int:
        end = self.closing[j]
        index = self.source(j + 3, self.closing[j + 2])
        if self.closing[j + 2] != end - 1 or self.text(end + 1) != ";" or declarator.sizes:
            raise fail(
                declarator.at, "a function constant is `constant T name [[function_constant(i)]];`"
            )
        self.program.constants.append(
            FunctionConstant(
                declarator.type,
                declarator.name,
                index,
                declarator.begin,
                self.tokens[end + 1].end,
                declarator.at,
            )
        )
        return end + 2

    # Kernels

    def attributes(self, i: int) -> tuple[dict[str, str], int]:
        """The attributes [[a(x), b]] that start at i, and the token after them."""
        found: dict[str, str] = {}
        while self.text(i) == "[[":
            end = self.closing[i]
            j = i + 1
            while j < end:
                name = self.name(j)
                j += 1
                value = ""
                if self.text(j) == "(":
                    value = self.source(j + 1, self.closing[j])
                    j = self.closing[j] + 1
                found[name] = value
                if self.text(j) == ",":
                    j += 1
                elif j != end:
                    raise fail(self.tokens[j], "an attribute that is not understood")
            self.program.removed.append((self.tokens[i].begin, self.tokens[end].end))
            i = end + 1
        return found, i

    def template_head(self, i: int) -> str:
        """The `template <...>` that ends before token i."""
        if self.text(i - 1) != ">":
            return ""
        first = i - 1
        while self.text(first) != "template":
            first -= 1
            if first < 0:
                raise fail(self.tokens[i], "a kernel after '>' that is no template")
        return self.source(first, i)

    def kernel(self, i: int) -> int:
        token = self.tokens[i]
        template = self.template_head(i)
        attributes: dict[str, str] = {}
        while self.text(i) in ("kernel", "[["):
            if self.text(i) == "kernel":
                self.program.removed.append((self.tokens[i].begin, self.tokens[i].end))
                i += 1
            else:
                more, i = self.attributes(i)
                attributes.update(more)
        unknown = set(attributes) - {"kernel", "max_total_threads_per_threadgroup"}
        if unknown:
            raise fail(token, f"kernel attribute {', '.join(sorted(unknown))} is not understood")
        if self.text(i) != "void" or self.text(i + 2) != "(":
            raise fail(token, "a kernel is `kernel void name(parameters)`")
        name, open_, close = self.name(i + 1), i + 2, self.closing[i + 2]
        if self.text(close + 1) != "{":
            raise fail(token, "a kernel without a body")
        parameters = self.parameters(open_, close)
        words = self.function(i + 1, open_)
        self.kernel_end = self.closing[close + 1]
        self.program.kernels.append(
            Kernel(
                name,
                template,
                parameters,
                attributes.get("max_total_threads_per_threadgroup", ""),
                words,
                token,
            )
        )
        return close + 1

    def parameters(self, open_: int, close: int) -> list[Parameter]:
        parameters = []
        i = open_ + 1
        while i < close:
            parameter, i = self.parameter(i, close)
            parameters.append(parameter)
            if self.text(i) == "=":
                raise fail(self.tokens[i], "a kernel parameter with a default")
            if i < close and self.text(i) != ",":
                raise fail(self.tokens[i], f"unexpected '{self.text(i)}' after a kernel parameter")
            i += 1
        return parameters

    def parameter(self, i: int, close: int) -> tuple[Parameter, int]:
        token = self.tokens[i]
        known = len(self.program.declarators)
        start = i
        while self.text(start) == "const":
            start += 1
        declarator = None
        if self.text(start) in ADDRESS_SPACES:
            i = self.address_space(start)
            if len(self.program.declarators) == known or not self.program.declarators[-1].form:
                raise fail(token, "a kernel parameter that is neither pointer, reference nor value")
            declarator = self.program.declarators[-1]
        else:
            i = self.type_end(start)
        name = self.name(i)
        attributes, i = self.attributes(i + 1)
        enabled_by = attributes.pop("function_constant", "")
        if len(attributes) != 1:
            raise fail(
                token, f"kernel parameter '{name}' needs one attribute, such as [[buffer(0)]]"
            )
        kind, index = next(iter(attributes.items()))
        space = declarator.space if declarator else ""
        wanted = {"buffer": ("device", "constant"), "threadgroup": ("threadgroup",)}.get(
            kind, ("",)
        )
        if space not in wanted:
            raise fail(token, f"kernel parameter '{name}': [[{kind}]] with address space '{space}'")
        return Parameter(name, kind, index, enabled_by, declarator, token), i

    def instantiation(self, i: int) -> int:
        """`template [[host_name("n")]] [[kernel]] decltype(f<64>) f<64>;`"""
        token = self.tokens[i]
        attributes, j = self.attributes(i + 1)
        host_name = attributes.get("host_name", "")
        if set(attributes) - {"kernel"} != {"host_name"} or not host_name.startswith('"'):
            raise fail(token, 'an instantiation needs [[host_name("...")]]')
        if self.text(j) == "kernel":
            j += 1
        if self.text(j) != "decltype" or self.text(j + 1) != "(":
            raise fail(
                token,
                'an instantiation is `template [[host_name("n")]] [[kernel]] '
                "decltype(f<64>) f<64>;`",
            )
        function = self.source(j + 2, self.closing[j + 1])
        begin = self.closing[j + 1] + 1
        end = begin
        while self.text(end) != ";":
            end += 1
        if "".join(self.source(begin, end).split()) != "".join(function.split()):
            raise fail(token, f"'{function}' and '{self.source(begin, end)}' should be the same")
        self.program.instantiations.append(
            Instantiation(host_name[1:-1], function, self.name(j + 2), token)
        )
        self.program.removed = [r for r in self.program.removed if r[0] < token.begin]
        self.program.removed.append((token.begin, self.tokens[end].end))
        return end + 1


def parse(text: str, name: str) -> Program:
    return Parser(text, name).parse()
