"""Small configurations of any model of transformers, made from the defaults of its class by rules.

Three recipes, from the smallest to the most careful: sizes set by their names (and what BY_TYPE
says of a type), all widths divided by one number (so that what must add up still does), and only
fewer layers and tokens.
"""

import dataclasses
import inspect
import re
from pathlib import Path

VOCABULARY = 99
# The first pattern that a field's name matches says what becomes of an integer there.
BY_NAME = (
    (r"(^|_)vocab_size$|^vocab_size", VOCABULARY),
    (r"layers?_to|layers?_offset|_layer$|kv_shared_layers|mtp|nextn", "keep"),
    (r"dense_(layers|replace)$", "keep"),
    (r"adapter_layers|residual_layers|feat_extract_layers|conv_layers|lstm_layers", "keep"),
    (r"_2d_position_embeddings$", 1024),
    (r"position_embeddings$|^n_positions$|(source|target)_positions$|^max_seq_len|^n_ctx$", 128),
    (r"(key_value|kv)_heads$|^num_kv|query_groups$", "pairs"),
    (r"(^|_)(n_?)?(num_)?(attention_|attn_|key_|value_)?heads?$", 4),
    (r"(^|_)layers?$|^depth$|_depth$|^num_blocks$|^n_layer", "layers"),
    (r"(qk_nope|qk_rope|^v|^index|linear_(key|value)|swa|global)_head_dim$", 8),
    (r"^qk_head_dim$", 16),
    (r"head_dim$|^d_kv$|^kv_channels$|^attention_key_size|_d_head$|^dim_head|^d_head$", 8),
    (r"lora_rank$", 16),
    (r"n_group$|topk_group$|num_expert_group$", 1),
    (r"experts_per_tok|^moe_topk$|^num_selected_experts|_top_?k$|^moe_k$", 2),
    (r"experts$", 4),
    (r"^attention_chunk_size$|sliding_window(_size)?$|^local_attention$", 5),
    (r"intermediate_size$|ffn_(hidden_)?(dim|size)$|^mlp_dim$|^d_ff$|^n_inner$|^d_inner$", 64),
    (r"(^|_)hidden_(size|dim)$|^d_model$|^n_embd$|^embed_dim$|^dim$|^emb_dim$", 32),
    (r"(projection|embedding|proj|output)_(dim|size)$|^out_hidden_size$|^word_embed_proj_dim$", 32),
    (r"^query_pre_attn_scalar$|^attention_multiplier$", 16),
    (r"^image_size$|^resolution$", 64),
    (r"^num_frames$", 4),
)  # fmt: skip
# What the defaults of a type leave open, or what must fit another field, in the smallest recipe.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BY_TYPE = {
    "autoformer": {"prediction_length": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "diffusion_gemma_text": {"global_head_dim": 16},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention"],
    },
    "informer": {"prediction_length": 4},
    "led": {"attention_window": 4},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {"d_latents": 32, "d_model": 32, "num_latents": 8},
    "reformer": {"is_decoder": True},
    "speech_to_text": {"num_conv_layers": 2},
    "time_series_transformer": {"prediction_length": 4},
}
WIDTH = re.compile(
    r"(hidden|intermediate|ffn|head|model|embed|embd|proj\w*|inner|mlp|lora_rank|channels|d_ff|d_kv|dim)"
    r"(_?(size|dim|sizes|dims|channels|rank))?$|_dim$|_size$|^dim$|^d_"
)
NOT_WIDTHS = re.compile(
    r"patch|kernel|image|window|chunk|vocab|^num_|stride|pool|stage|group|_factor|conv_size|input"
    r"|in_channels|mel|feature_size|codebook|block_size|bin|^d_state|_d_state|_d_conv"
)


