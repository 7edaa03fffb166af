"""forge.transformers: models built from configurations, with forge against eager attention."""

import copy

import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

import forge.transformers  # noqa: E402
from small_models import (  # noqa: E402
    CONFIGURATIONS,
    LENGTH,
    PADDING,
    WINDOW,
    build,
    padding_mask,
    registered,  # noqa: F401
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import masking_utils  # noqa: E402


@pytest.fixture(params=CONFIGURATIONS, scope="module")
def models(request):
    """The same model twice, with eager attention and with forge's."""
    configuration = CONFIGURATIONS[request.param]()
    eager, ours = (build(configuration, name) for name in ("eager", "forge"))
    assert ours.config._attn_implementation == "forge"
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)
    return eager, ours


def assert_logits_agree(got, want, mask):
    """Where there is a token; what a model says of padding means nothing."""
    assert got.shape == want.shape
    real = mask.bool()
    assert float((got - want)[real].abs().max()) < 1e-4
    assert float(want[real].std()) > 0.1


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
def test_logits_agree_with_eager(models, padding):
    mask = padding_mask(padding)
    with torch.no_grad():
        want, got = (model(tokens(), attention_mask=mask).logits for model in models)
    assert_logits_agree(got, want, mask)


def test_forge_does_the_attention(models, monkeypatch):
    """One call a layer, with the window and the softcap of that layer."""
    calls = []
    attention = forge.transformers.attention

    def spy(*tensors, **options):
        calls.append(options)
        return attention(*tensors, **options)

    monkeypatch.setattr(forge.transformers, "attention", spy)
    _, ours = models
    with torch.no_grad():
        ours(tokens())
    configuration = ours.config
    assert len(calls) == configuration.num_hidden_layers
    kinds = getattr(configuration, "layer_types", None)
    if kinds is None:
        sliding = getattr(configuration, "sliding_window", None) is not None
        kinds = ["sliding_attention" if sliding else "full_attention"] * len(calls)
    for kind, options in zip(kinds, calls, strict=True):
        assert options["causal"]
        assert options["window"] == ((WINDOW - 1 if kind == "sliding_attention" else -1), -1)
        assert options["softcap"] == getattr(configuration, "attn_logit_softcapping", None)
        assert "key_start" not in options


