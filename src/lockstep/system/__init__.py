"""The lowest layer: the machine, ranks, worker processes, signals, files, formats and errors."""
