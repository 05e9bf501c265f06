"""Datasets, chat templates and loss masks: from files to token ids, without torch."""

from quartet.data.load import Source, eval_source, train_source
from quartet.data.preference import load_pairs
from quartet.data.prompts import load_prompts
from quartet.data.report import Built, Dropped, Report
from quartet.data.samples import (
    PreferencePair,
    Prompt,
    TokenSample,
    epoch_order,
    pair_batch,
    token_batch,
)
from quartet.data.sft import load_sft
from quartet.data.tokenizer import fingerprint, fingerprint_of, load_tokenizer

__all__ = [
    "Built",
    "Dropped",
    "PreferencePair",
    "Prompt",
    "Report",
    "Source",
    "TokenSample",
    "epoch_order",
    "eval_source",
    "fingerprint",
    "fingerprint_of",
    "load_pairs",
    "load_prompts",
    "load_sft",
    "load_tokenizer",
    "pair_batch",
    "token_batch",
    "train_source",
]
