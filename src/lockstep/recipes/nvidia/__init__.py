"""NVIDIA's command lines as data, and their translation into Lockstep commands.

The tables of options are the YAML files in this folder, one for each example. `table` reads them,
`command_line` splits a command, `translation` gives the equivalent, `commands` finds its recipe
and writes its words, and `docs/extensions/nvidia_tables.py` makes the tables of the reference.
"""
