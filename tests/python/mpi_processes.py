"""Runs cases of ring_cases.py on the ranks of mpirun; each leaves what it found in FOLDER.

mpirun -n 4 python mpi_processes.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import forge
import forge.mpi
import numpy as np
from forge import _mpi_ranks
from mpi4py import MPI
from ring_cases import CASES, EXCHANGED, REPEATED, part_of

COMM = MPI.COMM_WORLD


def dtype_of(name):
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def run_case(name, way="ring"):
    case = CASES[name]
    (q, k, v, dout), sinks, options = part_of(name, COMM.rank, COMM.size)
    of_q, of_k = map(dtype_of, case.dtypes)
    q, dout, k, v = q.astype(of_q), dout.astype(of_q), k.astype(of_k), v.astype(of_k)
    forward = getattr(forge.mpi, f"{way}_attention_forward")
    backward = getattr(forge.mpi, f"{way}_attention_backward")
    out, saved = forward(COMM, q, k, v, sinks=sinks, **options)
    wanted = None if sinks is None else True
    gradients = backward(COMM, dout, saved, dsinks=wanted)
    assert out.dtype == gradients[0].dtype == of_q
    assert gradients[1].dtype == gradients[2].dtype == of_k
    names = ("dq", "dk", "dv") + ("dsinks",) * (sinks is not None)
    results = {"out": out, **dict(zip(names, gradients, strict=True))}
    return {name: np.asarray(x, np.float32) for name, x in results.items()}


def error_of(function):
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def errors():
    x, ring = np.zeros((1, 4, 2, 8), np.float32), forge.mpi.ring_attention_forward
    mine = COMM.rank == 1
    _, saved = ring(COMM, x, x, x)
    return {
        "window": error_of(lambda: ring(COMM, x, x, x, window=4 + mine)),
        "refused": error_of(lambda: ring(COMM, x, x, x.astype(float) if mine else x)),
        "dout": error_of(
            lambda: forge.mpi.ring_attention_backward(COMM, x[:, :3] if mine else x, saved)
        ),
        "dsinks": error_of(lambda: forge.mpi.ring_attention_backward(COMM, x, saved, dsinks=True)),
        "comm": error_of(lambda: ring("world", x, x, x)),
        "saved": error_of(lambda: forge.mpi.ulysses_attention_backward(COMM, x, saved)),
        "served on": error_of(lambda: run_case("sinks")),
    }


def decoded():
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 1, 4, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 29, 2, 8), np.float32)
    rows = slice(29 * COMM.rank // COMM.size, 29 * (COMM.rank + 1) // COMM.size)
    got = forge.mpi.decode_attention(COMM, q, k[:, rows], v[:, rows], causal=True)
    return got, forge.attention(q, k, v, causal=True)


def messages_of(name):
    sent = []
    send = _mpi_ranks.MpiTransport.send

    def counted(self, data, *rest):
        sent.append(data.nbytes)
        return send(self, data, *rest)

    _mpi_ranks.MpiTransport.send = counted
    run_case(name)
    _mpi_ranks.MpiTransport.send = send
    return sent


class Looks:
    """A communicator that counts how often it is asked for messages."""

    def __init__(self):
        self.count = 0

    def Iprobe(self, source, tag):
        self.count += 1


def looks_while_a_message_is_under_way():
    """How often before, during, and after it."""
    comm = Looks()
    progress = _mpi_ranks._Progress(comm)
    counts = [comm.count]
    progress.begin()
    time.sleep(0.2)
    counts.append(comm.count)
    progress.end()
    time.sleep(0.1)
    ended = comm.count
    time.sleep(0.1)
    return [*counts, comm.count - ended]


def main(folder):
    arrays, said = {}, {"same bits": []}
    for name in CASES:
        arrays |= {f"{name}/{result}": x for result, x in run_case(name).items()}
    for name in REPEATED:
        again = run_case(name)
        if all(np.array_equal(x, arrays[f"{name}/{result}"]) for result, x in again.items()):
            said["same bits"].append(name)
    if COMM.size in (2, 4):
        for name in EXCHANGED:
            found = run_case(name, "ulysses")
            arrays |= {f"ulysses {name}/{result}": x for result, x in found.items()}
    arrays["decode/got"], arrays["decode/want"] = decoded()
    said["positions"] = forge.mpi.ring_positions(COMM, 51).tolist()
    said["sent"] = messages_of("window contiguous")
    said["errors"] = errors()
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        said["looks"] = looks_while_a_message_is_under_way()
    np.savez(folder / f"{COMM.size}-{COMM.rank}.npz", **arrays)
    (folder / f"{COMM.size}-{COMM.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
