"""forge.transformers in half precision: as near to the float32 model as eager attention, or nearer.

Both round the same numbers outside of attention, so one model's distance is mostly chance. What is
compared is the root of the mean square over SEEDS models and prompts.
"""

import re

import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

import forge.transformers  # noqa: E402
from small_models import (  # noqa: E402
    CONFIGURATIONS,
    LENGTH,
    PADDING,
    Distances,
    build,
    padding_mask,
    registered,  # noqa: F401
    tokens,
)

BF16, F16 = torch.bfloat16, torch.float16
HOW = {"autocast": torch.float32, "bfloat16": BF16, "float16": F16}
SEEDS = 15  # a third of them with each padding
FARTHER = 1.05  # than eager's distance from the float32 model
# The logits of one model, and the gradients of one parameter, scatter: with five times as many
# models those of every parameter are within FARTHER too.
FARTHER_IN_PART = 1.2
NEAR = 0.15  # what rounding moves a logit by, where two of a model's are 1 apart


@pytest.fixture(params=CONFIGURATIONS, scope="module")
def ours(request):
    return build(CONFIGURATIONS[request.param](), "forge").to(BF16)


def training_step(model, ids, mask):
    """The logits where there are tokens, and the gradient of every parameter."""
    first = mask.cumsum(1) == 1  # what padding predicts the first token to be means nothing
    labels = ids.masked_fill((mask == 0) | first, -100)
    output = model(ids, attention_mask=mask, labels=labels, use_cache=False)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(output.loss, list(parameters.values()))
    found = {"logits": output.logits.detach()[mask.bool()]}
    found.update(zip(parameters, gradients, strict=True))
    return found


def kind(parameter):
    """A parameter's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".*.", parameter)


def steps(configuration, seed):
    """The float32 model's training step; eager's and forge's each way, with the same weights.

    Those are of bfloat16, which all three types hold.
    """
    ids, mask = tokens(seed=seed), padding_mask(list(PADDING.values())[seed % len(PADDING)])
    model = build(configuration, "eager", seed).to(BF16).float().train()
    exact = training_step(model, ids, mask)
    found = {}
    for how, dtype in HOW.items():
        for name in ("eager", "forge"):
            model.set_attn_implementation(name)
            with torch.autocast("cpu", dtype=BF16, enabled=how == "autocast"):
                found[how, name] = training_step(model.to(dtype), ids, mask)
    return exact, found


@pytest.fixture(params=CONFIGURATIONS, scope="module")
def farther(request):
    """How many times as far from float32 as eager's forge's logits and gradients are, each way."""
    sums = {how: Distances() for how in HOW}
    for seed in range(SEEDS):
        exact, found = steps(CONFIGURATIONS[request.param](), seed)
        parameters = list(exact)[1:]
        for how, distances in sums.items():
            three = exact, found[how, "eager"], found[how, "forge"]
            distances.add("logits", *([x["logits"]] for x in three))
            distances.add(f"logits, model {seed}", *([x["logits"]] for x in three))
            distances.add("gradients", *([x[name] for name in parameters] for x in three))
            for name in parameters:
                distances.add(kind(name), *([x[name]] for x in three))
    return {how: distances.farther() for how, distances in sums.items()}


@pytest.mark.parametrize("how", HOW)
def test_a_training_step_is_as_near_to_float32_as_with_eager(farther, how):
    """Logits, all gradients together; looser each model's logits and each parameter's gradients."""
    found = dict(farther[how])
    assert found.pop("logits") <= FARTHER
    assert found.pop("gradients") <= FARTHER
    assert {name: times for name, times in found.items() if not times <= FARTHER_IN_PART} == {}


@pytest.mark.parametrize("how", HOW)
def test_layers_round_what_float32_attention_gives_and_nothing_else(monkeypatch, ours, how):
    """The same bits of logits and gradients where attention is forge's in float32, rounded."""
    attention = forge.transformers.attention
    model = build(ours.config, "forge").to(HOW[how]).train()

    def wide(*given, **options):
        half = F16 if how == "float16" else BF16
        with torch.autocast("cpu", enabled=False):
            return attention(*(x.to(half).float() for x in given), **options).to(half)

    found = []
    for function in (attention, wide):
        monkeypatch.setattr(forge.transformers, "attention", function)
        with torch.autocast("cpu", dtype=BF16, enabled=how == "autocast"):
            found.append(training_step(model, tokens(), padding_mask(PADDING["left"])))
    for name, got in found[0].items():
        torch.testing.assert_close(got, found[1][name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_generated_tokens_are_those_of_a_whole_forward(ours, cache, padding):
    """Greedy, over caches in bfloat16, which the sliding layers outgrow."""
    mask = padding_mask(PADDING[padding])
    generated = ours.generate(
        tokens(),
        attention_mask=mask,
        max_new_tokens=24,
        do_sample=False,
        cache_implementation=cache,
        return_dict_in_generate=True,
    )
    assert {layer.keys.dtype for layer in generated.past_key_values.layers} == {BF16}
    ids, new = generated.sequences, generated.sequences[:, LENGTH:]
    assert new.shape == (3, 24)
    assert len(new.unique()) > 10
    mask = torch.cat([mask, torch.ones_like(new)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # as generate counts them
    with torch.no_grad():
        logits = ours(ids, attention_mask=mask, position_ids=positions).logits[:, LENGTH - 1 : -1]
    assert 0.5 < float(logits.float().std()) < 2
    behind = logits.amax(-1) - logits.gather(-1, new[..., None])[..., 0]
    assert float(behind.max()) <= NEAR


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["loaded", "autocast"])
def test_attention_runs_in_the_models_dtype_or_in_autocasts(monkeypatch, ours, dtype, autocast):
    """Nothing is widened on the way: one call a layer, half precision out."""
    model = build(ours.config, "forge").to(torch.float32 if autocast else dtype)
    calls = []
    attention = forge.transformers.attention

    def spy(*given, **options):
        out = attention(*given, **options)
        calls.append((*(x.dtype for x in given), out.dtype))
        return out

    monkeypatch.setattr(forge.transformers, "attention", spy)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=autocast):
        logits = model(tokens()).logits
    assert bool(torch.isfinite(logits).all())
    assert len(calls) == model.config.num_hidden_layers
    assert {call[-1] for call in calls} == {dtype}
    if not autocast:
        assert set(calls) == {(dtype,) * 4}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_checkpoint_in_half_precision_is_loaded_as_it_is(tmp_path, ours, dtype):
    build(ours.config, "forge").to(dtype).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    half, wide = (
        load(tmp_path, attn_implementation="forge", dtype=given) for given in (dtype, torch.float32)
    )
    assert {x.dtype for x in half.parameters()} == {dtype}
    with torch.no_grad():
        got, want = (model(tokens()).logits for model in (half, wide))
    assert got.dtype == dtype
    assert float((got.float() - want).abs().max()) < NEAR * float(want.std())
