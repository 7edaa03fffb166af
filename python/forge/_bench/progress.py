"""How far a run is, on standard error: a bar where tqdm is installed, lines anyway."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any


class Progress:
    """The rounds of a run; a context manager."""

    def __init__(self, rounds: int):
        self.disturbed = 0
        self.bar: Any = None
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            return
        self.bar = tqdm(
            total=rounds, unit="round", dynamic_ncols=True, file=sys.stderr, leave=False
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def say(self, text: str) -> None:
        """Print a line beside the bar."""
        if self.bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.write(text, file=sys.stderr)

    def describe(self, text: str) -> None:
        """Say what is being done."""
        if self.bar is not None:
            self.bar.set_description(text)

    def round_done(self, counts: bool) -> None:
        """Move on by a round, or note that it has to be repeated."""
        self.disturbed += not counts
        if self.bar is not None:
            if self.disturbed:
                self.bar.set_postfix_str(f"{self.disturbed} rounds repeated, others use the CPUs")
            self.bar.update(counts)
