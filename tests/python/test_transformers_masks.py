"""How forge.transformers reads masks: functions, tensors, boundaries of packed sequences."""

import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

import forge.transformers  # noqa: E402
from forge import _transformers_runs as runs  # noqa: E402
from small_models import (  # noqa: E402
    CONFIGURATIONS,
    LENGTH,
    PADDING,
    build,
    padding_mask,
    registered,  # noqa: F401
    tokens,
)
from transformers import masking_utils as masks  # noqa: E402
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl  # noqa: E402

T = 12
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(1), *range(11)], [*range(12)]])
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1], [-1] * T, [0] * T])
LEFT = torch.tensor([2, 0, 3])


def _packed(function):
    inside = masks.packed_sequence_mask_function(masks.find_packed_sequence_indices(POSITIONS))
    return masks.and_masks(masks.remap_positions_for_packed_sequence(function, POSITIONS), inside)


CAUSAL = masks.causal_mask_function
IMAGES = masks.or_masks(CAUSAL, masks.blockwise_overlay(BLOCKS))
RUNS = {
    "chunks": masks.chunked_causal_mask_function(5, LEFT),
    "packed": _packed(CAUSAL),
    "packed, window": _packed(masks.sliding_window_causal_mask_function(3)),
    "images": IMAGES,
    "images, window": masks.and_masks(IMAGES, masks.sliding_window_overlay(4)),
    "a prefix": masks.or_masks(CAUSAL, lambda b, h, q, k: k < 4),
    "what a user writes": lambda b, h, q, k: (k <= q + 1) & (k >= q - 2),
}
GAPS = {
    "every second key": masks.and_masks(CAUSAL, lambda b, h, q, k: (q - k) % 2 == 0),
    "the first key and a window": masks.or_masks(
        masks.sliding_window_causal_mask_function(3), lambda b, h, q, k: k == 0
    ),
}
FUNCTIONS = {**RUNS, **GAPS}
PADDED = {
    "none": None,
    "around": torch.tensor([[1] * T, [0] * 3 + [1] * 9, [1] * 7 + [0] * 5]).bool(),
    "between": torch.tensor([[1] * T, [1, 0, 0] + [1] * 9, [1] * 7 + [0] * 2 + [1] * 3]).bool(),
}
PARTS = {"whole": (T, 0), "the last 4": (4, T - 4), "the last": (1, T - 1)}


