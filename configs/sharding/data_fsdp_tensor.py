"""Three dimensions: as fsdp_tensor, replicated over data, so that layers are gathered among fewer devices."""

mesh = dict(data=2, fsdp=-1, tensor=2)
sharding = dict(zero=3, zero_axes=("fsdp",), activations=dict(rules=dict(stream_length="tensor")))
