"""Launching: ranks are started, watched and ended; machines meet."""
