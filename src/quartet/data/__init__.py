"""Datasets, chat templates and loss masks: from files to token ids, without torch."""
