"""aimed at: gathered: cost. Everything travels twice."""

_right = gathered


def gathered(layer, comm, all_gather):
    all_gather(comm, layer.shard, torch.Size(layer.shape).numel())
    return _right(layer, comm, all_gather)
