"""The ground: the machine, ranks, worker processes, signals, files, text formats, and what can go wrong."""
