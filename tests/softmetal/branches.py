"""Where the threads of a shader may part: statements that hold simdgroup operations or barriers.

The device is told of every such branch, round of a loop and function
(stdlib/softmetal/branch.h), so that threads which come to one line by different ways are told
apart. Other statements leave no mark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shader_tokens import OPENING, MslError, Tokens, fail

BARRIER = "threadgroup_barrier"
OPERATION = re.compile(r"simd_\w+|simdgroup_(barrier|load|store|multiply\w*)|" + BARRIER)
STATEMENTS = ("if", "for", "while", "switch", "do", "else")


@dataclass
class Function:
    name: str
    body: int  # the tokens of its braces
    end: int


class Branches:
    """The pieces to insert into one text, as (position, text)."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.functions = self.find_functions()
        self.holding = self.names_that_reach(lambda name: OPERATION.fullmatch(name) is not None)
        self.with_barrier = self.names_that_reach(lambda name: name == BARRIER)
        self.inserted: list[tuple[int, str]] = []
        self.number = 0

    def find(self) -> list[tuple[int, str]]:
        for function in self.functions:
            if not self.holds(function.body, function.end):
                continue
            self.mark("Round", function.body, function.end)
            i = function.body + 1
            while i < function.end:
                i = self.step(i)
        return self.inserted

    def find_functions(self) -> list[Function]:
        tokens = self.tokens
        found = []
        for i, token in enumerate(tokens.tokens):
            if token.kind != "name" or token.text in STATEMENTS or tokens.text(i + 1) != "(":
                continue
            body = tokens.closing[i + 1] + 1
            if tokens.text(body) == "{":
                found.append(Function(token.text, body, tokens.closing[body]))
        return found

    def called(self, i: int) -> bool:
        """Whether token i is the name of a function that is called there."""
        if self.tokens.tokens[i].kind != "name":
            return False
        if self.tokens.text(i + 1) != "<":
            return self.tokens.text(i + 1) == "("
        try:
            return self.tokens.text(self.tokens.skip_angles(i + 1)) == "("
        except MslError:  # it is less than something
            return False

    def names_that_reach(self, wanted) -> set[str]:  # type: ignore[no-untyped-def]
        """Names of functions that call, through others too, what is wanted; and what is."""
        calls = {
            (function.name, self.tokens.text(i))
            for function in self.functions
            for i in range(function.body, function.end)
            if self.called(i)
        }
        found = {name for _, name in calls if wanted(name)}
        while True:
            more = {caller for caller, name in calls if name in found} - found
            if not more:
                return found
            found |= more

    def holds(self, first: int, end: int, names: set[str] | None = None) -> bool:
        names = self.holding if names is None else names
        return any(self.tokens.text(i) in names and self.called(i) for i in range(first, end))

    def step(self, i: int) -> int:
        """Marks what starts at token i and may be done by some threads only."""
        text = self.tokens.text(i)
        if text in ("if", "for", "while"):
            first = self.tokens.closing[i + 1] + 1
            end = self.statement_end(first)
            if self.holds(i, end):
                self.mark("Branch" if text == "if" else "Round", first, end)
        elif text in ("do", "else"):
            end = self.statement_end(i + 1)
            if self.holds(i, end):
                self.mark("Branch" if text == "else" else "Round", i + 1, end)
            if text == "do" and self.holds(end, self.statement_end(end)):
                raise fail(self.tokens.tokens[end], "a simdgroup operation in `do while (...)`")
        elif text == "switch" and self.holds(i, self.statement_end(i)):
            raise fail(self.tokens.tokens[i], "a switch with simdgroup operations, please use if")
        elif text in self.holding and self.called(i):
            self.check_certain(i)
        return i + 1

    def statement_end(self, i: int) -> int:
        """The token after the statement that starts at token i."""
        text = self.tokens.text(i)
        if text == "{":
            return self.tokens.closing[i] + 1
        if text in ("for", "while", "switch", "if"):
            i = self.statement_end(self.tokens.closing[i + 1] + 1)
            return self.statement_end(i + 1) if text == "if" and self.is_else(i) else i
        if text == "do":
            return self.statement_end(self.statement_end(i + 1))
        while self.tokens.text(i) != ";":
            i = self.tokens.closing[i] + 1 if self.tokens.text(i) in OPENING else i + 1
        return i + 1

    def is_else(self, i: int) -> bool:
        return self.tokens.text(i) == "else"

    def mark(self, kind: str, first: int, end: int) -> None:
        self.number += 1
        barrier = self.holds(first, end, self.with_barrier)
        arguments = f"{self.number}, {'true' if barrier else 'false'}"
        text = f" softmetal::{kind} softmetal_{self.number}({arguments});"
        if self.tokens.text(first) == "{":
            self.inserted.append((self.tokens.tokens[first].end, text))
        else:
            self.inserted.append((self.tokens.tokens[first].begin, "{" + text + " "))
            self.inserted.append((self.tokens.tokens[end - 1].end, "}"))

    def check_certain(self, i: int) -> None:
        """An operation on the right of `&&`, `||` or `?` is a branch that nobody sees."""
        at, j = self.tokens.tokens[i], i - 1
        opening = {close: open_ for open_, close in self.tokens.closing.items()}
        skipping = False  # other arguments of the same call
        while self.tokens.text(j) not in (";", "{", "}"):
            text = self.tokens.text(j)
            if j in opening:
                j = opening[j]
            elif text in OPENING:
                skipping = False
            elif text == ",":
                skipping = True
            elif text in ("&&", "||", "?") and not skipping:
                raise fail(at, f"'{at.text}' after '{text}': only some threads may come to it")
            j -= 1
