"""Every engine against the reference."""
