"""NVIDIA's command lines as data, and their translation into commands of Lockstep.

The tables of options are the YAML files in this folder, one for each example. `table` reads them,
`command_line` splits a command, `translation` gives the equivalent, `commands` writes its words,
`nearest` finds the recipe it names, and `page` prints the tables of docs/reference/nvidia-mxnet.md
and the other examples.
"""