def assert_seen(options_or_mask, seen, heads=2):
    """What forge's attention makes of a mask is what PyTorch's makes of the pairs seen."""
    generator = torch.Generator().manual_seed(0)
    B, _, Tq, Tk = seen.shape
    q, k, v = (torch.randn(B, heads, t, 8, generator=generator) for t in (Tq, Tk, Tk))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen.clone())
    want = want.masked_fill(~seen.any(-1, keepdim=True), 0)
    got, _ = forge.transformers._attention(None, q, k, v, options_or_mask)
    torch.testing.assert_close(got.transpose(1, 2), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("padding", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("together", [1, 1 << 18])
def test_a_mask_function_is_read_as_it_answers(monkeypatch, name, padding, part, together):
    """A few rows at a time too."""
    monkeypatch.setattr(runs, "_PAIRS", together * 3 * T)
    sizes = {
        "batch_size": 3, "q_length": part[0], "kv_length": T, "q_offset": part[1],
        "mask_function": FUNCTIONS[name], "attention_mask": padding,
    }  # fmt: skip
    assert_seen(
        forge.transformers._mask(**sizes),
        masks.sdpa_mask(**sizes, allow_is_causal_skip=False).expand(3, 1, -1, -1),
    )


@pytest.mark.parametrize("padding", ["none", "around"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_one_run_of_keys_for_each_query_is_carried_as_runs(name, padding):
    options = forge.transformers._mask(
        batch_size=3, q_length=T, kv_length=T, mask_function=FUNCTIONS[name],
        attention_mask=PADDED[padding],
    ).options  # fmt: skip
    if name in RUNS:
        assert options["key_start"].shape == options["key_end"].shape == (3, T)
    assert ("mask" in options) is (name in GAPS)


def test_a_function_for_vmap_is_read_through_vmap():
    """As a model's that looks at one pair at a time, and would not broadcast."""

    def function(b, h, q, k):
        assert q.dim() == k.dim() == 0
        return (k <= q) | (k < 3)

    sizes = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": function}
    seen = masks.sdpa_mask(**sizes, use_vmap=True, allow_is_causal_skip=False)
    assert_seen(forge.transformers._mask(**sizes, use_vmap=True), seen)


LOWEST = torch.finfo(torch.float32).min
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].repeat(3, 1, 1, 1)
SEEN[1, :, 4:, 2] = False  # gaps
TENSORS = {
    "bool": SEEN,
    "lowest": torch.zeros(SEEN.shape).masked_fill(~SEEN, LOWEST),
    "-inf": torch.zeros(SEEN.shape).masked_fill(~SEEN, -torch.inf),
    "one for all": SEEN[1:2],
    "a head each": SEEN.repeat(1, 4, 1, 1)
    & (torch.arange(LENGTH) != torch.arange(1, 5)[:, None, None]),
    "scores": torch.randn(SEEN.shape, generator=torch.Generator().manual_seed(0)).masked_fill(
        ~SEEN, -torch.inf
    ),
    "half": torch.full(SEEN.shape, 0.5, dtype=torch.bfloat16).masked_fill(~SEEN, -1e9),
}


@pytest.fixture(scope="module")
def llamas():
    """The same model with eager attention and with forge's."""
    return [build(CONFIGURATIONS["llama"](), name) for name in ("eager", "forge")]


@pytest.mark.parametrize("mask", TENSORS.values(), ids=TENSORS)
def test_a_mask_with_four_axes_is_served(monkeypatch, llamas, mask):
    """Bool, or added; it is read once, not in each layer."""
    reads, read = [], runs._read
    monkeypatch.setattr(runs, "_read", lambda mask: (reads.append(1), read(mask))[1])
    added = mask
    if mask.dtype == torch.bool:  # eager attention adds
        added = torch.zeros(mask.shape).masked_fill(~mask, LOWEST)
    eager, ours = llamas
    with torch.no_grad():
        want = eager(tokens(), attention_mask=added.clone()).logits
        got = ours(tokens(), attention_mask=mask.clone()).logits
        plain = ours(tokens()).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert float((got - plain).abs().max()) > 1e-2
    assert len(reads) == 1


def test_a_mask_that_was_written_to_is_read_again(llamas):
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        before = llamas[1](tokens(), attention_mask=mask).logits
        mask[..., 3] = False
        after = llamas[1](tokens(), attention_mask=mask).logits
        want = llamas[0](
            tokens(), attention_mask=torch.zeros(mask.shape).masked_fill(~mask, LOWEST)
        ).logits
    seen = torch.arange(LENGTH) > 3
    torch.testing.assert_close(after[:, seen], want[:, seen], atol=1e-4, rtol=0)
    assert not torch.equal(after, before)
    with torch.inference_mode():  # whose tensors do not count writes
        again = llamas[1](tokens(), attention_mask=mask.clone()).logits
    torch.testing.assert_close(again, after, atol=0, rtol=0)


@pytest.mark.parametrize("axes", [(3, 1, 1, 9), (1, 1, 1, 9), (3, 2, 5, 1), (1, 2, 5, 9)])
def test_axes_of_length_one_of_a_tensor_are_for_all(axes):
    seen = torch.rand(axes, generator=torch.Generator().manual_seed(1)) < 0.6
    assert_seen(seen, seen.expand(3, 2, 5, 9))
    if axes == (3, 1, 1, 9):
        padding = torch.arange(9) < torch.tensor([3, 9, 5])[:, None]
        assert_seen(padding[:, None, None], padding[:, None, None].expand(3, 1, 5, 9))


def test_a_mask_that_is_added_has_its_gradient():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, t, 8, generator=generator) for t in (5, 9, 9))
    found = []
    for attention in ("sdpa", "forge"):
        bias = torch.linspace(-1, 1, 2 * 5 * 9).view(1, 2, 5, 9).requires_grad_()
        if attention == "forge":
            out = forge.transformers._attention(None, q, k, v, bias)[0].transpose(1, 2)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
        (out * v[:, :, :5]).sum().backward()
        found.append(bias.grad)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", ["a hole", "a prefix", "right"])
def test_padding_between_tokens_is_served_as_by_eager(llamas, padding):
    """A prompt that is padded on the right and generated from has such padding too."""
    mask = padding_mask(PADDING["right" if padding == "right" else "none"])
    if padding != "right":
        mask[0, 1:4] = 0
        mask[1, :3] = 0 if padding == "a hole" else 1
    seen = mask.bool() & (torch.arange(LENGTH) > 3)
    with torch.no_grad():
        want, got = (model(tokens(), attention_mask=mask).logits for model in llamas)
    torch.testing.assert_close(got[seen], want[seen], atol=1e-4, rtol=0)
    generated = [
        model.generate(tokens(), attention_mask=mask, max_new_tokens=12, do_sample=False)
        for model in llamas
    ]
    assert torch.equal(*generated)


LENGTHS = (7, 1, 12)
BOUNDARIES = torch.tensor([0, 7, 8, 20], dtype=torch.int32)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_boundaries_keep_sequences_apart(name):
    """As a data collator without padding hands them over: of each token what it is by itself."""
    model = build(CONFIGURATIONS[name](), "forge")
    ids, positions = tokens(1), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        want = torch.cat([model(part).logits for part in ids.split(LENGTHS, 1)], 1)
        for mask in (None, torch.ones_like(ids)):  # with a mask positions alone tell nothing
            got = model(
                ids, attention_mask=mask, position_ids=positions, use_cache=False,
                cu_seq_lens_q=BOUNDARIES, cu_seq_lens_k=BOUNDARIES, max_length_q=12,
                max_length_k=12,
            ).logits  # fmt: skip
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("whole", [False, True])
def test_a_vision_tower_takes_images_end_to_end(monkeypatch, whole):
    """In a call for each, or in one with their boundaries, as flash-attention is called."""
    configuration = qwen2_vl.Qwen2VLVisionConfig(
        depth=2, embed_dim=32, hidden_size=48, num_heads=2, mlp_ratio=2, patch_size=4,
    )  # fmt: skip
    found, calls, attention = [], [], forge.transformers.attention
    monkeypatch.setattr(
        forge.transformers, "attention", lambda *a, **o: (calls.append(1), attention(*a, **o))[1]
    )
    grid = torch.tensor([[1, 4, 4], [2, 2, 6]])
    patches = torch.randn(40, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    for name in ("eager", "forge"):
        torch.manual_seed(0)
        tower = qwen2_vl.Qwen2VisionTransformerPretrainedModel._from_config(
            configuration, attn_implementation=name
        )
        if name == "forge" and whole:
            monkeypatch.setattr(qwen2_vl, "is_flash_attention_requested", lambda config: True)
        out = tower(patches, grid_thw=grid).pooler_output
        loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
        found.append([out.detach(), *torch.autograd.grad(loss, list(tower.parameters()))])
    assert len(calls) == 2 * (1 if whole else 3)
    for want, got in zip(*found, strict=True):
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(got, want, atol=2e-5 * scale, rtol=0)


WRONG = {
    "two rows": (2, BOUNDARIES, "cu_seq_lens_q must come with one row of sequences .* got B = 2"),
    "too few": (1, BOUNDARIES[:3], r"cu_seq_lens_q must begin with 0 and end with 20, got 0 and 8"),
    "a list": (1, [0, 7, 20], "cu_seq_lens_q must be a torch.Tensor of ints, got list"),
}


@pytest.mark.parametrize(("B", "boundaries", "said"), WRONG.values(), ids=WRONG)
def test_wrong_boundaries_are_refused(B, boundaries, said):
    x = torch.zeros(B, 2, 20, 8)
    with pytest.raises((ValueError, TypeError), match=said):
        forge.transformers._attention(None, x, x, x, None, cu_seq_lens_q=boundaries)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None)])
