"""Try every model class of the installed transformers with attn_implementation="forge".

    python tests/transformers/try_models.py                      # all, in some 20 minutes
    python tests/transformers/try_models.py llama bloom          # these model types
    python tests/transformers/try_models.py --write docs/transformers.md

Each class is made small (tiny.py), given large random weights, and run on the same inputs (feed.py)
with eager attention and with forge's: at nine tokens and at fourteen, without padding and with it.
What forge gives must be equal, or it must say in words why it does not. Anything else is a failure.
"""

import argparse
import copy
import multiprocessing
import re
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import feed
import forge.transformers
import listing
import tiny
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LENGTHS = (9, 14)
PADDINGS = ("none", "left", "right")
NEW_TOKENS = 3
TOLERANCE = 1e-4
PARAMETERS = 40_000_000
SECONDS = 40  # a class; a type has ten times that

# What may become of a class, from the worst to the best.
OUTCOMES = ("different", "error", "crash", "refused", "partly", "equal", "unused", "skipped")
FAILURES = OUTCOMES[:3]
# Why a class was skipped.
PACKAGE = "a package is not installed"
CONFIGURATION = "no small configuration by the rules of tiny.py"
INPUTS = "no inputs in feed.py that eager attention runs on"
TIME = f"more than {SECONDS} s"


class NotMadeError(Exception):
    """No model of this class can be compared; says why."""

    def __init__(self, kind, reason):
        super().__init__(f"{kind}: {reason}")


class Result(NamedTuple):
    """What became of one class."""

    model_type: str
    cls: str
    outcome: str
    detail: str = ""


def classes():
    """Return the names of the model classes of every model type."""
    found = {}
    for name, mapping in vars(modeling_auto).items():
        if name.endswith(("_MAPPING_NAMES", "_TOKENIZATION_NAMES")):
            for model_type, names in mapping.items():
                for cls in (names,) if isinstance(names, str) else names:
                    if not cls.endswith("Config"):
                        found.setdefault(model_type, {})[cls] = None
    return {model_type: list(found[model_type]) for model_type in sorted(found)}


def _sharpen(model):
    """Weights so large that a wrong mask or scale moves what the model returns."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                fan_in = max(1, parameter.numel() // parameter.shape[0])
                parameter.copy_(noise * min(1.0, 1.2 / fan_in**0.5))
            elif parameter.dim() == 1:
                parameter.add_(0.1 * noise)


def _build(cls, configuration, implementation):
    torch.manual_seed(0)
    return cls._from_config(
        copy.deepcopy(configuration), attn_implementation=implementation, dtype=torch.float32
    ).eval()


def _leaves(value, found):
    """Collect the floating-point tensors of an output; caches and attention weights are none."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            found.append(value)
    elif isinstance(value, dict):
        for name, part in value.items():
            if "attentions" not in name and name != "cache" and "past_key_values" not in name:
                _leaves(part, found)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _leaves(part, found)
    return found


def _run(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**copy.deepcopy(inputs))
    found = _leaves(output, [])
    if not found:
        raise ValueError("the output has no numbers")
    if not all(bool(torch.isfinite(x).all()) for x in found):
        # -inf marks what a model does not choose; it must be so in both.
        found = [torch.nan_to_num(x, nan=7e7) for x in found]
    return found


def _distance(got, want, again, mask):
    """Return how far two outputs are apart, in units of what they hold; padding is left out.

    What moves with the tokens under the padding (``again`` has others) is padding too: a pooler
    that reads the first place, say. What a model makes of that means nothing.
    """
    worst = 0.0
    if len(got) != len(want):
        return float("inf")
    for one, other, moved in zip(got, want, again, strict=True):
        if one.shape != other.shape:
            return float("inf")
        still = (other - moved).abs() < TOLERANCE
        if mask is not None and one.shape[:2] == mask.shape:
            still[~mask.bool()] = False
        if bool(still.any()):
            scale = max(1.0, float(other.abs().median()) * 4)
            worst = max(worst, float((one - other)[still].abs().max()) / scale)
    return worst


