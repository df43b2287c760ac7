"""ZeRO 2 (Rajbhandari et al. 2020, arXiv:1910.02054): as ZeRO 1, and each device keeps a share of the gradients too."""

mesh = dict(data=-1)
sharding = dict(zero=2, zero_axes=("data",))
