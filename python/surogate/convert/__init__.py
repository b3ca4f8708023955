"""Conversions from folder to folder: merging, exporting, quantizing, and adding tokens."""
