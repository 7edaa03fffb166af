"""Runs every case of ring_cases.py in processes that torch.distributed connects by gloo.

    python ring_processes.py FOLDER 2 3 4 8

Starts as many processes as each number says, forked from this one, which has imported everything:
importing costs more than the cases. Each rank leaves its results in FOLDER.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import forge.torch
import numpy as np
import torch
import torch.distributed as dist
from forge import _torch_ranks
from ring_cases import CASES, EXCHANGED, REPEATED, cases_of, part_of

DEADLINE = 8  # seconds, of the group in which a rank dies


def run_case(name, rank, size, group=None, function=forge.torch.ring_attention):
    case = CASES[name]
    (q, k, v, dout), sinks, options = part_of(name, rank, size)
    of_q, of_k = (getattr(torch, dtype) for dtype in case.dtypes)
    q, k, v = (
        torch.from_numpy(x).to(dtype).requires_grad_()
        for x, dtype in zip((q, k, v), (of_q, of_k, of_k), strict=True)
    )
    inputs = {"q": q, "k": k, "v": v}
    if sinks is not None:
        inputs["sinks"] = torch.from_numpy(sinks.copy()).requires_grad_()
    out = function(**inputs, **options, group=group)
    assert out.dtype == of_q
    out.backward(torch.from_numpy(dout).to(of_q))
    results = {"out": out.detach(), **{f"d{name}": x.grad for name, x in inputs.items()}}
    assert results["dq"].dtype == of_q
    assert results["dk"].dtype == results["dv"].dtype == of_k
    return {name: x.float().numpy() for name, x in results.items()}


def error_of(function):
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return ["none", "", time.monotonic() - start]


def mismatches(rank):
    """What ranks say that do not make one call; each leaves the group as it was."""
    x = torch.zeros(1, 4, 2, 8)
    ring = forge.torch.ring_attention
    found = {
        "window": error_of(lambda: ring(x, x, x, window=4 + (rank == 1))),
        "heads": error_of(lambda: ring(x, x, x if rank else x[..., :4])),
        "refused": error_of(lambda: ring(x, x, x.double() if rank == 1 else x)),
        "decode": error_of(lambda: forge.torch.decode_attention(x, x, x.clone().requires_grad_())),
        "gradient": error_of(lambda: ring(x, x, x.clone().requires_grad_(rank == 0))),
    }
    y = x.clone().requires_grad_()
    first, second = ring(y, y, y), ring(y, y, y)
    swapped = (first, second) if rank else (second, first)
    found["order of backwards"] = error_of(lambda: swapped[0].sum().backward())
    return found


def dying(rank, size):
    """The last rank ends in the middle of a call."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=DEADLINE))
    run_case("whole", rank, size, group)
    if rank == size - 1:
        sent = []
        begin = _torch_ranks.TorchTransport._begin

        def begin_or_end(self, *message):
            sent.append(message)
            if len(sent) == 3:
                os._exit(0)
            return begin(self, *message)

        _torch_ranks.TorchTransport._begin = begin_or_end
    return error_of(lambda: run_case("whole", rank, size, group))


def decoded(rank, size, dtype):
    """One query to a cache of 29 rows, split."""
    case = torch.Generator().manual_seed(5)
    q = torch.randn(2, 1, 4, 8, generator=case).to(dtype)
    k, v = torch.randn(2, 2, 29, 2, 8, generator=case).to(dtype)
    rows = slice(29 * rank // size, 29 * (rank + 1) // size)
    out = forge.torch.decode_attention(q, k[:, rows], v[:, rows], causal=True, softcap=9.0)
    assert out.dtype == dtype
    whole = forge.torch.attention(q, k, v, causal=True, softcap=9.0)
    return out.float().numpy(), whole.float().numpy()


def messages_of(name, rank, size):
    sent, isend = [], dist.isend

    def counted(tensor, *rest):
        sent.append(tensor.nbytes)
        return isend(tensor, *rest)

    dist.isend = counted
    run_case(name, rank, size)
    dist.isend = isend
    return sent


def work(folder, size, rank):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    arrays, said = {}, {"same bits": []}
    for name in cases_of(size):
        found = run_case(name, rank, size)
        arrays |= {f"{name}/{result}": x for result, x in found.items()}
    for name in REPEATED:
        found = {result: arrays[f"{name}/{result}"] for result in ("out", "dq", "dk", "dv")}
        again = run_case(name, rank, size)
        if all(np.array_equal(found[result], again[result]) for result in found):
            said["same bits"].append(name)
    if size in (2, 4):
        for name in EXCHANGED:
            found = run_case(name, rank, size, None, forge.torch.ulysses_attention)
            arrays |= {f"ulysses {name}/{result}": x for result, x in found.items()}
    for dtype in ("float32", "bfloat16"):
        pair = decoded(rank, size, getattr(torch, dtype))
        arrays |= {
            f"decode {dtype}/{which}": x for which, x in zip(("got", "want"), pair, strict=True)
        }
    for layout in ("zigzag", "contiguous"):
        said[layout] = forge.torch.ring_positions(51, layout=layout).tolist()
    said["sent"] = messages_of("window contiguous", rank, size)
    if size == 3:
        said["errors"] = mismatches(rank)
        said["after errors"] = error_of(lambda: run_case("sinks", rank, size))
    np.savez(folder / f"{size}-{rank}.npz", **arrays)
    if size == 3:
        said["dying"] = dying(rank, size)
    (folder / f"{size}-{rank}.json").write_text(json.dumps(said))
    if size != 3:  # there a rank is gone
        dist.barrier()


def start(folder, size):
    """Returns whether all ranks ended well."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            status = 1
            try:
                work(folder, size, rank)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    return not any(ended)


if __name__ == "__main__":
    ended_well = [start(Path(sys.argv[1]), int(size)) for size in sys.argv[2:]]
    sys.exit(not all(ended_well))
