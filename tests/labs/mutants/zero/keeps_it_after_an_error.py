"""aimed at: gathered: given back. Without finally, an error leaves the weight where it was."""


@contextmanager
def gathered(layer, comm, all_gather):
    layer.weight = all_gather(comm, layer.shard, torch.Size(layer.shape).numel()).view(layer.shape)
    yield layer.weight
    layer.weight = None
