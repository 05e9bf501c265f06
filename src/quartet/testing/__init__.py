"""Fakes, loopback servers and tiny models, for the tests of Quartet and of its users."""