def of(configuration, recipe):
    """Return a small configuration of the same class."""
    cls = type(configuration)
    known = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    fields = {field.name for field in known}
    given = {}
    layers, chosen = _layers(configuration)
    for name in fields:
        value = _value(configuration, name)
        if name in cls.sub_configs or _is_configuration(value):
            if _is_configuration(value):
                given[name] = of(value, recipe)
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif _is_token(name):
            small = _small_token(name, value)
            if small is not None:
                given[name] = small
        elif isinstance(value, (list, tuple)) and layers and len(value) == layers:
            given[name] = type(value)(value[i] for i in chosen)
        elif isinstance(value, int):
            given[name] = _integer(name, value, recipe, len(chosen))
        elif isinstance(value, (list, tuple)) and recipe != "layers":
            given[name] = _sequence(name, value)
    given = {
        name: value
        for name, value in given.items()
        if value != _value(configuration, name) or name in cls.sub_configs
    }
    if recipe == "named":
        if fields & {"kv_lora_rank"} and "num_key_value_heads" in given:
            given["num_key_value_heads"] = 4  # they share one latent, not heads
        if "head_dim" in fields and _value(configuration, "head_dim") is None:
            given["head_dim"] = 8
        if "vocab_size" in fields and _value(configuration, "vocab_size") is None:
            given["vocab_size"] = VOCABULARY
        given.update(BY_TYPE.get(cls.model_type, {}))
    rope = _rope(configuration, recipe)
    if rope is not None:
        given["rope_parameters"] = rope
    return cls(**given)


def _value(configuration, name):
    """Return a field as it was set; some classes refuse it, as layers have values of their own."""
    if name in configuration.__dict__:
        return configuration.__dict__[name]
    return getattr(configuration, name, None)


def _is_configuration(value):
    return hasattr(value, "sub_configs") and hasattr(value, "to_dict")


def _layers(configuration):
    """Return the default number of layers, and some layers that have one of each kind."""
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"):
        layers = configuration.__dict__.get(name)
        if isinstance(layers, int) and layers > 0:
            break
    else:
        return 0, [0, 1]
    seen, chosen = set(), []
    for i in range(layers):
        kinds = {
            (name, str(value[i]))
            for name, value in configuration.__dict__.items()
            if isinstance(value, (list, tuple)) and len(value) == layers
        }
        if not kinds <= seen and len(chosen) < 4:
            seen |= kinds
            chosen.append(i)
    while len(chosen) < min(2, layers):
        chosen.append(next(i for i in range(layers) if i not in chosen))
    return layers, sorted(chosen)


def _is_token(name):
    return re.search(r"_token_(id|index)s?$|_id$|_(idx|index)$|^(image|video|audio)_token", name)


def _small_token(name, value):
    if name == "pad_token_id" and value is None:
        return 0  # heads over the last token of a sequence look for it
    if isinstance(value, (list, tuple)):
        return [2]
    if not isinstance(value, int) or 0 <= value < 9:
        return None
    fixed = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return fixed.get(name, VOCABULARY - 2 - sum(map(ord, name)) % 40)


def _integer(name, value, recipe, layers):
    rule = next((what for pattern, what in BY_NAME if re.search(pattern, name)), None)
    if rule == "keep":
        return min(value, 1)
    if rule == "layers":
        return min(value, layers)
    if rule in (VOCABULARY, 128, 1024):
        return min(value, rule)
    if recipe == "layers":
        return value
    if recipe == "scaled":
        if WIDTH.search(name) and not NOT_WIDTHS.search(name) and value >= 16:
            return max(value // 16, 4) if value % 16 == 0 else value
        picture = rule in (5, 64) and re.search("window|image", name)
        return min(value, rule) if picture else value
    if rule == "pairs":
        return min(value, 2)
    if rule is None:
        return value
    return min(value, rule) if value > 0 else value


def _sequence(name, value):
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return value
    if re.search(r"depths$|num_block_repeats$|layers$", name):
        return type(value)([1] * len(value))
    return value


def _rope(configuration, recipe):
    """Return rope parameters whose sections add up to the smaller head size."""
    rope = getattr(configuration, "rope_parameters", None)
    by_layer = isinstance(rope, dict) and any(isinstance(x, dict) for x in rope.values())
    if recipe == "layers" or not rope or by_layer or not _has_sections(configuration):
        return None
    known = rope.get("mrope_section", [16, 24, 24])
    if recipe == "scaled":
        sections = [max(1, x // 16) for x in known]
    elif len(known) == 3:
        pairs = int(4 * rope.get("partial_rotary_factor", 1.0))
        sections = [pairs // 3, pairs // 3, pairs - 2 * (pairs // 3)]
    else:
        sections = [1] * 4
    return {**rope, "mrope_section": sections}


def _has_sections(configuration):
    """Whether a model turns parts of its heads by parts of a position: the defaults may not say."""
    folder = Path(inspect.getfile(type(configuration))).parent
    return any("mrope_section" in path.read_text() for path in folder.glob("modeling_*.py"))
