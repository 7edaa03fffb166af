"""Draws a picture of attention in which one can see what each head does.

Eight query heads over two key/value heads. The keys of the first say where a word stands, those of
the second which word it is; each query head asks for something else.

    pip install ".[plot]"
    python examples/attention_map.py [picture.png]
"""

from __future__ import annotations

import sys

import forge
import numpy as np
from matplotlib import pyplot as plt

SENTENCE = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "rug"]
SHARPNESS = 4.0


def one_hot(index: np.ndarray, size: int) -> np.ndarray:
    """A row for each index; no 1 in it where the index is negative."""
    return (index[:, None] == np.arange(size)).astype(np.float32)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes q [1, T, 8, hd], k and v [1, T, 2, hd]."""
    T = len(SENTENCE)
    place = np.arange(T)
    words = np.array([SENTENCE.index(word) for word in SENTENCE])  # where it stands first
    before = np.concatenate([[-1], words[:-1]])
    queries = [
        one_hot(place, T),  # myself
        one_hot(place - 1, T),  # the word before me
        one_hot(place - 2, T) + one_hot(place - 3, T),  # the two before that
        one_hot(0 * place, T),  # the first word
        one_hot(words, T),  # my own word, wherever it stands
        one_hot(before, T),  # wherever the word before me stands
        one_hot(0 * place + SENTENCE.index("the"), T),  # every "the"
        0 * one_hot(words, T),  # nothing: all words alike
    ]
    keys = np.stack([one_hot(place, T), one_hot(words, T)], axis=1)[None]
    return SHARPNESS * np.stack(queries, axis=1)[None], keys, keys


def main() -> None:
    """Draws the picture."""
    path = sys.argv[1] if len(sys.argv) > 1 else "attention_map.png"
    q, k, v = inputs()
    _, saved = forge.attention_forward(
        q, k, v, causal=True, window=10, scale=1.0, kernel="materialized"
    )
    figure = forge.plot.attention_map(saved, tokens=SENTENCE)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    main()
