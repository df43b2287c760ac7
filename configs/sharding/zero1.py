"""ZeRO 1 (Rajbhandari et al. 2020, arXiv:1910.02054): data parallel with each device keeping a share of the optimizer state."""

mesh = dict(data=-1)
sharding = dict(zero=1, zero_axes=("data",))
