"""What a person sees of a run: logs, Prometheus metrics, progress."""
