"""ZeRO 3 (Rajbhandari et al. 2020, arXiv:1910.02054): as ZeRO 2, and each device keeps a share of the parameters too."""

mesh = dict(data=-1)
sharding = dict(zero=3, zero_axes=("data",))
