"""vLLM by itself: the other side of `python -m benchmarks.rollout`, in a process of its own.

One line of JSON on stdin is one batch: `{"prompts": [[ids]], "tokens": n}`. One line on stdout is
the answer: `{"tokens": n, "seconds": s}`.
"""

from __future__ import annotations

import json
import os
import sys
import time

ANSWER = "answer "
"""What a line of ours begins with: vLLM writes to stdout too."""


def main() -> None:
    """Load the engine that the first argument describes, then answer lines until there are none."""
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    print(f"{ANSWER}{{}}", flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        sampling = [
            SamplingParams(
                seed=seed,
                max_tokens=batch["tokens"],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for seed in range(len(batch["prompts"]))
        ]
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        began = time.monotonic()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answer = {
            "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
            "seconds": time.monotonic() - began,
        }
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
