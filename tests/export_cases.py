"""Write tests/python/cases as one flat file, for test programs that cannot read npz.

    python tests/export_cases.py OUTPUT

Little-endian, no padding; a name is an int64 length and that many bytes:

    "FORGECAS", int64 version, int64 cases, then each case:
    name; int64 B, Tq, Tk, H, Hkv, hd, causal, window_left, window_right; float64 scale, softcap
    B times int64 query_offset, key_start, key_end
    uint8 [B, Tq]: 1 where the row has no meaning
    float32 q, k, v, dout
    int64 answers, each: name, float64 tolerance, int64 length, float64 values
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "python" / "cases"
VERSION = 1
NAMES = {"O": "out", "P": "probs"}  # the cases' names of arrays, where they differ from forge's


def integers(*values):
    return struct.pack(f"<{len(values)}q", *values)


def name_bytes(text):
    return integers(len(text.encode())) + text.encode()


def array_bytes(array, dtype):
    return np.ascontiguousarray(array, dtype).tobytes()


def case_bytes(case, arrays):
    dims, params = case["dims"], case["params"]
    B, Tk = dims["B"], dims["Tk"]
    ranges = np.empty((B, 3), "<i8")
    ranges[:, 0] = params["q_offset"]
    ranges[:, 1] = arrays.get("k_start", 0)
    ranges[:, 2] = arrays.get("k_lens", Tk)
    ignored = arrays.get("ignore_rows", np.zeros((B, dims["Tq"])))
    parts = [
        name_bytes(case["id"]),
        integers(B, dims["Tq"], Tk, dims["H"], dims["Hkv"], dims["hd"], params["causal"]),
        integers(params["window_left"], params["window_right"]),
        struct.pack("<2d", params["scale"], params["softcap"]),
        ranges.tobytes(),
        array_bytes(ignored, "u1"),
        *(array_bytes(arrays[name], "<f4") for name in ("q", "k", "v", "dO")),
        integers(len(case["expected"]["arrays"])),
    ]
    for name in case["expected"]["arrays"]:
        parts += [
            name_bytes(NAMES.get(name, name)),
            struct.pack("<d", case["tol"][name]["atol_f32"]),
            integers(arrays[name].size),
            array_bytes(arrays[name], "<f8"),
        ]
    return b"".join(parts)


def main(output):
    index = json.loads((FOLDER / "index.json").read_text())
    parts = [b"FORGECAS", integers(VERSION, len(index))]
    for case in index:
        with np.load(FOLDER / case["file"]) as arrays:
            parts.append(case_bytes(case, {name: arrays[name] for name in arrays.files}))
    Path(output).write_bytes(b"".join(parts))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: export_cases.py OUTPUT")
    main(sys.argv[1])
