"""What clang's syntax tree shows and C++ for OpenCL takes, but Metal does not.

Where MSL wants an address space spelled, OpenCL puts in the generic one; and its methods run on
objects in any address space, where MSL's run on those in thread memory.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from msl_rules import RESTRICTIONS, Finding

Node = dict[str, Any]
SPACES = "MSL 4 Address Spaces"
PROGRAM_SCOPE = "MSL 4.2 Constant Address Space"
SPELLED = re.compile(r"__(private|local|global|constant)\b")
NOT_THREAD = re.compile(r"__(local|global|constant)\b")
DECLARATIONS = ("ParmVarDecl", "VarDecl", "FieldDecl", "TypedefDecl", "TypeAliasDecl")
FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl")
CASTS = ("CStyleCastExpr", "CXXStaticCastExpr", "CXXReinterpretCastExpr", "CXXFunctionalCastExpr")
SCOPES = ("TranslationUnitDecl", "NamespaceDecl", "CXXRecordDecl", "LinkageSpecDecl")


def position(node: Node) -> int:
    """Return where the node is in the text, or -1."""
    for place in (node.get("loc", {}), node.get("range", {}).get("begin", {})):
        found = place.get("expansionLoc", place).get("offset")
        if found is not None:
            return int(found)
    return -1


def spells_every_space(kind: str) -> bool:
    """Whether what each pointer and reference of a type points to is in a named address space."""
    pieces = re.split(r"&&|[*&]", kind)
    return all(SPELLED.search(piece) for piece in pieces[:-1])


def is_bare_array(source: str) -> bool:
    """Whether a parameter is an array: a pointer, to which clang gives thread's space unasked."""
    return "[" in source and "&" not in source and not SPELLED.search(source)


def type_of(node: Node) -> str:
    """Return the type as written."""
    return str(node.get("type", {}).get("qualType", ""))


class Tree:
    """One syntax tree; the text's own part begins at `first`, and `injected` is none of it."""

    def __init__(self, text: str, first: int, injected: list[range]) -> None:
        self._text = text
        self._first = first
        self._injected = injected
        self._starts = [r.start for r in injected]
        self._names: dict[str, str] = {}  # a function declaration's id -> one name for all of them
        self._calls: dict[str, set[str]] = {}
        self._defined: dict[str, tuple[int, str]] = {}

    def check(self, root: Node) -> Iterator[Finding]:
        """Yield the findings."""
        yield from self._walk(root, None, None)
        yield from self._recursion()

    def _is_ours(self, offset: int) -> bool:
        """Whether the text put in by the rewriting holds this place, or the library does."""
        if offset < self._first:
            return True
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset in self._injected[index]

    def _at(self, node: Node, rule: str, message: str) -> Finding:
        return Finding(self._text.count("\n", 0, max(position(node), 0)), rule, message)

    def _walk(self, node: Node, parent: Node | None, function: str | None) -> Iterator[Finding]:
        kind = node.get("kind", "")
        offset = position(node)
        if kind in FUNCTIONS:
            function = self._enter(node)
        skipped = node.get("isImplicit", False) or self._is_ours(offset)
        if not skipped:
            yield from self._check(node, kind, parent)
        self._note_call(node, function)
        for child in node.get("inner", []):
            if child:
                yield from self._walk(child, node, function)

    def _check(self, node: Node, kind: str, parent: Node | None) -> Iterator[Finding]:
        if kind in DECLARATIONS:
            yield from self._check_declaration(node, kind, parent)
        elif kind in FUNCTIONS:
            if not spells_every_space(type_of(node).split("(")[0]):
                yield self._at(
                    node, SPACES, f"the result of {node.get('name')} must name its address space"
                )
        elif kind in CASTS:
            if not spells_every_space(type_of(node)):
                yield self._at(node, SPACES, "the type of a cast must name its address space")
        elif kind == "CXXMemberCallExpr":
            member = node["inner"][0]
            yield from self._check_object(node, member.get("inner", []), member.get("name", ""))
        elif kind == "CXXOperatorCallExpr":
            callee = node["inner"][0]
            name = callee.get("inner", [{}])[0].get("referencedDecl", {}).get("name", "")
            if name != "operator=":
                yield from self._check_object(node, node["inner"][1:], name)

    def _check_declaration(self, node: Node, kind: str, parent: Node | None) -> Iterator[Finding]:
        name = node.get("name", "a parameter")
        declared = type_of(node)
        source = self._source(node)
        if not spells_every_space(declared):
            yield self._at(
                node, SPACES, f"{name}: a pointer or reference must name its address space"
            )
        elif kind == "ParmVarDecl" and is_bare_array(source):
            message = f"{name}: an array parameter must name its address space"
            yield self._at(node, SPACES, message)
        if kind == "VarDecl" and parent is not None and parent["kind"] in SCOPES:
            own = re.split(r"[*&]", declared)[-1]
            if "__constant" not in own:
                yield self._at(
                    node, PROGRAM_SCOPE, f"{name} is at program scope and must be constant"
                )

    def _check_object(self, node: Node, objects: list[Node], name: str) -> Iterator[Finding]:
        for argument in objects:
            if argument.get("castKind") != "AddressSpaceConversion":
                continue
            inner = type_of(argument["inner"][0])
            if NOT_THREAD.search(inner):
                yield self._at(
                    node,
                    SPACES,
                    f"{name} is a method for objects in thread memory, called on one of type "
                    f"{inner}; copy it first",
                )

    def _source(self, node: Node) -> str:
        begin, end = node["range"]["begin"], node["range"]["end"]
        begin, end = begin.get("expansionLoc", begin), end.get("expansionLoc", end)
        return self._text[begin.get("offset", 0) : end.get("offset", 0) + end.get("tokLen", 0)]

    def _enter(self, node: Node) -> str:
        name = node.get("mangledName", node["id"])
        self._names[node["id"]] = name
        if not self._is_ours(position(node)):
            line = self._text.count("\n", 0, max(position(node), 0))
            self._defined[name] = (line, node.get("name", ""))
        return str(name)

    def _note_call(self, node: Node, function: str | None) -> None:
        called = node.get("referencedDecl", {}).get("id") or node.get("referencedMemberDecl")
        if function and called:
            self._calls.setdefault(function, set()).add(called)

    def _recursion(self) -> Iterator[Finding]:
        graph = {
            caller: {self._names[c] for c in called if c in self._names}
            for caller, called in self._calls.items()
        }
        for name, (line, plain) in self._defined.items():
            reached: set[str] = set()
            frontier = list(graph.get(name, ()))
            while frontier:
                function = frontier.pop()
                if function not in reached:
                    reached.add(function)
                    frontier += graph.get(function, ())
            if name in reached:
                yield Finding(
                    line,
                    f"forge: {RESTRICTIONS}",
                    f"{plain} calls itself; recursion needs a stack that the host has to size",
                )


def check_tree(root: Node, text: str, first: int, injected: list[range]) -> Iterator[Finding]:
    """Yield what the tree shows; `first` is where the text begins, `injected` is none of it."""
    return Tree(text, first, injected).check(root)
