"""Surogate trains and fine-tunes large language models."""
