"""Data parallel: every device has the whole state and a share of the batch. For models that fit one device many times over."""

mesh = dict(data=-1)
sharding = dict(zero=0)