def _with_other_padding(inputs):
    """Return the inputs with other tokens where the mask is zero."""
    mask = inputs.get("attention_mask")
    ids = next((name for name in ("input_ids", "inputs", "input_tokens") if name in inputs), None)
    if mask is None or ids is None or inputs[ids].shape != mask.shape:
        return inputs
    return {**inputs, ids: torch.where(mask.bool(), inputs[ids], inputs[ids].flip(0, 1))}


def _first_small_model(cls, configuration):
    """Return (configuration, model, way of feeding) of the first recipe that eager runs.

    Raises:
        NotMadeError: none does.
    """
    reasons, kind = [], CONFIGURATION
    for recipe in ("named", "scaled", "layers"):
        try:
            small = tiny.of(configuration, recipe)
            with torch.device("meta"):
                size = sum(p.numel() for p in _build(cls, small, "eager").parameters())
            if size > PARAMETERS:
                raise ValueError(f"{size} parameters")
            model = _build(cls, small, "eager")
            _sharpen(model)
        except ImportError as error:
            raise NotMadeError(PACKAGE, _brief(error)) from error
        except Exception as error:
            reasons.append(_brief(error))
            continue
        kind = INPUTS
        for way, inputs in enumerate(feed.ways(model, LENGTHS[0], "none")):
            try:
                _run(model, inputs)
                return small, model, way
            except ImportError as error:
                raise NotMadeError(PACKAGE, _brief(error)) from error
            except Exception as error:
                reasons.append(_brief(error))
    raise NotMadeError(kind, "; ".join(dict.fromkeys(reasons)))


def _brief(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()[:110]}"


