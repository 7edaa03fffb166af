"""A sample of the model classes that tests/transformers/try_models.py tries.

Each is run with eager attention first, so what a refusal recommends is known to work.
"""

import sys
import warnings
from pathlib import Path

import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "transformers"))

import forge.transformers  # noqa: E402
import listing  # noqa: E402
import try_models  # noqa: E402
from small_models import registered  # noqa: E402, F401

EAGER = "use attn_implementation='eager'"
LIST = listing.read(ROOT / "docs" / "transformers.md")

EQUAL = {
    "bart": "BartForConditionalGeneration",
    "bert": "BertForSequenceClassification",
    "clip": "CLIPModel",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "bamba": "BambaForCausalLM",
    "deit": "DeiTModel",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "layoutlm": "LayoutLMModel",
    "llama4_text": "Llama4ForCausalLM",
    "markuplm": "MarkupLMModel",
    "mixtral": "MixtralForCausalLM",
    "modernbert": "ModernBertForMaskedLM",
    "mt5": "MT5Model",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "t5gemma": "T5GemmaForConditionalGeneration",
    "vit": "ViTModel",
    "wav2vec2": "Wav2Vec2Model",
    "whisper": "WhisperForConditionalGeneration",
}
WITHOUT_ATTENTION = {"mamba": "MambaForCausalLM", "resnet": "ResNetModel"}
OWN = "it computes attention itself and never calls forge's"
REFUSED = {
    "big_bird": ("BigBirdModel", OWN),
    "bloom": ("BloomForCausalLM", OWN),
    "convbert": ("ConvBertModel", OWN),
    "falcon": ("FalconForCausalLM", OWN),
    "gpt_neo": ("GPTNeoForCausalLM", OWN),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", OWN),
    "ibert": ("IBertModel", OWN),
    "luke": ("LukeModel", OWN),
    "megatron-bert": ("MegatronBertModel", OWN),
    "mpnet": ("MPNetModel", OWN),
    "mpt": ("MptForCausalLM", OWN),
    "nystromformer": ("NystromformerModel", OWN),
    "rembert": ("RemBertModel", OWN),
    "roformer": ("RoFormerModel", OWN),
    "squeezebert": ("SqueezeBertModel", OWN),
    "tapas": ("TapasModel", OWN),
    "visual_bert": ("VisualBertModel", OWN),
    "doge": ("DogeForCausalLM", "on the mask that only forge's attention reads"),
}


def outcome(model_type, name):
    with warnings.catch_warnings():
        try_models.quiet()
        return try_models.try_class(model_type, name)


def assert_listed(result):
    """The page, of the version that the tests pin, says the same of the class or of its type."""
    heading = LIST.get(result.cls, LIST.get(result.model_type))
    assert heading == listing.heading_of(result)


@pytest.mark.parametrize(("model_type", "name"), EQUAL.items(), ids=EQUAL)
def test_a_model_is_equal_to_eager(model_type, name):
    result = outcome(model_type, name)
    assert result.outcome == "equal", result
    assert_listed(result)


@pytest.mark.parametrize(("model_type", "name"), WITHOUT_ATTENTION.items(), ids=WITHOUT_ATTENTION)
def test_a_model_without_attention_is_left_as_it_is(model_type, name):
    result = outcome(model_type, name)
    assert result.outcome == "unused", result
    assert_listed(result)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_forge_cannot_serve_is_refused_in_words(model_type):
    name, words = REFUSED[model_type]
    result = outcome(model_type, name)
    assert result.outcome == "refused", result
    assert words in result.detail
    assert result.detail.endswith(EAGER)
    assert_listed(result)


WRONG = {
    "scale": lambda options: {**options, "scale": 1.02 * options["scale"]},
    "padding": lambda options: {**options, "key_start": None, "key_end": None},
    "window": lambda options: {**options, "window": (6, -1)},
    "causal": lambda options: {**options, "causal": False},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_model_that_is_silently_different_is_found(monkeypatch, change):
    attention = forge.transformers.attention
    monkeypatch.setattr(
        forge.transformers, "attention", lambda *qkv, **options: attention(*qkv, **change(options))
    )
    result = outcome("llama", "LlamaForCausalLM")
    assert result.outcome == "different", result


def test_every_refusal_comes_under_a_heading():
    assert not [name for name, heading in LIST.items() if heading.endswith("other")]
    assert not [name for name, heading in LIST.items() if "FAILED" in heading]