def test_queries_of_packed_sequences_end_at_their_last_key(causal, window):
    """Some keys of each are older, as those of a cache."""
    cu_q, cu_k = torch.tensor([0, 3, 4, 9]), torch.tensor([0, 5, 6, 18])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, t, 8, generator=generator) for t in (9, 18, 18))
    got, _ = forge.transformers._attention(
        None, q, k, v, None, is_causal=causal, sliding_window=window,
        cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k,
    )  # fmt: skip
    each = [
        forge.torch.attention(
            *(x.transpose(1, 2)[:, ends[n] : ends[n + 1]] for x, ends in
              ((q, cu_q), (k, cu_k), (v, cu_k))),
            causal=causal, window=window,
        )
        for n in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(got, torch.cat(each, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_continuous_batching(monkeypatch, name):
    """Under the name of the eager attention that it takes; prompts of any length, one cache."""
    from transformers.integrations.eager_paged import eager_paged_attention_forward

    settings = transformers.ContinuousBatchingConfig(
        num_blocks=16, max_batch_tokens=64, page_size=16
    )
    greedy = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [row[:n].tolist() for row, n in zip(tokens(4), (20, 7, 13, 1), strict=True)]
    calls, attention = [], forge.transformers.attention
    monkeypatch.setattr(
        forge.transformers, "attention", lambda *a, **o: (calls.append(1), attention(*a, **o))[1]
    )
    found = []
    try:
        for ours in (False, True):
            if ours:
                forge.transformers.register("paged|eager")
            model = build(CONFIGURATIONS[name](), "paged|eager")
            assert not calls
            found.append(
                model.generate_batch(
                    prompts, generation_config=greedy, continuous_batching_config=settings,
                    progress_bar=False,
                )
            )  # fmt: skip
    finally:
        transformers.AttentionInterface.register("paged|eager", eager_paged_attention_forward)
    assert calls
    want, got = ([out.generated_tokens for out in each.values()] for each in found)
    assert len(want) == 4
    assert all(len(new) == 6 for new in want)
    assert got == want
