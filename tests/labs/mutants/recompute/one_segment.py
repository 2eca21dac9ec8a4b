"""aimed at: run_segments: peak. One segment whatever k is: little is kept, and all of it is there again in backward."""


def run_segments(layers, x, k):
    def through(x):
        for layer in layers:
            x = layer(x)
        return x

    return checkpoint(through, x)
