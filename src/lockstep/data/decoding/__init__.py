"""Encoded bytes to pixels."""
