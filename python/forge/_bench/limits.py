"""What the machine can do at most, measured in the rounds of the peers."""

from __future__ import annotations


class Limits:
    """Limits that nobody measures; ``make bench`` has loops in C++ for it."""

    target: str | None = None
    """The instruction set that the limit is measured with."""
    reason: str = ""
    """Why there are no figures, where there should be some."""

    def gflops(self) -> float | None:
        """Billions of operations a second in independent fused multiply-adds: the FMA peak."""
        return None

    def read_gbs(self) -> float | None:
        """Billions of bytes a second read from memory."""
        return None
