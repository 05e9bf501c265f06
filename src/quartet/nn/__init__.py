"""What learner and ref share on top of torch. torch is imported inside the functions.

`model_inputs` lays ragged sequences out for a transformer, padded or packed; `hidden_states` runs
the transformer without its head; `selective_logprobs` turns hidden states into log-probabilities
of given tokens without a full [N, V] copy; `sequence_logprobs` does all three.
"""

from quartet.nn.inputs import ModelInputs, hidden_states, model_inputs
from quartet.nn.logprobs import LmHead, lm_head_of, selective_logprobs, sequence_logprobs

__all__ = [
    "LmHead",
    "ModelInputs",
    "hidden_states",
    "lm_head_of",
    "model_inputs",
    "selective_logprobs",
    "sequence_logprobs",
]
