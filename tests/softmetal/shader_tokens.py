"""Tokens of a shader text, with file and line by its `#line` marks."""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<directive>\#(?:[^\n\\]|\\.|\\\n)*)
  | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<mark>\[\[|\]\]|::|->|[-+*/%&|^=!<>]=|&&|\|\||\+\+|--|.)
    """,
    re.VERBOSE | re.DOTALL,
)
LINE_MARK = re.compile(r'#\s*line\s+(\d+)(?:\s+"([^"]*)")?')
DOUBLE = re.compile(
    r"#\s*define\b.*?(?<![\w.])(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?(?![\w.])", re.DOTALL
)
OPENING = {"(": ")", "{": "}", "[": "]", "[[": "]]"}


class MslError(Exception):
    """A piece of a shader that is not understood, and where it stands."""


@dataclass(frozen=True)
class Token:
    kind: str  # string, number, name, mark
    text: str
    begin: int
    end: int
    file: str
    line: int


def fail(token: Token, message: str) -> MslError:
    return MslError(f"{token.file}:{token.line}: error: {message}")


def tokenize(text: str, name: str) -> list[Token]:
    tokens = []
    file, line, position = name, 1, 0
    while position < len(text):
        match = TOKEN.match(text, position)
        assert match is not None  # the last alternative takes anything
        kind, piece = str(match.lastgroup), match.group()
        if kind == "directive":
            mark = LINE_MARK.match(piece)
            if DOUBLE.search(piece):
                message = "a floating literal in a directive needs the suffix f"
                raise MslError(f"{file}:{line}: error: {message}")
            if mark:
                line, file = int(mark.group(1)) - 1, mark.group(2) or file
        elif kind != "space":
            tokens.append(Token(kind, piece, position, match.end(), file, line))
        line += piece.count("\n")
        position = match.end()
    return tokens


def text_hash(text: bytes) -> int:
    """FNV-1a, 64 bits, as the device computes it."""
    value = 0xCBF29CE484222325
    for byte in text:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


class Tokens:
    """The tokens of a text and which bracket closes which."""

    def __init__(self, text: str, name: str) -> None:
        self.whole = text
        self.tokens = tokenize(text, name)
        self.closing = self.match_brackets()

    def text(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def name(self, i: int) -> str:
        if i >= len(self.tokens) or self.tokens[i].kind != "name":
            raise fail(self.tokens[min(i, len(self.tokens) - 1)], "expected a name")
        return self.tokens[i].text

    def source(self, first: int, end: int) -> str:
        """The text of tokens [first, end)."""
        if first >= end:
            return ""
        return self.whole[self.tokens[first].begin : self.tokens[end - 1].end]

    def match_brackets(self) -> dict[int, int]:
        closing: dict[int, int] = {}
        stack: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.kind != "mark":
                continue
            if token.text in OPENING:
                stack.append(i)
            elif token.text in (")", "}", "]", "]]"):
                # `a[b[c]]` ends in two brackets that look like an attribute's end.
                if token.text == "]]" and stack and self.text(stack[-1]) == "[":
                    self.split(i)
                    return self.match_brackets()
                if not stack or OPENING[self.text(stack[-1])] != token.text:
                    raise fail(token, f"unmatched '{token.text}'")
                closing[stack.pop()] = i
        if stack:
            raise fail(self.tokens[stack[-1]], f"unmatched '{self.text(stack[-1])}'")
        return closing

    def split(self, i: int) -> None:
        old = self.tokens[i]
        half = old.begin + 1
        self.tokens[i : i + 1] = [
            Token("mark", old.text[0], old.begin, half, old.file, old.line),
            Token("mark", old.text[1], half, old.end, old.file, old.line),
        ]

    def skip_angles(self, i: int) -> int:
        """The token after a template argument list that opens at i."""
        depth, first = 0, i
        while i < len(self.tokens):
            text = self.text(i)
            if text in OPENING:
                i = self.closing[i]
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return i + 1
            elif text in (";", ">="):
                break
            i += 1
        raise fail(self.tokens[first], "template arguments that are not closed")

    def type_end(self, i: int) -> int:
        """The token after a type name without const, `*` and `&`."""
        words = ("unsigned", "signed", "long", "short", "int", "char")
        if self.text(i) in words:
            while self.text(i) in words:
                i += 1
            return i
        if self.text(i) == "typename":
            i += 1
        if self.text(i) == "::":
            i += 1
        while True:
            self.name(i)
            i += 1
            if self.text(i) == "<":
                i = self.skip_angles(i)
            if self.text(i) != "::":
                return i
            i += 1

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
