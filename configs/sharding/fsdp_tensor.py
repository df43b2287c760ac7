"""Two dimensions: fully sharded over fsdp, tensor parallel inside a host with the stream's length split between the parts of a
block. For models whose layers are too large, or batches too small, for fsdp alone."""

mesh = dict(fsdp=-1, tensor=2)
sharding = dict(zero=3, zero_axes=("fsdp",), activations=dict(rules=dict(stream_length="tensor")))