def in_words(error):
    """Whether forge itself raised the error, and it says what to use."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = "/forge/" in frames[-1].filename.replace("\\", "/")
    return ours and bool(re.search("forge", str(error)) or "attn_implementation" in str(error))


def try_class(model_type, name):
    """Return the Result of one class."""
    try:
        cls, configuration = _class_and_configuration(model_type, name)
        small, eager, way = _first_small_model(cls, configuration)
    except NotMadeError as error:
        return Result(model_type, name, "skipped", str(error))
    try:
        ours = _build(cls, small, "forge")
    except Exception as error:
        return _refusal(model_type, name, error)
    ours.load_state_dict(eager.state_dict())
    return _compare(model_type, name, (eager, ours), way)


def _class_and_configuration(model_type, name):
    cls = getattr(transformers, name, None)
    try:
        if not hasattr(cls, "_from_config"):  # asking is an ImportError where a package is missing
            raise NotMadeError(CONFIGURATION, "transformers exports no model of this name")
        configuration = CONFIG_MAPPING[model_type]()
        if cls.config_class and not isinstance(configuration, cls.config_class):
            configuration = cls.config_class()  # a part of what the type has one for
    except NotMadeError:
        raise
    except ImportError as error:
        raise NotMadeError(PACKAGE, _brief(error)) from error
    except Exception as error:
        raise NotMadeError(CONFIGURATION, _brief(error)) from error
    return cls, configuration


def _refusal(model_type, name, error):
    outcome = "refused" if in_words(error) else "error"
    where = traceback.extract_tb(error.__traceback__)[-1]
    detail = (
        str(error) if outcome == "refused" else f"{error!r:.200} at {where.filename}:{where.lineno}"
    )
    return Result(model_type, name, outcome, detail)


def _compare(model_type, name, models, way):
    eager, ours = models
    calls, refusals, equal = [], [], 0
    attention = forge.transformers.attention
    forge.transformers.attention = lambda *a, **o: (calls.append(1), attention(*a, **o))[1]
    try:
        for run, length, padding in _trials(eager):
            inputs = list(feed.ways(eager, length, padding))[way]
            if padding != "none" and "attention_mask" not in inputs:
                continue
            try:
                want = run(eager, inputs)
                again = run(eager, _with_other_padding(inputs))
            except Exception:  # eager does not take it either
                continue
            try:
                got = run(ours, inputs)
            except Exception as error:
                refusals.append(_refusal(model_type, name, error))
                continue
            mask = inputs.get("attention_mask")
            mask = mask if mask is not None and mask.dim() == 2 else None
            distance = _distance(got, want, again, mask)
            if not distance < TOLERANCE:
                where = f"{run.__name__}, {length} tokens, padding {padding}: off by {distance:.2g}"
                return Result(model_type, name, "different", where)
            equal += 1
    finally:
        forge.transformers.attention = attention
    return _sum_up(model_type, name, (len(calls), refusals, equal))


def _trials(model):
    """Return (how to run it, tokens, padding) of every comparison."""
    trials = [(_run, length, padding) for length in LENGTHS for padding in PADDINGS]
    if model.can_generate() and model.main_input_name == "input_ids":
        trials += [(_generate, LENGTHS[0], "none"), (_generate, LENGTHS[0], "left")]
    return trials


def _generate(model, inputs):
    """Return the logits of some greedy steps, over the cache that the model takes by itself."""
    given = {name: x for name, x in inputs.items() if name != "decoder_input_ids"}
    with torch.no_grad():
        output = model.generate(
            **copy.deepcopy(given), max_new_tokens=NEW_TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return list(output.logits)


def _sum_up(model_type, name, found):
    calls, refusals, equal = found
    for refusal in refusals:
        if refusal.outcome == "error" or not equal:
            return refusal
    if refusals:
        return Result(model_type, name, "partly", refusals[0].detail)
    return Result(model_type, name, "equal" if calls else "unused")


class TooLong(BaseException):
    """Not an Exception: what tries one recipe after the other must not go on."""


def _alarm(*_):
    raise TooLong


def _try_type(model_type, names, pipe):
    """In a process of its own: whatever a model does, the next one starts afresh."""
    signal.signal(signal.SIGALRM, _alarm)
    for name in names:
        signal.alarm(SECONDS)
        try:
            result = try_class(model_type, name)
        except TooLong:
            result = Result(model_type, name, "skipped", f"{TIME}: gave up")
        except Exception as error:
            result = Result(model_type, name, "error", f"{error!r:.300}")
        signal.alarm(0)
        pipe.send(tuple(result))
    pipe.close()


def try_all(wanted):
    """Yield the Result of every class of these model types, a process for each type."""
    context = multiprocessing.get_context("fork")
    for model_type, names in wanted.items():
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_try_type, args=(model_type, names, theirs))
        process.start()
        theirs.close()
        left = list(names)
        try:
            while left and ours.poll(10 * SECONDS):
                result = Result(*ours.recv())
                left.remove(result.cls)
                yield result
        except EOFError:
            pass
        if process.is_alive() and left:
            process.kill()
        process.join()
        for name in left:
            yield Result(model_type, name, "crash", f"exit code {process.exitcode}")


def quiet():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    forge.transformers.register()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--all", action="store_true", help="print what went well too")
    parser.add_argument("--write", type=Path, help="put the list into this page, between its marks")
    options = parser.parse_args()
    if options.write and options.types:
        parser.error("--write needs all model types: the list would lose the others")
    quiet()
    known = classes()
    wanted = {name: known[name] for name in options.types} if options.types else known
    start, results = time.monotonic(), []
    for result in try_all(wanted):
        results.append(result)
        if result.outcome in FAILURES or options.types or options.all:
            print(*result, sep=" | ", flush=True)
    counts = {name: sum(r.outcome == name for r in results) for name in OUTCOMES}
    print(counts, f"{time.monotonic() - start:.0f} s")
    if options.write:
        listing.write(options.write, results)
    return 1 if any(r.outcome in FAILURES for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
