"""Tensor parallel (Shoeybi et al. 2019, arXiv:1909.08053): heads, hidden units and vocabulary are split over tensor, which should
stay within a host."""

mesh = dict(data=-1, tensor=2)
sharding = dict(zero=0)
