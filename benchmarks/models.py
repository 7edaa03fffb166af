"""Time whole Hugging Face models on the CPU with eager attention, sdpa and forge, side by side.

A training step and greedy generation of random models shaped like Gemma-2 and Mistral, and one
layer's attention alone. Writes a table (JSON and Markdown). See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forge._bench.command import free_stem
from forge._bench.machine import Load, describe, set_up_environment, usable_cpus

from benchmarks.__main__ import RESULTS

PEERS = ("eager", "sdpa", "forge")
MOST_ERROR = 1e-3  # of logits, before anything is timed


def configurations() -> dict[str, Any]:
    """Two shapes of about 100 million parameters, and what of each is Gemma's or Mistral's."""
    from transformers import Gemma2Config, MistralConfig

    common: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 640,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }
    return {
        # 8 query heads over 4, softcap, a window in every second layer
        "gemma2": Gemma2Config(
            **common, intermediate_size=2560, num_hidden_layers=10, num_attention_heads=8,
            num_key_value_heads=4, head_dim=128, query_pre_attn_scalar=128, sliding_window=1024,
        ),
        # 10 query heads over 2, a window in every layer
        "mistral": MistralConfig(
            **common, intermediate_size=2560, num_hidden_layers=13, num_attention_heads=10,
            num_key_value_heads=2, head_dim=64, sliding_window=1024,
        ),
    }  # fmt: skip


class Models:
    """One model under several attention implementations, with one set of weights."""

    def __init__(self, configuration: Any, peers: list[str]):
        import torch
        from transformers import AutoModelForCausalLM

        self.peers: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        first = None
        for peer in peers:
            torch.manual_seed(0)
            try:
                model = AutoModelForCausalLM.from_config(
                    copy.deepcopy(configuration), attn_implementation=peer
                )
                model(torch.ones(1, 2, dtype=torch.long))
            except ValueError as error:
                self.left_out[peer] = str(error).split(". ")[0]
                continue
            if first is not None:
                for own, shared in zip(model.parameters(), first.parameters(), strict=True):
                    own.data = shared.data
            first = first or model
            self.peers[peer] = model
        self.parameters = sum(x.numel() for x in self.peers[peers[0]].parameters())

    def check(self, ids: Any) -> dict[str, float]:
        """Largest difference of any logit to the first peer's."""
        import torch

        with torch.no_grad():
            logits = {peer: model.eval()(ids).logits for peer, model in self.peers.items()}
        want = next(iter(logits.values()))
        errors = {peer: float((got - want).abs().max()) for peer, got in logits.items()}
        for peer, error in errors.items():
            if error > MOST_ERROR:
                raise RuntimeError(f"{peer}: logits are off by {error:.3g}")
        return errors


