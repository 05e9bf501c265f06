"""One contender in a process of its own: `python -m benchmarks.learner.worker` (see __main__)."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measured step."""

    contender: str
    loss: float
    grad_norm: float
    tokens_computed: int
    seconds: float
    cpu_seconds: float
    before_mib: float
    peak_mib: float

    @classmethod
    def from_json(cls, text: str) -> Measured:
        """Read what a worker printed last."""
        return cls(**json.loads(text))


def main(contender: str, model: str, batch_file: str, budget: str) -> None:
    """Run it and print one line of JSON."""
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    from benchmarks.learner.batch import Batch
    from benchmarks.learner.contenders import CONTENDERS, Task
    from benchmarks.learner.meter import Meter

    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    task = Task(
        model=model,
        batch=Batch.load(Path(batch_file)),
        budget=int(budget),
        vocabulary=AutoConfig.from_pretrained(model).vocab_size,
    )
    meter = Meter()
    outcome = CONTENDERS[contender](task, meter)
    measured = Measured(
        contender=contender,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        tokens_computed=outcome.tokens_computed,
        seconds=meter.seconds,
        cpu_seconds=meter.cpu_seconds,
        before_mib=meter.before_mib,
        peak_mib=meter.peak_mib,
    )
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main(*sys.argv[1:])
