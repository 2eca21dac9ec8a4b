"""aimed at: selective: what runs again. The other part."""


def selective(block):
    def run(x):
        qkv, core = block.project(x), lab.reference["part"] != "attend"
        h = x + block.join(checkpoint(block.attend, *qkv) if core else block.attend(*qkv))
        return h + (block.mlp(h) if core else checkpoint(block.mlp, h))

    return run
