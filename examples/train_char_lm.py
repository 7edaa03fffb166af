"""Trains a small character-level transformer on Python's standard library.

Everything but attention is plain NumPy (char_lm/model.py), in float32, and float64 where gradients
are checked; attention, forward and backward, is forge: 8 query heads over 2 key/value heads, a
sliding window in one layer, softcap in another.

    pip install ".[demo]"
    python examples/train_char_lm.py

About a minute on two cores; it ends with a picture, out/train_char_lm.png.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

INSTALL = {
    "forge": "pip install .",
    "numpy": "pip install numpy",
    "tqdm": "pip install tqdm",
    "matplotlib": "pip install matplotlib",
}
USAGE, INTERRUPTED = 2, 130  # exit codes, beside 0 and 1


def count(text: str) -> int:
    """A whole number from 0 up, for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number of 0 or more, got {text!r}")
    return int(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--steps", type=count, default=1000, help="training steps (default: %(default)s)")
    add("--seed", type=count, default=0, help="of everything random (default: %(default)s)")
    add("--out", type=Path, default=Path("out"), help="picture's folder (default: %(default)s)")
    add("--kernel", choices=["fused", "materialized"], help="default: forge's own")
    add("--backend", choices=["cpu", "metal"], help="default: the first there is")
    return parser.parse_args(argv)


def missing_package() -> str | None:
    """What to install where something is missing, or what is wrong with it."""
    for name, command in INSTALL.items():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name:
                return f"{name} is not installed; to install it: {command}"
            return f"{name} cannot be imported: {error}"
        except (ImportError, ValueError) as error:  # forge refuses a wrong FORGE_NUM_THREADS
            return f"{name} cannot be imported: {error}"
    return None


def unwritable(folder: Path) -> str | None:
    """Why the picture cannot be put in a folder; found out before training, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        return f"cannot write to --out {folder}: {getattr(error, 'strerror', None) or error}"


def unavailable(args: argparse.Namespace) -> str | None:
    """Why forge cannot run with this kernel and backend."""
    import forge
    import numpy as np

    x = np.zeros((1, 1, 1, 16), np.float32)
    try:
        forge.attention(x, x, x, causal=True, kernel=args.kernel, backend=args.backend)
    except (ValueError, RuntimeError) as error:
        return f"forge cannot run here: {error}"
    return None


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """While the picture is saved, a second Ctrl-C must not lose it."""
    if threading.current_thread() is not threading.main_thread():  # where none can arrive
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)


def fail(message: str, code: int) -> int:
    """Says what is wrong."""
    print(f"train_char_lm: {message}", file=sys.stderr)
    return code


def run(args: argparse.Namespace) -> int:
    """The job, once the command line is understood."""
    problem = missing_package()
    if problem:
        return fail(problem, 1)
    problem = unwritable(args.out) or unavailable(args)
    if problem:
        return fail(problem, USAGE)

    from char_lm.data import NoTextError
    from char_lm.session import Session

    session = Session(args, args.out / "train_char_lm.png")
    try:
        return session.run()
    except NoTextError as error:
        return fail(str(error), 1)
    except KeyboardInterrupt:
        with interrupts_ignored():
            session.save_picture()
            done = len(session.results.train)
            print(f"\ninterrupted after {done} of {args.steps} steps; picture: {session.picture}")
        return INTERRUPTED


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        return fail("interrupted before anything was computed: no picture", INTERRUPTED)
    except OSError as error:
        return fail(f"cannot write the picture: {error}", 1)


if __name__ == "__main__":
    sys.exit(main())
