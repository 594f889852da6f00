"""Decoding in processes that can be ended: what a server needs for images of unknown origin."""
