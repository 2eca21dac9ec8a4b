"""aimed at: run_segments: which layers run. Each segment is run again from layer 0 on, since only x is kept."""


def run_segments(layers, x, k):
    def upto(end):
        def run(x):
            x = x if end == 1 else checkpoint(upto(end - 1), x)
            return layers[end - 1](x)

        return run

    return checkpoint(upto(len(layers)), x)
