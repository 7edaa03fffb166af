"""What forge.transformers refuses, in words, and that what it recommends there works."""

import copy
import pickle

import numpy as np
import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

import forge.transformers  # noqa: E402
from small_models import (  # noqa: E402
    CONFIGURATIONS,
    LENGTH,
    build,
    registered,  # noqa: F401
    tokens,
)
from transformers import masking_utils  # noqa: E402

EAGER = "use attn_implementation='eager'"


@pytest.fixture(scope="module")
def llamas():
    """The same model with forge's attention and with eager."""
    return [build(CONFIGURATIONS["llama"](), name) for name in ("forge", "eager")]


def refused(run, *arguments):
    with pytest.raises((ValueError, TypeError)) as caught, torch.no_grad():
        run(*arguments)
    return str(caught.value)


def mask_of(*values):
    return torch.tensor([[*values, *[1] * (LENGTH - len(values))]])


# What only eager attention serves: the call, and what the message says of it.
BY_EAGER = {
    "four axes of ints": (
        lambda model: model(
            tokens(1), attention_mask=torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.long)
        ),
        "LlamaAttention was handed a mask of torch.int64; one with four axes must be bool, True "
        "being visible, or of floating-point numbers",
    ),
    "weights": (
        lambda model: model(tokens(1), output_attentions=True),
        "output_attentions must not be given, forge has no attention weights as an output",
    ),
}


@pytest.mark.parametrize(("run", "said"), BY_EAGER.values(), ids=BY_EAGER)
def test_what_eager_attention_serves(llamas, run, said):
    ours, eager = llamas
    message = refused(run, ours)
    assert said in message
    assert message.endswith(EAGER)
    with torch.no_grad():
        assert run(eager) is not None


SMALL = {"vocab_size": 97, "pad_token_id": 0}
WITH_DROPOUT = {  # model type: (configuration, the name of its dropout)
    "llama": (CONFIGURATIONS["llama"], "attention_dropout"),
    "bert": (
        lambda: transformers.BertConfig(
            **SMALL, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
        ),
        "attention_probs_dropout_prob",
    ),
    "gpt2": (
        lambda: transformers.GPT2Config(**SMALL, n_embd=32, n_layer=1, n_head=2),
        "attn_pdrop",
    ),
}


@pytest.mark.parametrize(("configuration", "name"), WITH_DROPOUT.values(), ids=WITH_DROPOUT)
def test_dropout_is_refused_in_training_only(configuration, name):
    configuration = configuration()
    model = build(configuration, "forge", **{name: 0.1})
    model(tokens(1))
    message = refused(model.train(), tokens(1))
    assert message.startswith("attention_dropout must be 0 in training, got 0.1")
    assert f"{name}=0" in message
    assert message.endswith(EAGER)
    for implementation, dropout in (("forge", 0.0), ("eager", 0.1)):
        model = build(configuration, implementation, **{name: dropout}).train()
        model(tokens(1), labels=tokens(1)).loss.backward()


@pytest.mark.parametrize("name", ["indices", "block_indices", "head_mask"])
def test_what_a_layer_adds_to_attention_is_refused(name):
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"{name} must not be given, forge has no .*; {EAGER}$"):
        forge.transformers._attention(None, x, x, x, None, **{name: torch.zeros(2)})


@pytest.mark.parametrize("given", [torch.zeros(2), torch.zeros(2, 4, 4), 1.0], ids=str)
def test_a_position_bias_without_four_axes_is_refused(given):
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=rf"position_bias must be a tensor \[B, .*; {EAGER}$"):
        forge.transformers._attention(None, x, x, x, None, position_bias=given)


def carried(queries=9, keys=9):
    return forge.transformers._mask(batch_size=1, q_length=queries, kv_length=keys)


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4), (1, 4)])
def test_a_mask_for_other_lengths_is_refused(sizes):
    x = torch.zeros(1, 2, 4, 8)
    said = r"has scores \[1, 2, 4, 4\], and was handed a mask \[1, 1, {}, {}\]; ".format(*sizes)
    with pytest.raises(ValueError, match=said + EAGER):
        forge.transformers._attention(None, x, x, x, carried(*sizes))


@pytest.mark.parametrize("mask", [torch.zeros(4, 4), torch.ones(1, 4), [[1, 1]]], ids=repr)
def test_a_mask_without_four_axes_is_refused(mask):
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=rf"where \[B, heads, Tq, Tk\] is expected; {EAGER}$"):
        forge.transformers._attention(None, x, x, x, mask)


