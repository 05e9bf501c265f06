"""Generated from protos/. Never edited."""
