"""The demo: SFT, a reward model and PPO through all services, on a task whose success can be seen.

`python -m quartet.demo` (or `make demo`) makes a tiny language model from scratch, teaches it to
write short sentences, trains a reward model on pairs of sentences, and lets PPO raise its reward.
Whether that made the sentences more positive is then measured by something the training never saw:
the human-rated lexicon of the package vaderSentiment.
"""