def test_gradients_agree_with_eager(models):
    """Of every parameter, on a padded batch, through checkpointed layers too."""
    ids, mask = tokens(), padding_mask(PADDING["left"])
    first = mask.cumsum(1) == 1  # what padding predicts the first token to be means nothing
    labels = ids.masked_fill((mask == 0) | first, -100)
    gradients = []
    for model, checkpointed in ((models[0], False), (models[1], False), (models[1], True)):
        model.train()
        if checkpointed:
            model.activation_checkpointing_enable()
        loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        if checkpointed:
            model.activation_checkpointing_disable()
        model.eval()
    for want, got, again in zip(*gradients, strict=True):
        scale = float(want.abs().max())
        assert scale > 0
        assert float((got - want).abs().max()) < 2e-5 * max(1.0, scale)
        torch.testing.assert_close(again, got, rtol=0, atol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_the_same_tokens_are_generated(models, cache, padding):
    """64 greedy steps of a batch, over a cache that the sliding layers outgrow."""
    generated = [
        model.generate(
            tokens(),
            attention_mask=padding_mask(PADDING[padding]),
            max_new_tokens=64,
            do_sample=False,
            cache_implementation=cache,
        )
        for model in models
    ]
    assert generated[0].shape == (3, LENGTH + 64)
    assert len(generated[0][:, LENGTH:].unique()) > 10
    assert torch.equal(*generated)


@pytest.mark.parametrize("pieces", [(3, 1, 9, 7), (9, 11), (1, 1, 18)])
def test_a_prompt_in_pieces(models, pieces):
    """Several tokens at once onto a cache that holds some: the offset is the cache's."""
    _, ours = models
    ids, mask = tokens(), padding_mask(PADDING["left"])
    with torch.no_grad():
        whole = ours(ids, attention_mask=mask).logits
        cache, found, end = transformers.DynamicCache(config=ours.config), [], 0
        for length in pieces:
            start, end = end, end + length
            output = ours(ids[:, start:end], attention_mask=mask[:, :end], cache=cache)
            found.append(output.logits)
    assert_logits_agree(torch.cat(found, 1), whole, mask)


def test_a_model_that_is_there_can_be_switched():
    model = build(CONFIGURATIONS["gemma2"](), "eager")
    with torch.no_grad():
        want = model(tokens()).logits
        model.set_attn_implementation("forge")
        got = model(tokens()).logits
    assert not torch.equal(got, want)  # another order of operations
    assert_logits_agree(got, want, torch.ones_like(tokens()))


def test_beams_agree_with_eager(models):
    want, got = (
        model.generate(
            tokens(2),
            attention_mask=padding_mask((4, 0)),
            max_new_tokens=12,
            num_beams=3,
            do_sample=False,
        )
        for model in models
    )
    assert torch.equal(got, want)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_no_tensor_of_the_size_of_the_scores_is_made(models):
    """No mask either; padding on both sides, so that a mask is called for."""
    T = 512
    largest = []
    for model in models:
        with torch.no_grad(), Largest() as found:
            model(tokens(2, T), attention_mask=padding_mask((100, -100), T), logits_to_keep=1)
        largest.append(found.numel)
    assert largest[0] >= T * T
    assert largest[1] < T * T


def test_an_encoder_sees_both_sides():
    configuration = transformers.BertConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, initializer_range=0.15,
    )  # fmt: skip
    logits = []
    mask = padding_mask(PADDING["right"])
    for name in ("eager", "forge"):
        torch.manual_seed(0)
        model = transformers.AutoModelForMaskedLM.from_config(
            copy.deepcopy(configuration), attn_implementation=name
        ).eval()
        with torch.no_grad():
            logits.append(model(tokens(), attention_mask=mask).logits)
    assert_logits_agree(logits[1], logits[0], mask)


def test_every_kind_of_mask_function_is_read_as_it_answers():
    """Against transformers' own masks, pair by pair, window by window."""
    functions = [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        *(masking_utils.sliding_window_causal_mask_function(w) for w in (1, 2, 5, 40)),
        *(masking_utils.sliding_window_bidirectional_mask_function(w) for w in (1, 2, 5, 40)),
    ]
    q_length, kv_length, offset = 6, 9, 4
    padding = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 7 + [0] * 2]).bool()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, t, 8, generator=generator) for t in (q_length, 9, 9))
    for function in functions:
        sizes = {
            "batch_size": 3, "q_length": q_length, "kv_length": kv_length, "q_offset": offset,
            "mask_function": function, "attention_mask": padding,
        }  # fmt: skip
        seen = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
        ours = forge.transformers._mask(**sizes)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen.clone())
        want = want.masked_fill(~seen.any(-1, keepdim=True), 0)
        got, _ = forge.transformers._attention(None, q, k, v, ours)
        torch.testing.assert_close(got.transpose(1, 2), want, atol=2e-6, rtol=1e-5)


def test_where_a_model_makes_no_mask_its_layer_says_whether_it_is_causal():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for causal in (False, True):
        got, _ = forge.transformers._attention(None, q, q, q, None, is_causal=causal)
        want = sdpa(q, q, q, is_causal=causal)
        torch.testing.assert_close(got.transpose(1, 2), want, atol=2e-6, rtol=1e-5)
    got, _ = forge.transformers._attention(None, q[:, :, :1], k, k, None, is_causal=True)
    want = sdpa(q[:, :, :1], k, k)
    torch.testing.assert_close(got.transpose(1, 2), want, atol=2e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"makes no mask for 5 queries and 9 keys \(window None\)"):
        forge.transformers._attention(None, q, k, k, None, is_causal=True)
    with pytest.raises(ValueError, match="window 3"):
        forge.transformers._attention(None, q, q, q, None, is_causal=True, sliding_window=3)
