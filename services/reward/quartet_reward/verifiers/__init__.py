"""Verifiers that come with the service. Each is a reward file like a user's, and runs as one.

They are named in `--reward.parts`, for example `1:math`.
"""
