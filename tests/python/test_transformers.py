"""forge.transformers: models built from configurations, with forge against eager attention."""

import copy

import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

import forge.transformers  # noqa: E402
from transformers import masking_utils  # noqa: E402

WINDOW = 7
LENGTH = 20  # of a prompt: longer than the window
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large weights: attention is sharp, and a wrong mask or scale moves the logits.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,  # tied ones repeat the last token
}
GEMMA = {**SIZES, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
CONFIGURATIONS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=12),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
}
PADDING = {"none": (0, 0, 0), "left": (11, 0, 3), "right": (-11, 0, -3)}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """With one thread: models this small gain nothing from two, and lose much on a busy machine."""
    forge.transformers.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(configuration, implementation, **changes):
    configuration = copy.deepcopy(configuration)
    for name, value in changes.items():
        setattr(configuration, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        configuration, attn_implementation=implementation
    ).eval()


@pytest.fixture(params=CONFIGURATIONS, scope="module")
def models(request):
    """The same model twice, with eager attention and with forge's."""
    configuration = CONFIGURATIONS[request.param]()
    eager, ours = (build(configuration, name) for name in ("eager", "forge"))
    assert ours.config._attn_implementation == "forge"
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)
    return eager, ours


@pytest.fixture
def llama():
    return build(CONFIGURATIONS["llama"](), "forge")


def tokens(batch=3, length=LENGTH, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=generator)


def padding_mask(padding, length=LENGTH):
    mask = torch.ones(len(padding), length, dtype=torch.long)
    for row, count in zip(mask, padding, strict=True):
        if count > 0:
            row[:count] = 0
        elif count < 0:
            row[count:] = 0
    return mask


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


def test_no_mask_of_the_size_of_the_scores_is_made(models):
    mask = masking_utils.create_causal_mask(
        models[1].config, torch.zeros(2, 4096, 8), torch.ones(2, 4096), None
    )
    assert mask.numel() < 32


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


def chunked(model):
    return masking_utils.create_chunked_causal_mask(
        model.config, torch.zeros(1, LENGTH, 8), None, None
    )


REFUSED = {
    "packed": (
        lambda model: model(
            tokens(1), position_ids=torch.arange(LENGTH)[None] % 10, use_cache=False
        ),
        "packed sequences by position_ids.*pad the batch",
    ),
    "boundaries": (
        lambda model: model(tokens(1), cu_seq_lens_q=torch.tensor([0, 10, 20])),
        "cu_seq_lens_q must not be given, forge has no packed sequences",
    ),
    "four axes": (
        lambda model: model(tokens(1), attention_mask=torch.zeros(1, 1, LENGTH, LENGTH)),
        r"attention_mask must be \[B, T\] of ones and zeros.*sdpa",
    ),
    "four axes of forge's size": (
        lambda model: model(tokens(1, 1), attention_mask=torch.zeros(1, 1, 1, 9)),
        r"attention_mask must be \[B, T\] of ones and zeros",
    ),
    "holes": (
        lambda model: model(
            tokens(1, 4), attention_mask=torch.tensor([[1, 0, 1, 1]])
        ),
        "zeros between ones in sequence 0.*pad on the left",
    ),
    "right padding while generating": (
        lambda model: model.generate(
            tokens(), attention_mask=padding_mask(PADDING["right"]), max_new_tokens=3
        ),
        "to generate, pad on the left",
    ),
    "weights": (
        lambda model: model(tokens(1), output_attentions=True),
        "output_attentions.*implementation='eager'$",  # sdpa has none either
    ),
    "half precision": (
        lambda model: model.to(torch.bfloat16)(tokens(1)),
        "must be torch.float32.*dtype=torch.float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "message"), REFUSED.values(), ids=REFUSED)
def test_what_forge_cannot_do_is_refused_with_advice(llama, run, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(llama)


def test_chunked_attention_is_refused():
    configuration = CONFIGURATIONS["llama"]()
    configuration.attention_chunk_size = 8
    with pytest.raises(ValueError, match="must be causal, sliding-window or bidirectional"):
        chunked(build(configuration, "forge"))


def test_dropout_is_refused_in_training_only():
    model = build(CONFIGURATIONS["llama"](), "forge", attention_dropout=0.1)
    model(tokens(1))
    with pytest.raises(ValueError, match=r"attention_dropout must be 0 in training, got 0\.1"):
        model.train()(tokens(1))


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "block_indices"])
def test_what_a_layer_adds_to_attention_is_refused(name):
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"{name} must not be given, forge has no .*sdpa"):
        forge.transformers._attention(None, x, x, x, None, **{name: torch.zeros(2)})


def test_values_of_another_head_size_are_refused():
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="value must have the head size of query, got 3 and 8"):
        forge.transformers._attention(None, x, x, x[..., :3], None)


def test_a_mask_for_other_lengths_is_refused():
    mask = forge.transformers._mask(batch_size=1, q_length=4, kv_length=5)
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="for 4 queries and 4 keys, got one for 4 and 5"):
        forge.transformers._attention(None, x, x, x, mask)


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
    with pytest.raises(ValueError, match="got None for 5 queries and 9 keys"):
        forge.transformers._attention(None, q, k, k, None, is_causal=True)
    with pytest.raises(ValueError, match="window 3"):
        forge.transformers._attention(None, q, q, q, None, is_causal=True, sliding_window=3)


def test_a_transformers_that_masks_in_another_way_is_refused(monkeypatch):
    monkeypatch.setattr(masking_utils, "sliding_window_overlay", lambda w: lambda b, h, q, k: k > q)
    with pytest.raises(RuntimeError, match=f"masks of transformers {transformers.__version__}"):
        forge.transformers.register()


def test_a_transformers_of_other_arguments_is_refused(monkeypatch):
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(RuntimeError, match=r"needs transformers 5\.24 or later.*q_offset"):
        forge.transformers.register()
