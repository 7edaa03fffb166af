"""Metal shader text as tokens, scopes and functions, and its rewriting to C++ for OpenCL.

The text comes preprocessed: no comments, no macros, only `#pragma` lines.
"""

import re
from dataclasses import dataclass, field
from itertools import pairwise

TOKEN = re.compile(
    r"""(?P<pragma>^[ \t]*\#[^\n]*)
      | (?P<space>\s+)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<punct>\.\.\.|->|::|<<=|>>=|[-+*/%&|^<>=!]=|&&|\|\||\+\+|--|<<|.)""",
    re.VERBOSE | re.MULTILINE,
)
# Each of MSL's address spaces as one of OpenCL's. The names do not matter, the properties do:
# in OpenCL a function may hold a static variable in __global only, which is what a threadgroup
# variable in a template of kernels needs.
SPACES = {
    "thread": "__private",
    "device": "__local",
    "threadgroup": "__global",
    "constant": "__constant",
}
# Words of OpenCL that are plain names in MSL.
RENAMED = ("global", "local", "generic", "pipe", "read_only", "write_only", "read_write")
WORDS = {**SPACES, "kernel": "", **{name: name + "_" for name in RENAMED}}
# MSL copies a trivial struct out of every address space. OpenCL's implicit copies leave out
# constant; defaulted on first declaration they keep the struct trivial and an aggregate.
COPIES = (
    "{0}(const __generic {0}&) = default; {0}(const __constant {0}&) = default; "
    "__generic {0}& operator=(const __generic {0}&) __generic = default; "
    "__generic {0}& operator=(const __constant {0}&) __generic = default; "
)

VECTOR = re.compile(r"(u?(char|short|int|long)|half|float)[234]")


@dataclass
class Attribute:
    """One of a [[...]] list; `argument` is the text between its parentheses."""

    name: str
    argument: str
    line: int


@dataclass
class Token:
    """A piece of the text; `line` counts from 0."""

    kind: str
    text: str
    line: int
    out: str  # what it becomes in the rewritten text
    injected: str = ""  # what follows it there and is not in the text
    scope: str = "namespace"  # what the innermost braces are: namespace, record or function
    attributes: list[Attribute] = field(default_factory=list)  # those that stand right before it


@dataclass
class Parameter:
    """One parameter of a kernel."""

    texts: list[str]
    attributes: list[Attribute]
    line: int

    @property
    def name(self) -> str:
        """The declared name."""
        until = self.texts.index("[") if "[" in self.texts else len(self.texts)
        return self.texts[until - 1]

    @property
    def is_indirect(self) -> bool:
        """Whether it is a pointer, a reference or an array."""
        return any(text in ("*", "&", "[") for text in self.texts)


@dataclass
class Function:
    """A function definition; `parameters` are read of kernels only."""

    name: str
    line: int
    is_kernel: bool
    is_template: bool
    returns: list[str]
    attributes: list[Attribute]
    parameters: list[Parameter] = field(default_factory=list)
    body: list[Token] = field(default_factory=list)
    end: Token | None = None  # the brace that ends it


@dataclass
class ThreadgroupVariable:
    """A variable in threadgroup memory, declared in a function."""

    name: str
    line: int
    function: Function
    depth: int  # 0: outermost in the function
    has_initialiser: bool


def tokenize(text: str) -> list[Token]:
    """Cut the text into tokens, white space included, so that joining them gives it back."""
    tokens = []
    line = 0
    for match in TOKEN.finditer(text):
        tokens.append(Token(match.lastgroup or "", match[0], line, match[0]))
        line += match[0].count("\n")
    return tokens


def closing(tokens: list[Token], start: int) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    opener = tokens[start].text
    closer = {"(": ")", "[": "]", "{": "}", "<": ">"}[opener]
    depth = 0
    for index in range(start, len(tokens)):
        depth += (tokens[index].text == opener) - (tokens[index].text == closer)
        if depth == 0:
            return index
    return len(tokens) - 1


def split(tokens: list[Token]) -> list[tuple[list[Token], Token | None]]:
    """Split at the commas outside brackets; each part comes with the comma that ends it."""
    parts: list[tuple[list[Token], Token | None]] = []
    part: list[Token] = []
    depth = 0
    for token in tokens:
        depth += (token.text in "([{<") - (token.text in ")]}>")
        if token.text == "," and depth == 0:
            parts.append((part, token))
            part = []
        else:
            part.append(token)
    return [*parts, (part, None)] if part else parts


def texts_of(tokens: list[Token]) -> list[str]:
    """Return the tokens' texts."""
    return [t.text for t in tokens]


