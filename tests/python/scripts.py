"""Runs a piece of Python in a process of its own, where a crash or a changed environment shows."""

import os
import subprocess
import sys
import textwrap

PREAMBLE = """
import os, sys, threading
import numpy as np
"""


def run_script(script, timeout=120, check=True, **environment):
    """Runs `script` and returns the finished process; a value of None removes a variable.

    FORGE_ variables of the surrounding process are not passed on.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    env |= {name: value for name, value in environment.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)],
        env=env, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
