"""Small models whose attention is more than a band of keys: what they are and what they read."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from optional import need

torch = need("torch")
transformers = need("transformers")

import small_models  # noqa: E402
from small_models import LENGTH, WINDOW, padding_mask, tokens  # noqa: E402

SIZES = {**small_models.SIZES, "num_hidden_layers": 2}
GEMMA = {**small_models.GEMMA, "num_hidden_layers": 2}

IMAGE = slice(6, 12)  # what stands for an image's patches, or, from 0, for a prefix
MIXED = ["sliding_attention", "full_attention"]
T5 = {
    "vocab_size": 97, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None, "initializer_factor": 1.5,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_local_experts": 2, "num_experts_per_tok": 2}  # all: which ones would be chance
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


class Case(NamedTuple):
    """A class, its configuration, and what it reads beside tokens and their padding."""

    cls: str
    configuration: Callable[[], Any]
    reads: Callable[[Any, Any], dict[str, Any]] = lambda ids, mask: {}
    padded: bool = True
    generates: bool = True


def _decoder(ids, mask):
    return {"decoder_input_ids": ids.flip(1)[:, :11]}


def _images(ids, mask):
    types = torch.zeros_like(ids)
    types[:, IMAGE] = 1
    types[1, 15:18] = 1  # a second image
    return {"token_type_ids": types * mask}


def _prefix(ids, mask):
    types = torch.ones_like(ids)
    types[:, : IMAGE.stop] = 0
    return {"token_type_ids": types}


def _packed(ids, mask):
    positions = torch.tensor([*range(7), *range(1), *range(12)])
    return {"position_ids": positions[None].expand(len(ids), -1)}


CASES = {
    "gpt_oss": Case(
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(
            **SIZES, **MOE, head_dim=12, sliding_window=WINDOW, layer_types=MIXED
        ),
    ),
    "granite_swa": Case(
        "GraniteSWAForCausalLM",
        lambda: transformers.GraniteSWAConfig(**SIZES, sliding_window=WINDOW, layer_types=MIXED),
    ),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            moe_intermediate_size=32, n_routed_experts=2, num_experts_per_tok=2, n_group=1,
            topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16,
            v_head_dim=12, first_k_dense_replace=1,
        ),
    ),
    "t5": Case("T5ForConditionalGeneration", lambda: transformers.T5Config(**T5), _decoder),
    "mt5": Case(
        "MT5ForConditionalGeneration",
        lambda: transformers.MT5Config(**{**T5, "initializer_factor": 0.7}),
        _decoder,
    ),
    "gemma3_images": Case(
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config={**GEMMA, "layer_types": MIXED}, vision_config=VISION,
            mm_tokens_per_image=4, image_token_index=96, boi_token_index=95, eoi_token_index=94,
            pad_token_id=0, eos_token_id=None, tie_word_embeddings=False,
        ),
        _images,
    ),
    "paligemma_prefix": Case(
        "PaliGemmaForConditionalGeneration",
        lambda: transformers.PaliGemmaConfig(
            text_config={**SIZES, "model_type": "gemma", "head_dim": 12}, vision_config=VISION,
            image_token_index=96, projection_dim=48, pad_token_id=0, eos_token_id=None,
            tie_word_embeddings=False,
        ),
        _prefix,
    ),
    "llama4_chunks": Case(
        "Llama4ForCausalLM",
        lambda: transformers.Llama4TextConfig(
            **SIZES, intermediate_size_mlp=64, head_dim=12, attention_chunk_size=WINDOW,
            num_local_experts=1, num_experts_per_tok=1, moe_layers=[],
            layer_types=["chunked_attention", "full_attention"],
        ),
    ),
    "llama_packed": Case(
        "LlamaForCausalLM", lambda: transformers.LlamaConfig(**SIZES), _packed, False, False
    ),
    "bert": Case(
        "BertForMaskedLM",
        lambda: transformers.BertConfig(
            vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, initializer_range=0.15, attention_probs_dropout_prob=0,
            hidden_dropout_prob=0, pad_token_id=0,
        ),
        generates=False,
    ),
}  # fmt: skip


def build(case, implementation, seed=0):
    """A model with parameters that matter: those that begin at zero or one are moved."""
    torch.manual_seed(seed)
    model = getattr(transformers, case.cls)._from_config(
        copy.deepcopy(case.configuration()), attn_implementation=implementation
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def inputs(case, padding, seed=1):
    """Tokens, their padding where the model takes it, and what else it reads."""
    ids, mask = tokens(len(padding), LENGTH, seed), padding_mask(padding)
    ids = ids.clamp(max=90)  # above are an image's
    given = {"input_ids": ids, **case.reads(ids, mask)}
    return {**given, "attention_mask": mask} if case.padded else given
