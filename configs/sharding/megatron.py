"""Megatron's usual layout: tensor parallel with the stream's length split between the parts of a block (Korthikanti et al. 2022,
arXiv:2205.05198), and optimizer state split over data."""

mesh = dict(data=-1, tensor=2)
sharding = dict(zero=1, zero_axes=("data",), activations=dict(rules=dict(stream_length="tensor")))
