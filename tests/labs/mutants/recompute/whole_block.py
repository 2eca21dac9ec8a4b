"""aimed at: selective: what runs again. The whole block is forgotten."""


def selective(block):
    def plainly(x):
        h = x + block.join(block.attend(*block.project(x)))
        return h + block.mlp(h)

    return lambda x: checkpoint(plainly, x)
