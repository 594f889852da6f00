"""The lowest layer: the machine, ranks, worker processes, signals, files, text formats, and errors."""