def training_step(model: Any, ids: Any) -> Callable[[], None]:
    """Forward, backward and an SGD step of rate 0: the work of a step, the same weights after."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def generation(model: Any, ids: Any, count: int) -> Callable[[], None]:
    def generate() -> None:
        model.eval().generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    return generate


def attention_layers(model: Any, ids: Any) -> Callable[[], None]:
    """Forward and backward of the attention function of every layer, on the model's own tensors."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    peer = model.config._attn_implementation
    module = sys.modules[type(model).__module__]
    function = AttentionInterface().get_interface(peer, module.eager_attention_forward)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(layer: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [x.detach().requires_grad_() for x in arguments[:3]]
        calls.append((layer, (*tensors, *arguments[3:]), options))
        return function(layer, *arguments, **options)

    AttentionInterface.register("recorded", record)
    AttentionMaskInterface.register("recorded", AttentionMaskInterface()[peer])
    model.set_attn_implementation("recorded")
    with torch.no_grad():
        model.train()(ids, use_cache=False)
    model.set_attn_implementation(peer)
    douts = [torch.randn_like(function(layer, *a, **o)[0].detach()) for layer, a, o in calls]

    def run() -> None:
        for (layer, arguments, options), dout in zip(calls, douts, strict=True):
            out = function(layer, *arguments, **options)[0]
            torch.autograd.grad(out, arguments[:3], dout)

    return run


def interleaved(
    calls: dict[str, Callable[[], None]], rounds: int
) -> tuple[dict[str, list[float]], float | None]:
    """Seconds of each call, once a round, the order moving on; CPUs that others used meanwhile."""
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for call in calls.values():
        call()
    load = Load()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds, load.look()


def measure(name: str, configuration: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a record a job, as soon as it is there: an interrupted run keeps what it has."""
    import torch

    models = Models(configuration, options.peers)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, configuration.vocab_size, (1, options.length), generator=generator)
    errors = models.check(ids)
    jobs: dict[str, Callable[[Any], Callable[[], None]]] = {
        "attention, forward and backward": lambda model: attention_layers(model, ids),
        "training step": lambda model: training_step(model, ids),
        f"generation of {options.tokens} after {options.length}": lambda model: generation(
            model, ids, options.tokens
        ),
    }
    for job, make in jobs.items():
        calls = {peer: make(model) for peer, model in models.peers.items()}
        seconds, foreign = interleaved(calls, options.rounds)
        del calls
        record = {
            "model": name,
            "parameters": models.parameters,
            "job": job,
            "seconds": {peer: statistics.median(samples) for peer, samples in seconds.items()},
            "samples": seconds,
            "errors": errors,
            "left_out": models.left_out,
            "foreign_cpus": foreign,
        }
        shown = ", ".join(f"{peer} {s:.3g} s" for peer, s in record["seconds"].items())
        print(f"{name} {job}: {shown}", file=sys.stderr)
        yield record


def markdown(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    lines = [
        f"# Models, {results['date']}",
        "",
        f"{machine['cpu']}, {settings['threads']} threads; batch 1, T = {settings['length']}; "
        f"medians of {settings['rounds']} rounds in turn; "
        + ", ".join(f"{package} {version}" for package, version in results["versions"].items())
        + ".",
        "",
        "| model | what | "
        + " | ".join(f"{peer}, s" for peer in settings["peers"])
        + " | x eager | x sdpa |",
        "|---" * (len(settings["peers"]) + 4) + "|",
    ]  # fmt: skip
    for record in results["records"]:
        seconds = record["seconds"]
        cells = [f"{seconds[p]:.3g}" if p in seconds else "-" for p in settings["peers"]]
        ratios = [
            f"{seconds[p] / seconds['forge']:.2f}" if p in seconds and "forge" in seconds else "-"
            for p in ("eager", "sdpa")
        ]
        model = f"{record['model']} ({record['parameters'] / 1e6:.0f} M)"
        lines.append("| " + " | ".join([model, record["job"], *cells, *ratios]) + " |")
    lines.append("")
    for model, peer, reason in sorted(
        {(r["model"], peer, why) for r in results["records"] for peer, why in r["left_out"].items()}
    ):
        lines.append(f"- {peer} on {model}: {reason}")
    loads = [record["foreign_cpus"] for record in results["records"]]
    busiest = max((load for load in loads if load is not None), default=0.0)
    lines.append(f"- Other processes used up to {busiest:.2f} CPUs.")
    if results.get("interrupted"):
        lines.append("- Interrupted: some jobs are missing.")
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--models", default="gemma2,mistral", help="comma list")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma list")
    parser.add_argument("--length", type=int, default=2048, help="T of a batch, and of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(usable_cpus()))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument(
        "--quick", action="store_true", help="two layers, T = 256, one round: to see it run"
    )
    options = parser.parse_args(arguments)
    options.models, options.peers = options.models.split(","), options.peers.split(",")
    unknown = [peer for peer in options.peers if peer not in PEERS]
    if unknown:
        parser.error(f"--peers must be of {', '.join(PEERS)}, got {unknown[0]!r}")
    if min(options.length, options.tokens, options.rounds, options.threads) < 1:
        parser.error("--length, --tokens, --rounds and --threads must be at least 1")
    if options.quick:
        options.length, options.tokens, options.rounds = 256, 8, 1
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    set_up_environment(options.threads)
    import forge.transformers
    import torch
    import transformers

    forge.transformers.register()
    forge.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    forge.set_num_threads(options.threads)  # imported already, it has read its variable
    known = configurations()
    unknown = [name for name in options.models if name not in known]
    if unknown:
        print(f"error: --models must be of {', '.join(known)}, got {unknown[0]!r}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {
        "format": 1,
        "date": datetime.date.today().isoformat(),
        "machine": describe(),
        "settings": {
            name: getattr(options, name)
            for name in ("models", "peers", "length", "tokens", "rounds", "threads", "quick")
        },
        "versions": {
            "forge": forge.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "records": [],
    }
    try:
        for name in options.models:
            configuration = known[name]
            if options.quick:
                shorten(configuration)
            for record in measure(name, configuration, options):
                results["records"].append(record)
    except KeyboardInterrupt:
        print("interrupted: writing what there is", file=sys.stderr)
        results["interrupted"] = True
    write(results, options.out)
    return 130 if results.get("interrupted") else 0


def shorten(configuration: Any) -> None:
    """Two layers of every model are enough to see it run."""
    configuration.num_hidden_layers = 2
    if getattr(configuration, "layer_types", None):
        configuration.layer_types = configuration.layer_types[:2]


def write(results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, f"models-{results['date']}")
    texts = {".json": json.dumps(results, indent=1) + "\n", ".md": markdown(results)}
    for suffix, text in texts.items():
        path = stem.with_suffix(suffix)
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    sys.exit(main())
