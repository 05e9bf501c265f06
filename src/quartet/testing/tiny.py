"""Tiny models with a real tokenizer: a whole training pipeline in the seconds of a test.

`make_tiny_model` writes a folder that `transformers.from_pretrained`, every Quartet service and
vLLM open like any other: config, safetensors, tokenizer, chat template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (PAD_TOKEN, "<|im_start|>", EOS_TOKEN)
"""Ids 0, 1 and 2 of every tokenizer made here."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = (
    "The cat sat on the mat and looked at the rain.",
    "A small model learns a small task in a small time.",
    "What is two plus two? Two plus two is four.",
    "What is 3 + 4? 3 + 4 = 7. What is 12 + 30? 12 + 30 = 42.",
    "user asks a question, assistant gives an answer, system sets the scene.",
    "It was a good day, a happy day, the best day of the year.",
    "It was a bad day, a sad day, the worst day of the year.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100.",
    "The four players share one score: policy, reference, critic and reward.",
    "I would like to know how this works, and why it does not work without that.",
    "def add(left, right):\n    return left + right\n",
    "Ärger, naïve, 日本語, emoji 🙂: bytes are all there is.",
)
"""What the tokenizer of the tests is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """Shape of a tiny Llama. All numbers are counts, none has a unit."""

    hidden: int = 64
    """Width of the residual stream; a multiple of `heads`."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; divides `heads`."""
    intermediate: int = 128
    """Width of the feed-forward layer."""
    vocab: int = 384
    """Tokens, specials included; at least 259 (256 bytes and 3 specials)."""
    max_length: int = 512
    """Longest sequence in tokens."""


def train_tokenizer(
    texts: Iterable[str] = TRAINING_TEXT,
    *,
    vocab: int = 384,
    max_length: int = 512,
    add_prefix_space: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text encodes, and decodes to itself.

    Args:
        texts: What to learn merges from.
        vocab: Most tokens, the three specials and 256 bytes included.
        max_length: Longest sequence that its models take.
        add_prefix_space: Let the first word of a text be the same token as elsewhere.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    folder: str | Path,
    *,
    shape: TinyShape | None = None,
    head: Literal["lm", "reward"] = "lm",
    seed: int = 0,
    tied: bool = True,
    init_std: float = 0.08,
    texts: Iterable[str] = TRAINING_TEXT,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write a randomly initialised tiny Llama and its tokenizer as a HF folder.

    Args:
        folder: Where to write; made if it is not there.
        shape: Sizes; the default has about 100 thousand parameters.
        head: "lm" for a causal language model, "reward" for a sequence classifier of one label.
        seed: Seed of the weights: the same seed gives the same bytes.
        tied: Share the input and output embeddings.
        init_std: Standard deviation of the weights; large enough here that greedy decoding has
            clear winners, which comparisons between engines need.
        texts: What to train the tokenizer on.
        tokenizer: Take this tokenizer instead of training one.

    Returns:
        The folder, which `from_pretrained` opens.

    Example:
        >>> folder = make_tiny_model("/tmp/tiny")  # doctest: +SKIP
        >>> AutoModelForCausalLM.from_pretrained(folder)  # doctest: +SKIP
    """
    shape = shape or TinyShape()
    folder = Path(folder)
    if tokenizer is None:
        tokenizer = train_tokenizer(texts, vocab=shape.vocab, max_length=shape.max_length)
    model = _build(shape, head=head, seed=seed, tied=tied, init_std=init_std, tokens=tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _build(
    shape: TinyShape,
    *,
    head: Literal["lm", "reward"],
    seed: int,
    tied: bool,
    init_std: float,
    tokens: PreTrainedTokenizerFast,
) -> PreTrainedModel:
    """Initialise the weights from `seed` without touching the caller's random state."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=tied and head == "lm",
        initializer_range=init_std,
        bos_token_id=None,
        eos_token_id=tokens.get_vocab()[str(tokens.eos_token)],
        pad_token_id=tokens.get_vocab()[str(tokens.pad_token)],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if head == "reward":
            config.num_labels = 1
            return LlamaForSequenceClassification(config)
        return LlamaForCausalLM(config)
