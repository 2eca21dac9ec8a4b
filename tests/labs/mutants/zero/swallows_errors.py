"""aimed at: gathered: given back. An error inside the block is lost."""


@contextmanager
def gathered(layer, comm, all_gather):
    layer.weight = all_gather(comm, layer.shard, torch.Size(layer.shape).numel()).view(layer.shape)
    try:
        yield layer.weight
    except Exception:
        pass
    finally:
        layer.weight = None
