"""Decoding: from encoded bytes to pixels."""
