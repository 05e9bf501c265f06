"""Tokens a second of the rollout service, against the engine that it holds."""
