"""Data sets in object stores, which are read over a network.

`mirror` makes a local folder that stands for the data set: its files have the lengths and times of
the objects and no contents. `places` opens such a file; its bytes are fetched by `transfer` when
they are needed, or shortly before, and kept by `cached_object` on the disk until `eviction` gives
them up.
"""
