"""Bytes a second of a weight push, against the transport and the disk by themselves."""
