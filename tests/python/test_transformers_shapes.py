"""forge.transformers beyond bands: sinks, biases, value sizes and runs of keys, against eager."""

import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

from shaped_models import CASES, build, inputs  # noqa: E402
from small_models import PADDING, Distances, registered  # noqa: E402, F401

BF16 = torch.bfloat16
SEEDS = 24
FARTHER = 1.05  # than eager's distance from the float32 model
CAUSAL = [name for name, case in CASES.items() if case.generates]
EVERY = {name: PADDING if case.padded else ["none"] for name, case in CASES.items()}
WAYS = [(name, padding) for name, ways in EVERY.items() for padding in ways]


@pytest.fixture(scope="module")
def models():
    """Each model twice, with eager attention and with forge's, made when it is asked for."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = tuple(build(CASES[name], attention) for attention in ("eager", "forge"))
        return made[name]

    return of


def step(model, given):
    """The logits where there are tokens, and the gradient of every parameter that has one."""
    cache = {"use_cache": False} if model.can_generate() else {}
    logits = model.train()(**given, **cache).logits
    if "attention_mask" in given and "decoder_input_ids" not in given:
        logits = logits[given["attention_mask"].bool()]
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(logits.shape, generator=generator)
    loss = (logits.float() * weights).mean() + logits.float().logsumexp(-1).mean()
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found = zip(parameters, gradients, strict=True)
    return logits.detach(), {name: x for name, x in found if x is not None}


@pytest.mark.parametrize(("name", "padding"), WAYS, ids=["-".join(way) for way in WAYS])
def test_logits_and_all_gradients_agree_with_eager(models, name, padding):
    given = inputs(CASES[name], PADDING[padding])
    (want, of_eager), (got, of_forge) = (step(model, given) for model in models(name))
    assert float(want.std()) > 0.1
    assert float((got - want).abs().max()) < 1e-4 * max(1.0, float(want.abs().max()))
    assert list(of_eager) == list(of_forge)
    assert len(of_eager) > 15
    for parameter, want in of_eager.items():
        worst = float((of_forge[parameter] - want).abs().max())
        assert worst < 2e-5 * max(1.0, float(want.abs().max())), parameter


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_same_tokens_are_generated(models, name, padding):
    """24 greedy steps over the model's own cache, without pairs of tokens that were there."""
    given = inputs(CASES[name], PADDING[padding])
    given.pop("decoder_input_ids", None)
    greedy = {"max_new_tokens": 24, "do_sample": False, "no_repeat_ngram_size": 2}
    generated = [model.eval().generate(**given, **greedy) for model in models(name)]
    assert len(generated[0][:, -24:].unique()) > 10
    assert torch.equal(*generated)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_near_to_float32_as_with_eager(name):
    """Logits, and all gradients together: the root of the mean square over models and prompts."""
    case, distances = CASES[name], Distances()
    for seed in range(SEEDS):
        given = inputs(case, list(PADDING.values())[seed % 3 if case.padded else 0], seed)
        model = build(case, "eager", seed).to(BF16).float()  # weights that both types hold
        steps = [step(model, given)]
        for attention in ("eager", "forge"):
            model.set_attn_implementation(attention)
            steps.append(step(model.to(BF16), given))
        distances.add("logits", *([logits] for logits, _ in steps))
        distances.add("gradients", *(list(gradients.values()) for _, gradients in steps))
    assert {what: times for what, times in distances.farther().items() if times > FARTHER} == {}
