"""Hybrid sharding whose optimizer state is split across hosts as well: it is needed once per step only, where parameters are
gathered twice per microbatch. Compare the secondary partition of ZeRO++ (Wang et al. 2023, arXiv:2306.10209). Set fsdp to the
number of devices of a host."""

mesh = dict(data=-1, fsdp=4)
sharding = dict(zero=3, zero_axes=("fsdp",), optimizer=dict(spread="data"))
