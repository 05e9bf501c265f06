#!/usr/bin/env bash
# Everything of smollm2-135m.yaml: model and data, training, results. Further arguments go to training.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python recipes/arithmetic_data.py
.venv/bin/quartet train ppo --config recipes/smollm2-135m.yaml "$@"
.venv/bin/python recipes/arithmetic_results.py runs/smollm2-135m
