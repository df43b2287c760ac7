"""Fully sharded data parallel (Zhao et al. 2023, arXiv:2304.11277): the whole state is split over all devices, layers are
gathered as they are needed. The first to try where a model does not fit."""

mesh = dict(fsdp=-1)
sharding = dict(zero=3, zero_axes=("fsdp",))