@pytest.mark.parametrize("axes", [(2, 1, 4, 4), (1, 3, 4, 4), (1, 1, 3, 4), (1, 1, 4, 5)])
def test_a_tensor_of_other_lengths_is_refused(axes):
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"has scores \[1, 2, 4, 4\], and was handed a mask"):
        forge.transformers._attention(None, x, x, x, torch.ones(axes, dtype=torch.bool))


# What a model may do to a mask of its own, with scores s.
USES = {
    "added": lambda m, s: s + m,
    "added, the other way round": lambda m, s: m + s,
    "added in place": lambda m, s: s.add_(m),
    "multiplied": lambda m, s: (1.0 - m) * -1e9,
    "inverted": lambda m, s: ~m,
    "compared": lambda m, s: m == 0,
    "counted": lambda m, s: m.sum(-1),
    "asked": lambda m, s: bool(m),
    "filled with": lambda m, s: s.masked_fill(m, 0.0),
    "chosen by": lambda m, s: torch.where(m, s, 0.0),
    "selected by": lambda m, s: s[m],
    "written through": lambda m, s: s.__setitem__(m, 0.0),
    "copied": lambda m, s: s.copy_(m),
    "expanded": lambda m, s: m.expand(1, 2, 9, 9),
    "repeated": lambda m, s: m.repeat(2, 1, 1, 1),
    "cut": lambda m, s: m[:, :, :, :4],
    "selected from": lambda m, s: m[..., 0],
    "reshaped": lambda m, s: m.view(9, 9),
    "cast": lambda m, s: m.float(),
    "cast by to": lambda m, s: m.to(torch.float32),
    "cast to another": lambda m, s: m.to(s),
    "concatenated": lambda m, s: torch.cat([m, m]),
    "another like it": lambda m, s: torch.zeros_like(m),
    "without its class": lambda m, s: m.as_subclass(torch.Tensor),
    "its data": lambda m, s: m.data,
    "its memory": lambda m, s: m.untyped_storage(),
    "in NumPy": lambda m, s: np.asarray(m),
    "in another library": lambda m, s: torch.from_dlpack(m),
    "as a list": lambda m, s: m.tolist(),
    "pickled": lambda m, s: pickle.dumps(m),
    "sdpa": lambda m, s: torch.nn.functional.scaled_dot_product_attention(s, s, s, m),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_stands_in_for_a_mask_cannot_be_used_as_one(use):
    scores = torch.ones(1, 2, 9, 9)
    with pytest.raises(ValueError, match=f"cannot serve this model: it uses .*; {EAGER}$"):
        use(carried(), scores)
    assert bool((scores == 1).all())


def test_what_stands_in_for_a_mask_can_be_handed_on():
    mask = forge.transformers._mask(
        batch_size=2, q_length=9, kv_length=9, attention_mask=torch.arange(9).expand(2, -1) > 1
    )
    assert (mask.shape, mask.dim(), mask.dtype) == ((2, 1, 9, 9), 4, torch.bool)
    for same in (
        mask.detach(), mask.clone(), mask.contiguous(), mask.to("cpu"), mask[:, :, :, :9],
        mask[..., :], copy.deepcopy(mask),
    ):  # fmt: skip
        assert same.shape == mask.shape
        assert same.options == mask.options


BLOOM = {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize("length", [5, 9])
def test_a_model_with_its_own_attention_is_refused_when_built(tmp_path, length):
    """And at its first forward, where its configuration is changed behind its back."""
    configuration = transformers.BloomConfig(**BLOOM)
    cls = transformers.AutoModelForCausalLM
    eager = build(configuration, "eager")
    eager.save_pretrained(tmp_path)
    for make in (
        lambda: cls.from_config(configuration, attn_implementation="forge"),
        lambda: cls.from_pretrained(tmp_path, attn_implementation="forge"),
    ):
        message = refused(make)
        assert "cannot serve BloomForCausalLM: it computes attention itself" in message
        assert message.endswith(EAGER)
    ids = tokens(1, length)
    with torch.no_grad():
        want = eager(ids).logits
        eager.set_attn_implementation("forge")  # transformers says that it stays eager
        torch.testing.assert_close(eager(ids).logits, want, rtol=0, atol=0)
    eager.config._attn_implementation = "forge"
    assert "it uses add on the mask" in refused(eager, ids)


def test_a_transformers_that_masks_in_another_way_is_refused(monkeypatch):
    monkeypatch.setattr(masking_utils, "sliding_window_overlay", lambda w: lambda b, h, q, k: k > q)
    with pytest.raises(RuntimeError, match=f"masks of transformers {transformers.__version__}"):
        forge.transformers.register()


def test_a_transformers_of_other_arguments_is_refused(monkeypatch):
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(RuntimeError, match=r"needs transformers 5\.24 or later.*q_offset"):
        forge.transformers.register()
