"""One run from text to picture: check, train, generate, compare, draw."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import forge
import numpy as np
from tqdm import tqdm

from char_lm import data
from char_lm.checks import check_gradients
from char_lm.comparison import LayerTimes, compare
from char_lm.model import Adam, CharLM, Config, initial_weights
from char_lm.report import AttentionMap, Results, pick_head, save_picture, speed_in_words

B = 8  # sequences a step
EVALUATED = 32  # sequences behind each loss before, during and after
MAP_CHARACTERS = 48
SAMPLE_CHARACTERS = 320
ROUNDS = 15  # of the comparison with NumPy
DETAILS = {"cpu_target": "code", "threads": "threads"}  # of forge.last_run(), in words


def layer_label(n: int, options: dict[str, Any]) -> str:
    """`layer 1: window 32`."""
    named = ", ".join(f"{name} {value:g}" for name, value in options.items())
    return f"layer {n + 1}: {named or 'plain causal'}"


class Session:
    """The state of a run, so that what there is can be drawn whenever it ends."""

    def __init__(self, args: Namespace, picture: Path) -> None:
        self.args, self.picture = args, picture
        self.results = Results()
        self.model: CharLM | None = None
        self.step_seconds = 0.0

    def run(self) -> int:
        """Everything in order; returns the exit code."""
        self.prepare()
        if not self.check():
            print("the gradients are off: not training on them")
            return 1
        self.train()
        self.show_losses()
        self.show_sample()
        self.show_times()
        self.save_picture()
        print(f"picture: {self.picture}")
        return 0

    def prepare(self) -> None:
        """Reads the text, makes the model, says what will run."""
        corpus = data.load_corpus()
        print(
            f"text: Python's standard library, {corpus.files} files, {len(data.SYMBOLS)} symbols;"
            f" {len(corpus.train):,} characters to train on, {len(corpus.held_out):,} held out"
        )
        self.corpus = corpus
        # Streams of their own, so that more steps do not change the sample of evaluation text.
        seeds = np.random.SeedSequence(self.args.seed).spawn(4)
        init, self.batches, evaluation, self.sampling = map(np.random.default_rng, seeds)
        c = self.config = Config(V=len(data.SYMBOLS))
        weights = initial_weights(c, init)
        self.model = CharLM(c, weights, self.args.kernel, self.args.backend)
        # Same weights, its own clock: the seconds of `model` are those of training alone.
        self.reader = CharLM(c, weights, self.args.kernel, self.args.backend)
        self.evaluated = {
            "train": data.batch(corpus.train, evaluation, EVALUATED, c.T),
            "held-out": data.batch(corpus.held_out, evaluation, EVALUATED, c.T),
        }
        print(
            f"model: {len(c.layers)} layers, {c.D} wide, {c.H} query heads over {c.Hkv} key/value"
            f" heads of {c.hd}, {weights.flat.size:,} weights; "
            + "; ".join(layer_label(n, options) for n, options in enumerate(c.layers))
        )

    def check(self) -> bool:
        """Says what runs, then checks one step's gradients; prints the verdict."""
        rng = np.random.default_rng(self.args.seed)
        tokens, targets = data.batch(self.corpus.train, rng, 2, 64)
        self.reader.loss(tokens, targets)
        ran = forge.last_run()
        asked = self.args.kernel or "fused"
        instead = "" if ran["kernel"] == asked else f" (standing in for {asked})"
        details = [f"{ran[key]} {word}" for key, word in DETAILS.items() if ran.get(key)]
        facts = [f"{ran['backend']} backend", f"{ran['kernel']} kernels{instead}", *details]
        print(f"forge {forge.__version__}: {', '.join(facts)}")
        print("checking one step's gradients ...", flush=True)
        verdict = check_gradients(self.reader, tokens, targets, rng)
        print(verdict)
        return verdict.ok

    def evaluate(self) -> dict[str, float]:
        """The losses on the fixed samples, in nats a character."""
        losses = {}
        for name, (tokens, targets) in self.evaluated.items():
            pieces = range(0, EVALUATED, B)
            parts = [self.reader.loss(tokens[i : i + B], targets[i : i + B]) for i in pieces]
            losses[name] = float(np.mean(parts))
        self.results.held_out.append((len(self.results.train), losses["held-out"]))
        return losses

    def train(self) -> None:
        """All steps, with a progress bar; a held-out point about every tenth of the way."""
        model, steps = self.model, self.args.steps
        self.before = self.after = self.evaluate()
        adam = Adam(steps, model.weights.flat.size)
        every = max(1, steps // 10)
        often = 0.1 if sys.stderr.isatty() else 5.0  # seconds: a log is not a terminal
        with tqdm(total=steps, desc="training", unit="step", mininterval=often) as bar:
            for step in range(1, steps + 1):
                tokens, targets = data.batch(self.corpus.train, self.batches, B, self.config.T)
                began = time.perf_counter()
                loss = model.loss_and_grads(tokens, targets)
                adam.update(model.weights.flat, model.grads.flat)
                self.step_seconds += time.perf_counter() - began
                self.results.train.append(loss)
                if step % every == 0 or step == steps:
                    self.after = self.evaluate()
                held_out = self.results.held_out[-1][1]
                rate = step * tokens.size / self.step_seconds
                shown = f"loss {loss:.2f}, held-out {held_out:.2f}, {rate:,.0f} tokens/s"
                bar.set_postfix_str(shown, refresh=False)
                bar.update()

    def show_losses(self) -> None:
        """Before and after, on the same text."""
        print(f"\nloss, nats per character (a uniform guess: {np.log(self.config.V):.2f})")
        for name, before in self.before.items():
            print(f"  {name:9} {before:.3f} before, {self.after[name]:.3f} after")

    def show_sample(self) -> None:
        """Text by the model: a prompt at once, then character by character from a KV cache."""
        prompt = data.encode(data.PROMPT)
        began = time.perf_counter()
        codes = self.reader.generate(prompt, SAMPLE_CHARACTERS, self.sampling)
        rate = SAMPLE_CHARACTERS / (time.perf_counter() - began)
        print(f"\nsample, {rate:,.0f} characters/s from the key/value cache")
        for line in (data.PROMPT + data.decode(codes)).split("\n"):
            print(f"  | {line}")

    def show_times(self) -> None:
        """Attention's share of training, and each layer beside plain NumPy on its own inputs."""
        seconds, total = self.model.seconds, self.step_seconds
        print("\ntime in attention")
        if total:
            share = sum(seconds.values()) / total
            rate = len(self.results.train) * B * self.config.T / total
            each = ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items())
            print(f"  training: {each}, {share:.0%} of {total:.1f} s ({rate:,.0f} tokens/s)")
        self.results.times = self.compare_with_numpy()
        print(f"  by turns with plain NumPy, B {B}, T {self.config.T}, ms, forward + backward:")
        for t in self.results.times:
            forge_ms, numpy_ms = (f"{w[0]:6.2f} + {w[1]:6.2f}" for w in (t.forge, t.numpy))
            print(
                f"    {t.label:22} forge {forge_ms}   NumPy {numpy_ms}"
                f"   forge's speed {sum(t.numpy) / sum(t.forge):.2f}x, same to {t.difference:.0e}"
            )
        print(f"  over all layers {speed_in_words(self.results.times)}\n")

    def compare_with_numpy(self) -> list[LayerTimes]:
        """Every layer's attention on q, k, v of a real batch."""
        model, rng = self.reader, np.random.default_rng(self.args.seed)
        tokens = data.batch(self.corpus.train, rng, B, self.config.T)[0]
        tapes = model.forward(tokens)[1][1]
        times = []
        for n, (attention_tape, _) in enumerate(tapes):
            saved = attention_tape[-1]
            do = rng.standard_normal(saved.q.shape, dtype=np.float32)
            label = layer_label(n, self.config.layers[n])
            qkv = (saved.q, saved.k, saved.v)
            times.append(compare(label, qkv, do, model.options(n), model.where, ROUNDS))
        return times

    def attention_map(self) -> AttentionMap:
        """One head of the model as it stands, over a piece of held-out text."""
        codes = data.snippet(self.corpus.held_out, MAP_CHARACTERS)
        layers = range(len(self.config.layers))
        probs = [self.reader.probs(n, codes[None])[0] for n in layers]
        n, h = pick_head(probs)
        label = f"{layer_label(n, self.config.layers[n])}, head {h + 1} of {self.config.H}"
        return AttentionMap(data.decode(codes), probs[n][h], label)

    def save_picture(self) -> None:
        """Draws what there is."""
        if self.model is not None:
            self.results.attention = self.attention_map()
        save_picture(self.results, len(data.SYMBOLS), self.picture)
