"""Small language models for the tests of forge.transformers, what they read, and their set-up."""

import copy
from collections import defaultdict

import pytest
from optional import need

torch = need("torch")
transformers = need("transformers")

import forge.transformers  # noqa: E402

WINDOW = 7
LENGTH = 20  # of a prompt: longer than the window
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
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
    "gpt2": lambda: transformers.GPT2Config(
        **SIZES, n_inner=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    ),
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


def build(configuration, implementation, seed=0, **changes):
    configuration = copy.deepcopy(configuration)
    for name, value in changes.items():
        setattr(configuration, name, value)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        configuration, attn_implementation=implementation
    ).eval()


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


def squares(x):
    return float(x.double().square().sum())


class Distances:
    """Sums of squared distances from the float32 model, as parts of what it says."""

    def __init__(self):
        self.sums = defaultdict(lambda: [0.0, 0.0])

    def add(self, name, exact, eager, ours):
        whole = sum(squares(x) for x in exact)
        for i, found in enumerate((eager, ours)):
            apart = sum(squares(x - y) for x, y in zip(found, exact, strict=True))
            self.sums[name][i] += apart / whole

    def farther(self):
        """How many times as far as eager's forge's are."""
        return {name: (ours / eager) ** 0.5 for name, (eager, ours) in self.sums.items()}