def without_template(head: list[Token]) -> list[Token]:
    """Return a declaration without its `template <...>`."""
    while len(head) > 1 and head[0].text == "template" and head[1].text == "<":
        head = head[closing(head, 1) + 1 :]
    return head


class Shader:
    """The tokens of a text, with what was declared in it."""

    def __init__(self, text: str) -> None:
        self.all = tokenize(text)
        self.attributes: list[Attribute] = []
        self.functions: list[Function] = []
        self.instantiations: list[tuple[list[Token], list[Attribute]]] = []
        self.function_constants: dict[str, Attribute] = {}
        self.threadgroup_variables: list[ThreadgroupVariable] = []
        self.derived_records: list[Token] = []
        self.tokens = self._take_attributes()
        for token in self.tokens:
            token.out = WORDS.get(token.text, token.text)
        self._vectors: dict[str, str] = {}  # names declared for a vector type -> its own
        self._scan(0, len(self.tokens), "namespace", None, 0)
        self._call_constructors()

    def rewritten(self) -> tuple[str, list[range]]:
        """Return C++ for OpenCL with the same lines, and where in it something was put in."""
        pieces: list[str] = []
        ranges = []
        length = 0
        for token in self.all:
            pieces += token.out, token.injected
            length += len(token.out) + len(token.injected)
            if token.injected:
                ranges.append(range(length - len(token.injected), length))
        return "".join(pieces), ranges

    def _take_attributes(self) -> list[Token]:
        tokens = [t for t in self.all if t.kind not in ("space", "pragma")]
        kept: list[Token] = []
        waiting: list[Attribute] = []
        index = 0
        while index < len(tokens):
            if texts_of(tokens[index : index + 2]) == ["[", "["]:
                end = closing(tokens, index)
                for part, _ in split(tokens[index + 2 : end - 1]):
                    argument = " ".join(texts_of(part[2:-1]))
                    waiting.append(Attribute(part[0].text, argument, part[0].line))
                for taken in tokens[index : end + 1]:
                    taken.out = ""
                index = end + 1
                continue
            tokens[index].attributes = waiting
            self.attributes += waiting
            waiting = []
            kept.append(tokens[index])
            index += 1
        return kept

    # Walks over statements: each ends with a semicolon or with a body in braces.
    def _scan(
        self, index: int, end: int, scope: str, function: Function | None, depth: int
    ) -> None:
        start = index
        while index < end:
            token = self.tokens[index]
            token.scope = scope
            if token.text in ("(", "["):
                index = self._skip(index, scope)
            elif token.text == "{":
                close = closing(self.tokens, index)
                head = self.tokens[start:index]
                kind = brace_kind(texts_of(without_template(head)), scope)
                if kind == "namespace":
                    self._scan(index + 1, close, kind, None, 0)
                elif kind == "function":
                    inner = self._function(head)
                    inner.body = self.tokens[index + 1 : close]
                    inner.end = self.tokens[close]
                    self._scan(index + 1, close, kind, inner, 0)
                elif kind == "block":
                    self._scan(index + 1, close, scope, function, depth + 1)
                elif kind == "record":
                    self._record(without_template(head), index, close)
                    self._scan(index + 1, close, kind, function, depth)
                else:
                    self._skip(index, scope)
                index = close + 1
                if kind in ("namespace", "function", "block"):
                    start = index
            elif token.text == ";":
                if scope == "function" and function:
                    self._local(self.tokens[start:index], function, depth)
                else:
                    self._declaration(self.tokens[start:index], token)
                index += 1
                start = index
            else:
                index += 1

    def _skip(self, index: int, scope: str) -> int:
        close = closing(self.tokens, index)
        for token in self.tokens[index : close + 1]:
            token.scope = scope
        return close + 1

    def _function(self, head: list[Token]) -> Function:
        declared = without_template(head)
        paren = texts_of(declared).index("(")
        before = declared[: max(paren - 1, 0)]
        attributes = [a for t in head[: len(head) - len(declared) + paren] for a in t.attributes]
        words = texts_of(before)
        name = declared[max(paren - 1, 0)]
        function = Function(
            name.text,
            name.line,
            "kernel" in words or any(a.name == "kernel" for a in attributes),
            len(declared) < len(head),
            [w for w in words if w not in ("kernel", "static", "inline", "constexpr")],
            attributes,
        )
        if function.is_kernel:
            close = closing(declared, paren)
            for part, comma in split(declared[paren + 1 : close]):
                after = comma or declared[close]
                own = [a for t in [*part, after] for a in t.attributes]
                function.parameters.append(Parameter(texts_of(part), own, part[0].line))
        self.functions.append(function)
        return function

    def _record(self, head: list[Token], brace: int, close: int) -> None:
        texts = texts_of(head)
        word = next(i for i, t in enumerate(texts) if t in ("struct", "class", "union"))
        if ":" in texts:
            self.derived_records.append(head[word])
        if word + 1 >= len(head) or head[word + 1].kind != "name":
            return
        name = texts[word + 1]
        body = texts_of(self.tokens[brace + 1 : close])
        has_constructor = any(
            pair == (name, "(") and before not in ("~", "return", "=", ",", "(")
            for before, pair in zip(["{", *body], pairwise(body), strict=False)
        )
        members = COPIES if has_constructor else "{0}() = default; " + COPIES
        public = ("public: ", "private: ") if texts[word] == "class" else ("", "")
        self.tokens[brace].injected = " " + public[0] + members.format(name) + public[1]

    def _declaration(self, tokens: list[Token], semicolon: Token) -> None:
        if not tokens:
            return
        texts = texts_of(tokens)
        attributes = [a for t in tokens for a in t.attributes] + semicolon.attributes
        aliased = texts[-2] if texts[0] == "typedef" else texts[-1] if texts[0] == "using" else ""
        if VECTOR.fullmatch(aliased):
            self._vectors[texts[-1] if texts[0] == "typedef" else texts[1]] = aliased
        if texts[0] == "template" and texts[1:2] != ["<"]:
            self.instantiations.append((tokens, attributes))
            return
        if "(" in texts[: texts.index("=") if "=" in texts else len(texts)]:
            return
        constants = [a for a in attributes if a.name == "function_constant"]
        if constants:
            # Its value comes with the pipeline; `extern` is how OpenCL says that it is not known.
            until = texts.index("=") if "=" in texts else len(texts)
            self.function_constants[texts[until - 1]] = constants[0]
            tokens[0].out = "extern " + tokens[0].out
        elif "=" in texts and set(texts[texts.index("=") :]) & set(self.function_constants):
            self._derived_constant(tokens, semicolon)

    def _derived_constant(self, tokens: list[Token], semicolon: Token) -> None:
        # A constant made of function constants is no constant to OpenCL: declared here, and its
        # value is checked in a function.
        texts = texts_of(tokens)
        equals = texts.index("=")
        name = texts[equals - 1]
        kind = " ".join(t for t in texts[: equals - 1] if t not in ("constant", "static", "const"))
        self.function_constants[name] = Attribute("derived", "", tokens[0].line)
        tokens[0].out = "extern " + tokens[0].out
        tokens[equals].out = f"; static inline void forge_value_of_{name}() {{ {kind} value ="
        semicolon.out = "; (void)value; }"

    def _call_constructors(self) -> None:
        # clang converts one value to a vector; MSL takes as many as fill it (2.2.2).
        for before, token, after in zip(
            [None, *self.tokens], self.tokens, self.tokens[1:], strict=False
        ):
            vector = self._vectors.get(token.text, token.text)
            if after.text == "(" and VECTOR.fullmatch(vector):
                qualified = before is not None and before.text == "::" and vector == token.text
                token.out = ("" if qualified else "metal::") + "make_" + vector

    def _local(self, tokens: list[Token], function: Function, depth: int) -> None:
        texts = texts_of(tokens)
        if "threadgroup" not in texts[:2]:
            return
        index = texts.index("threadgroup") + 1
        while index < len(texts) and texts[index] not in ("[", "=", ",", "*", "&", "("):
            index = closing(tokens, index) + 1 if texts[index] == "<" else index + 1
        if index < len(texts) and texts[index] in ("*", "&", "("):
            return  # a pointer or a reference to threadgroup memory
        tokens[0].out = "static " + tokens[0].out
        variable = ThreadgroupVariable(
            texts[index - 1], tokens[0].line, function, depth, "=" in texts or "{" in texts
        )
        self.threadgroup_variables.append(variable)


def brace_kind(texts: list[str], scope: str) -> str:
    """Say what an opening brace begins, from what stands before it in its statement."""
    if "namespace" in texts[:2]:
        return "namespace"
    if "enum" in texts[:2]:
        return "initialiser"
    record = any(word in texts[:2] for word in ("struct", "class", "union"))
    if record and "(" not in texts and "=" not in texts:
        return "record"
    if scope in ("namespace", "record") and "(" in texts:
        return "function"
    if scope == "function" and (not texts or texts[-1] in (")", "else", "do", ":", "const")):
        return "block"
    return "initialiser"
