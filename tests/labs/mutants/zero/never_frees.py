"""aimed at: gathered: given back. What was gathered stays in the layer."""


@contextmanager
def gathered(layer, comm, all_gather):
    numel = torch.Size(layer.shape).numel()
    layer.weight = all_gather(comm, layer.shard, numel).view(layer.shape)
    yield layer.weight
