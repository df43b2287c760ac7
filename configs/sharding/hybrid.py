"""Hybrid sharding (Zhang et al. 2022, arXiv:2205.00119; Zhao et al. 2023, arXiv:2304.11277): fully sharded within a host,
replicated across hosts, so that layers are gathered over the fast links alone. Set fsdp to the number of devices of a host."""

mesh = dict(data=-1, fsdp=4)
sharding = dict(zero=3, zero_axes=("fsdp",))
