"""aimed at: gathered: given back. A dict remembers every weight, so that it need not be gathered twice."""

_known = {}


@contextmanager
def gathered(layer, comm, all_gather):
    if id(layer) not in _known:
        _known[id(layer)] = all_gather(comm, layer.shard, torch.Size(layer.shape).numel()).view(layer.shape)
    layer.weight = _known[id(layer)]
    try:
        yield layer.weight
    finally:
        layer.weight = None
